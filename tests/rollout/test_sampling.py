"""A token is drawn from the distribution that the options leave, by one number."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_rlhf.rollout import SamplingOptions
from lit_rlhf.rollout.sampling import sample_tokens

OPTIONS = SamplingOptions(max_new_tokens=8)
PROBABILITIES = torch.tensor([0.5, 0.3, 0.15, 0.05])


def shares(options: SamplingOptions, seen: list[int], n_new: int = 0) -> list[float]:
    """How often each token comes for numbers that cover [0, 1) evenly: its probability."""
    n = 10_000
    uniforms = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    tokens, logprobs = sample_tokens(
        PROBABILITIES.log().expand(n, 4),
        uniforms,
        options,
        eos_token_ids=torch.tensor([0]),
        seen=torch.tensor(seen).expand(n, len(seen)),
        n_new=torch.full((n,), n_new),
    )
    if logprobs is not None:  # the log-prob of each token is the log of how often it comes
        for token in tokens.unique():
            assert logprobs[tokens == token].exp().tolist() == pytest.approx(
                (tokens == token).double().mean().expand(int((tokens == token).sum())).tolist(),
                abs=1e-3,
            )
    assert (logprobs is None) == (not options.do_sample or not options.off_policy_options)
    return [round(float((tokens == token).double().mean()), 3) for token in range(4)]


def test_each_option_leaves_the_probabilities_by_hand() -> None:
    assert shares(SamplingOptions(max_new_tokens=5), [3]) == [0.5, 0.3, 0.15, 0.05]
    # 0.5, 0.3 and 0.15 squared, over their sum with 0.05 squared: 0.365
    cold = SamplingOptions(max_new_tokens=5, temperature=0.5)
    assert shares(cold, [3]) == [0.685, 0.247, 0.062, 0.007]
    assert shares(SamplingOptions(max_new_tokens=5, top_k=2), [3]) == [0.625, 0.375, 0.0, 0.0]
    assert shares(SamplingOptions(max_new_tokens=5, top_k=1), [3]) == [1.0, 0.0, 0.0, 0.0]
    assert shares(SamplingOptions(max_new_tokens=5, top_k=9), [3]) == [0.5, 0.3, 0.15, 0.05]
    assert shares(SamplingOptions(max_new_tokens=5, top_p=0.7), [3]) == [0.625, 0.375, 0.0, 0.0]
    # a token stays with at least this share of 0.5
    assert shares(SamplingOptions(max_new_tokens=5, min_p=0.4), [3]) == [0.625, 0.375, 0.0, 0.0]
    assert shares(SamplingOptions(max_new_tokens=5, min_p=0.2), [3]) == [0.526, 0.316, 0.158, 0.0]
    assert shares(SamplingOptions(max_new_tokens=5, min_p=1.0), [3]) == [1.0, 0.0, 0.0, 0.0]
    # the temperature comes first: 0.247 is less than 0.4 times 0.685
    cold = SamplingOptions(max_new_tokens=5, temperature=0.5, min_p=0.4)
    assert shares(cold, [3]) == [1.0, 0.0, 0.0, 0.0]
    assert shares(SamplingOptions(max_new_tokens=5, do_sample=False), [3]) == [1.0, 0.0, 0.0, 0.0]
    # log-probs are negative, so a penalty of 2 doubles them: 0.5 becomes 0.25, over 0.75
    penalized = SamplingOptions(max_new_tokens=5, repetition_penalty=2.0)
    assert shares(penalized, [0, 0]) == [0.333, 0.4, 0.2, 0.067]
    # EOS is token 0: the others share what is left
    late = SamplingOptions(max_new_tokens=5, min_new_tokens=2)
    assert shares(late, [3], n_new=1) == [0.0, 0.6, 0.3, 0.1]
    assert shares(late, [3], n_new=2) == [0.5, 0.3, 0.15, 0.05]
    # the temperature comes before the nucleus: the first token alone has 0.685, or the two 0.8
    options = SamplingOptions(max_new_tokens=5, temperature=0.5, top_p=0.6)
    assert shares(options, [3]) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ()),
        ({"temperature": 0.7}, ()),
        ({"top_k": 1}, ("top_k",)),
        ({"min_p": 0.1}, ("min_p",)),
        ({"top_p": 0.9, "repetition_penalty": 1.2}, ("top_p", "repetition_penalty")),
        ({"do_sample": False}, ("do_sample",)),
        ({"min_new_tokens": 1}, ("min_new_tokens",)),
        ({"min_new_tokens": 8}, ("min_new_tokens",)),  # as long as it can be
    ],
)
def test_off_policy_options_are_named(changes: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert replace(OPTIONS, **changes).off_policy_options == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: expected an integer >= 1, got 0"),
        ({"temperature": 0.0}, "temperature: expected a finite number > 0"),
        ({"top_p": 0.0}, "top_p: expected"),
        ({"top_p": 1.1}, "top_p: expected"),
        ({"top_k": -1}, "top_k: expected"),
        ({"min_p": -0.1}, r"min_p: expected a number in \[0, 1\], got -0.1"),
        ({"min_p": 1.1}, "min_p: expected"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: expected"),
        ({"min_new_tokens": 9}, "min_new_tokens: expected 0 to max_new_tokens = 8, got 9"),
        ({"min_new_tokens": -1}, "min_new_tokens: expected 0 to max_new_tokens = 8, got -1"),
    ],
)
def test_options_out_of_range_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(OPTIONS, **changes)


def draws(logits: Tensor, uniform: float, **options: Any) -> list[int]:
    """The first token of each row, where no token ends a response."""
    n_rows = len(logits)
    sampled = sample_tokens(
        logits,
        torch.full((n_rows,), uniform, dtype=torch.float64),
        SamplingOptions(max_new_tokens=1, **options),
        eos_token_ids=torch.tensor([], dtype=torch.long),
        seen=torch.zeros(n_rows, 1, dtype=torch.long),
        n_new=torch.zeros(n_rows, dtype=torch.long),
    )
    return sampled.token_ids.tolist()


@pytest.mark.parametrize(
    ("logits", "uniform", "options", "expected"),
    [
        # a token without probability is not drawn, at either end
        *(([-torch.inf, 0.0, -torch.inf], end, {}, 1) for end in (0.0, 1 - 2**-53)),
        # one below the precision of float32 can be
        ([0.0, math.log(1e-9)], 1 - 2e-9, {}, 0),
        ([0.0, math.log(1e-9)], 1 - 2e-10, {}, 1),
        # top-k of a single row
        (PROBABILITIES.log().tolist(), 0.9, {"top_k": 2}, 1),
        # penalties are computed in float32: in bfloat16 8 / 1.3 is 6.15625 too
        ([8.0, 6.15625], 0.5, {"repetition_penalty": 1.3, "do_sample": False}, 1),
        ([torch.nan], 0.5, {}, 0),
    ],
)
def test_a_number_draws_its_token(
    logits: list[float], uniform: float, options: dict[str, Any], expected: int
) -> None:
    dtype = torch.bfloat16 if "repetition_penalty" in options else torch.float32
    assert draws(torch.tensor([logits], dtype=dtype), uniform, **options) == [expected]
    assert 0 <= draws(torch.full((1, 3), torch.nan), uniform)[0] < 3


def test_no_token_without_probability_is_drawn_where_probabilities_sum_to_less_than_1() -> None:
    sums = []
    for n in range(2, 60):
        logits = torch.cat([torch.zeros(n), torch.tensor([-torch.inf])])
        sums.append(float(logits.softmax(-1).sum(dtype=torch.float64)))
        assert draws(logits[None], 1 - 2**-53) == [n - 1]
    assert min(sums) < 1 - 2**-53


def test_each_row_has_its_own_most_probable_token() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [5.0, 1.0, 2.0]])
    assert draws(logits, 0.5, do_sample=False) == draws(logits, 0.5) == [2, 0]


def test_options_are_spelled_out_for_transformers() -> None:
    sampled = {"max_new_tokens": 8, "temperature": 0.7, "top_p": 1.0, "top_k": 0}
    sampled |= {"repetition_penalty": 1.0, "do_sample": True}
    options = replace(OPTIONS, temperature=0.7)
    assert options.generation_kwargs() == sampled
    assert replace(options, min_p=0.1).generation_kwargs() == {**sampled, "min_p": 0.1}
    longer = replace(options, min_new_tokens=1)
    assert longer.generation_kwargs() == {**sampled, "min_new_tokens": 1}
    greedy = replace(options, do_sample=False, min_p=0.1)
    expected = {"max_new_tokens": 8, "repetition_penalty": 1.0, "do_sample": False}
    assert greedy.generation_kwargs() == expected
