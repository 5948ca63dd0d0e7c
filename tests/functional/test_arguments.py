"""Every function refuses wrong shapes, dtypes and ranges by the argument's name."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_rlhf import functional as F

REAL, LONG = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.long)
MASK, ROWS, LOGITS = torch.ones(2, 3, dtype=torch.bool), torch.zeros(2), torch.zeros(2, 3, 4)
ZERO, ONE = torch.tensor(0.0), torch.tensor(1.0)
KEPT = {"values": REAL, "mask": MASK}
POLICY = {"logprobs": REAL, "old_logprobs": REAL, "advantages": REAL, "mask": MASK}
NOT_POSITIVE, NEGATIVE = (0.0, -1.0, math.inf, math.nan), (-1.0, math.inf, math.nan)
OUTSIDE_UNIT = (1.5, -0.5, math.nan)

VALID: dict[Callable[..., Any], dict[str, Any]] = {
    F.adaptive_kl_coef: {"coef": 0.1, "kl": 1.0, "target": 6.0, "horizon": 99, "n_samples": 1},
    F.clipped_advantages: {"advantages": REAL, "clip": 1.0},
    F.clipped_scores: {"scores": ROWS, "clip": 1.0},
    F.distinct_n: {"token_ids": LONG, "mask": MASK},
    F.entropy_loss: {"entropy": REAL, "mask": MASK},
    F.exact_kl: {"logits": LOGITS, "ref_logits": LOGITS},
    F.explained_variance: {"values": REAL, "returns": REAL, "mask": MASK},
    F.gae: {"values": REAL, "rewards": REAL, "mask": MASK, "bootstrap_values": ROWS},
    F.kl_estimate: {"logprobs": REAL, "ref_logprobs": REAL},
    F.kl_penalty_loss: {**POLICY, "kl_penalty": 0.1},
    F.language_model_loss: {"logprobs": REAL, "mask": MASK, "denominator": ONE},
    F.length_mask: {"lengths": LONG[:, 0], "max_length": 3},
    F.length_penalty: {"lengths": LONG[:, 0], "shortest": 0, "longest": 3},
    F.masked_mean: KEPT,
    F.masked_moments: KEPT,
    F.masked_sum: KEPT,
    F.masked_var: KEPT,
    F.masked_whiten: KEPT,
    F.normalized_scores: {"scores": ROWS, "mean": ZERO, "std": ONE, "clip": 1.0},
    F.pairwise_reward_loss: {"chosen": ROWS, "rejected": ROWS, "margin": ROWS},
    F.perplexity: {"logprobs": REAL, "mask": MASK},
    F.policy_gradient_loss: {"logprobs": REAL, "advantages": REAL, "mask": MASK},
    F.response_ngrams: {"token_ids": LONG, "mask": MASK},
    F.reward_model_loss: {"pairwise_loss": ONE, "lm_loss": ONE, "lm_coef": 0.1},
    F.scaled_scores: {"scores": ROWS, "std": ONE},
    F.surrogate_loss: POLICY,
    F.tempered_logits: {"logits": LOGITS, "temperature": 1.0},
    F.token_entropy: {"logits": LOGITS},
    F.token_logprobs: {"logits": LOGITS, "token_ids": LONG},
    F.token_logprobs_and_entropy: {"logits": LOGITS, "token_ids": LONG},
    F.token_rewards: {
        "scores": ROWS,
        "logprobs": REAL,
        "ref_logprobs": REAL,
        "mask": MASK,
        "kl_coef": 0.1,
    },
    F.value_loss: {"values": REAL, "old_values": REAL, "returns": REAL, "mask": MASK},
    F.wilson_interval: {"successes": 1, "trials": 2},
}
WRONG_NUMBERS: dict[str, tuple[float, ...]] = {
    "clip": NOT_POSITIVE,
    "coef": NEGATIVE,
    "confidence": (0.0, 1.0, 1.5),
    "denominator": NOT_POSITIVE,
    "dual_clip": (1.0, math.nan),
    "error_clip": NOT_POSITIVE,
    "gamma": OUTSIDE_UNIT,
    "horizon": NOT_POSITIVE,
    "kl": (math.inf, math.nan),
    "kl_coef": NEGATIVE,
    "kl_penalty": NEGATIVE,
    "lam": OUTSIDE_UNIT,
    "lm_coef": NEGATIVE,
    "mean": (math.inf, math.nan),
    "n": (0,),
    "n_samples": NEGATIVE,
    "ratio_clip": (0.0, 1.0, math.nan),
    "ratio_clip_high": NOT_POSITIVE,
    "std": NEGATIVE,
    "successes": (-1, 3),
    "target": NOT_POSITIVE,
    "temperature": NOT_POSITIVE,
    "value_clip": NOT_POSITIVE,
}
ANY_DTYPE = {(F.masked_sum, "values"), (F.length_penalty, "lengths")}
UNCHECKED = {"loss_perplexity", "merged_moments", "preference_probability"}


def refusal(function: Callable[..., Any], **arguments: Any) -> str:
    """The argument that the error names."""
    with pytest.raises(ValueError, match=r"^[a-z_]+: expected .*, got ") as error:
        function(**VALID[function] | arguments)
    return str(error.value).partition(":")[0]


@pytest.mark.parametrize("function", VALID, ids=lambda function: function.__name__)
def test_wrong_argument_is_named(function: Callable[..., Any]) -> None:
    valid = VALID[function]
    function(**valid)
    for name, value in valid.items():
        if not isinstance(value, Tensor):
            continue
        if value.dim() and (function, name) not in ANY_DTYPE:
            wrong = [torch.long, torch.bool] if value.is_floating_point() else [torch.float32]
            for dtype in wrong:
                assert refusal(function, **{name: value.to(dtype)}) == name
        if function is not F.clipped_advantages:
            # of two tensors that differ, either may be the wrong one
            assert refusal(function, **{name: torch.stack([value, value])}) in valid
    for name in inspect.signature(function).parameters.keys() & WRONG_NUMBERS:
        for number in WRONG_NUMBERS[name]:
            assert refusal(function, **{name: number}) == name


def test_every_function_with_an_argument_to_check_is_tried() -> None:
    functions = {name for name in F.__all__ if callable(getattr(F, name)) and name == name.lower()}
    assert {function.__name__ for function in VALID} == functions - UNCHECKED


DEFAULTS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (F.gae, {"gamma": 1.0, "lam": 0.9, "bootstrap_values": None}),
    (F.surrogate_loss, {"ratio_clip": 0.2, "denominator": None}),
    (F.value_loss, {"value_clip": 0.2, "denominator": None}),
    (F.entropy_loss, {"clip": None, "denominator": None}),
    (F.kl_estimate, {"estimator": "k1"}),
    (F.token_rewards, {"estimator": "k1"}),
    (F.adaptive_kl_coef, {"error_clip": 0.2}),
    (F.exact_kl, {"temperature": 1.0}),
    (F.token_logprobs, {"temperature": 1.0}),
    (F.token_entropy, {"temperature": 1.0}),
    (F.token_logprobs_and_entropy, {"temperature": 1.0}),
    (F.masked_var, {"unbiased": False}),
    (F.masked_whiten, {"shift_mean": True, "moments": None}),
    (F.wilson_interval, {"confidence": 0.95}),
    (F.response_ngrams, {"n": 2}),
    (F.distinct_n, {"n": 2}),
]


def test_defaults() -> None:
    for function, promised in DEFAULTS:
        parameters = inspect.signature(function).parameters
        assert {name: parameters[name].default for name in promised} == promised
