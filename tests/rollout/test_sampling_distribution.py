"""Samples come from softmax(logits / T), whatever the model's folder says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from lit_rlhf.rollout import SamplingOptions, generate_responses
from tests.support.tiny_models import tiny_causal_lm

LEFTOVERS = GenerationConfig(  # type: ignore[no-untyped-call]
    do_sample=True,
    temperature=0.3,
    top_k=3,
    top_p=0.5,
    min_p=0.2,
    typical_p=0.5,
    epsilon_cutoff=0.05,
    repetition_penalty=3.0,
    no_repeat_ngram_size=1,
    suppress_tokens=[2, 3],
    begin_suppress_tokens=[1],
    bad_words_ids=[[4]],
    forced_eos_token_id=0,
    exponential_decay_length_penalty=(0, 5.0),
    min_length=30,
    max_length=11,
)


def chi_square_is_plausible(counts: Tensor, probabilities: Tensor) -> bool:
    """Pearson's test at about five standard deviations, cells with few expected samples joined."""
    expected = probabilities * counts.sum()
    order = expected.argsort()
    expected, counts = expected[order], counts[order].double()
    few = int((expected.cumsum(0) < 8).sum()) + 1
    expected = torch.cat([expected[:few].sum()[None], expected[few:]])
    counts = torch.cat([counts[:few].sum()[None], counts[few:]])
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    return bool(statistic < freedom + 5 * (2 * freedom) ** 0.5)


@torch.no_grad()
def next_token_probabilities(vocab_size: int, ids: list[int], temperature: float) -> Tensor:
    logits = tiny_causal_lm("llama", vocab_size)(torch.tensor([ids])).logits[0, -1].double()
    return torch.softmax(logits / temperature, dim=0)


def samples(vocab_size: int, temperature: float, n_tokens: int, n_samples: int) -> Tensor:
    model = tiny_causal_lm("llama", vocab_size)
    model.generation_config = LEFTOVERS
    prompt = torch.tensor([[5, 6]]).expand(n_samples, 2)
    options = SamplingOptions(max_new_tokens=n_tokens, temperature=temperature)
    # no token ends a response, so all outcomes have the same length
    rollouts = generate_responses(
        model, prompt, torch.ones_like(prompt, dtype=torch.bool), options, (), 0, seed=0
    )
    return rollouts.response_ids


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_pairs_of_tokens_have_the_products_of_their_probabilities(temperature: float) -> None:
    drawn = samples(8, temperature, n_tokens=2, n_samples=6000)
    first = next_token_probabilities(8, [5, 6], temperature)
    second = torch.stack(
        [next_token_probabilities(8, [5, 6, token], temperature) for token in range(8)]
    )
    counts = torch.bincount(drawn[:, 0] * 8 + drawn[:, 1], minlength=64)
    assert chi_square_is_plausible(counts, (first[:, None] * second).flatten())


def test_a_vocabulary_larger_than_the_usual_top_k_is_sampled_in_full() -> None:
    drawn = samples(80, temperature=3.0, n_tokens=1, n_samples=8000)
    counts = torch.bincount(drawn[:, 0], minlength=80)
    assert chi_square_is_plausible(counts, next_token_probabilities(80, [5, 6], 3.0))


@pytest.mark.parametrize("wrong", [0.85, 1.2])
def test_the_test_tells_a_wrong_temperature(wrong: float) -> None:
    drawn = samples(8, 1.0, n_tokens=1, n_samples=6000)
    counts = torch.bincount(drawn[:, 0], minlength=8)
    assert not chi_square_is_plausible(counts, next_token_probabilities(8, [5, 6], wrong))


def test_top_k_is_used_where_asked_for() -> None:
    model = tiny_causal_lm("llama", 8)
    prompt = torch.tensor([[5, 6]]).expand(500, 2)
    options = SamplingOptions(max_new_tokens=1, top_k=2)
    rollouts = generate_responses(
        model, prompt, torch.ones_like(prompt, dtype=torch.bool), options, (), 0, seed=0
    )
    best = next_token_probabilities(8, [5, 6], 1.0).topk(2).indices
    assert set(rollouts.response_ids[:, 0].tolist()) == set(best.tolist())
