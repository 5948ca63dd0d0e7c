"""Wrong shapes, dtypes and ranges are refused where they come in, by the argument's name."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lit_rlhf import functional as F

REAL, LONG = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.long)
MASK, ROWS, LOGITS = torch.ones(2, 3, dtype=torch.bool), torch.zeros(2), torch.zeros(2, 3, 4)
WIDE, WIDE_MASK = torch.zeros(2, 4), torch.ones(2, 4, dtype=torch.bool)
UNIT = F.Moments(*torch.tensor([0.0, 1.0, 6.0], dtype=torch.float64).unbind())
FLOAT_MASK = "mask: expected dtype torch.bool, got torch.float32"
WIDE_MASK_ERROR = "mask: expected shape (2, 3), got (2, 4)"

CASES: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
    (F.length_mask, (ROWS, 3), "lengths: expected an integer dtype, got torch.float32"),
    (F.length_mask, (LONG, 3), "lengths: expected 1 dimensions, got shape (2, 3)"),
    (F.masked_sum, (REAL, REAL), FLOAT_MASK),
    (F.masked_sum, (REAL, WIDE_MASK), WIDE_MASK_ERROR),
    (F.masked_mean, (REAL, REAL), FLOAT_MASK),
    (F.masked_mean, (LONG, MASK), "values: expected a floating-point dtype, got torch.int64"),
    (F.masked_var, (REAL, WIDE_MASK), WIDE_MASK_ERROR),
    (F.masked_moments, (LONG, MASK), "values: expected a floating-point dtype, got torch.int64"),
    (F.masked_whiten, (REAL, WIDE_MASK), WIDE_MASK_ERROR),
    (F.masked_whiten, (LONG, MASK), "values: expected a floating-point dtype, got torch.int64"),
    (F.masked_whiten, (LONG, MASK, True, UNIT), "values: expected a floating-point dtype, got"),
    (F.masked_whiten, (REAL, WIDE_MASK, True, UNIT), WIDE_MASK_ERROR),
    (F.tempered_logits, (REAL, 1.0), "logits: expected 3 dimensions, got shape (2, 3)"),
    (F.token_logprobs, (REAL, LONG), "logits: expected 3 dimensions, got shape (2, 3)"),
    (F.token_logprobs, (LOGITS, REAL), "token_ids: expected an integer dtype, got torch.float32"),
    (F.token_logprobs, (LOGITS, LONG[:1]), "token_ids: expected shape (2, 3), got (1, 3)"),
    (F.token_logprobs, (LOGITS, LONG, 0.0), "temperature: expected a finite number > 0, got 0.0"),
    (F.token_entropy, (LOGITS.long(),), "logits: expected a floating-point dtype, got torch.int64"),
    (F.token_entropy, (LOGITS, math.inf), "temperature: expected a finite number > 0, got inf"),
    (F.token_logprobs_and_entropy, (REAL, LONG), "logits: expected 3 dimensions, got shape (2, 3)"),
    (
        F.token_logprobs_and_entropy,
        (LOGITS, REAL),
        "token_ids: expected an integer dtype, got torch.float32",
    ),
    (F.wilson_interval, (1, 2, 1.5), "confidence: expected a number in (0, 1), got 1.5"),
    (F.language_model_loss, (ROWS, MASK), "logprobs: expected 2 dimensions, got shape (2,)"),
    (F.language_model_loss, (REAL, WIDE_MASK), WIDE_MASK_ERROR),
    (F.language_model_loss, (LONG, MASK), "logprobs: expected a floating-point dtype, got"),
    (F.perplexity, (REAL, REAL), FLOAT_MASK),
    (F.kl_estimate, (REAL, WIDE), "ref_logprobs: expected shape (2, 3), got (2, 4)"),
    (F.kl_estimate, (LONG, REAL), "logprobs: expected a floating-point dtype, got torch.int64"),
    (F.exact_kl, (LOGITS, LOGITS[:1]), "ref_logits: expected shape (2, 3, 4), got (1, 3, 4)"),
    (F.exact_kl, (LOGITS, LOGITS.long()), "ref_logits: expected a floating-point dtype, got"),
    (F.exact_kl, (LOGITS, LOGITS, -1.0), "temperature: expected a finite number > 0, got -1.0"),
    (F.adaptive_kl_coef, (-0.1, 1.0, 6.0, 99, 1), "coef: expected a finite number >= 0, got -0.1"),
    (F.adaptive_kl_coef, (0.1, 1.0, 0.0, 99, 1), "target: expected a finite number > 0, got 0.0"),
    (F.adaptive_kl_coef, (0.1, 1.0, 6.0, 0, 1), "horizon: expected a finite number > 0, got 0"),
    (
        F.adaptive_kl_coef,
        (0.1, 1.0, 6.0, 99, -1),
        "n_samples: expected a finite number >= 0, got -1",
    ),
    (
        F.adaptive_kl_coef,
        (0.1, 1.0, 6.0, 99, 1, 0.0),
        "error_clip: expected a finite number > 0, got 0.0",
    ),
    (F.gae, (ROWS, ROWS, MASK[:, 0]), "values: expected 2 dimensions, got shape (2,)"),
    (F.gae, (LONG, REAL, MASK), "values: expected a floating-point dtype, got torch.int64"),
    (F.gae, (REAL, LONG, MASK), "rewards: expected a floating-point dtype, got torch.int64"),
    (F.gae, (REAL, WIDE, MASK), "rewards: expected shape (2, 3), got (2, 4)"),
    (F.gae, (REAL, REAL, REAL), FLOAT_MASK),
    (F.gae, (REAL, REAL, MASK, 1.5), "gamma: expected a number in [0, 1], got 1.5"),
    (F.gae, (REAL, REAL, MASK, 1.0, -0.5), "lam: expected a number in [0, 1], got -0.5"),
    (F.gae, (REAL, REAL, MASK, 1.0, math.nan), "lam: expected a number in [0, 1], got nan"),
    (F.gae, (REAL, REAL, MASK, 1, 1, REAL), "bootstrap_values: expected shape (2,), got (2, 3)"),
    (F.clipped_advantages, (LONG, 1.0), "advantages: expected a floating-point dtype, got"),
    (F.clipped_advantages, (REAL, 0.0), "clip: expected a finite number > 0, got 0.0"),
    (F.surrogate_loss, (ROWS, ROWS, ROWS, MASK[:, 0]), "logprobs: expected 2 dimensions, got"),
    (F.surrogate_loss, (LONG, REAL, REAL, MASK), "logprobs: expected a floating-point dtype, got"),
    (F.surrogate_loss, (REAL, WIDE, REAL, MASK), "old_logprobs: expected shape (2, 3), got (2, 4)"),
    (F.surrogate_loss, (REAL, REAL, ROWS, MASK), "advantages: expected shape (2, 3), got (2,)"),
    (F.surrogate_loss, (REAL, REAL, REAL, REAL), FLOAT_MASK),
    (
        F.surrogate_loss,
        (REAL, REAL, REAL, MASK, 0.2, None, 0.0),
        "ratio_clip_high: expected a finite number > 0, got 0.0",
    ),
    (
        F.kl_penalty_loss,
        (REAL, REAL, REAL, MASK, -1.0),
        "kl_penalty: expected a finite number >= 0, got -1.0",
    ),
    (F.policy_gradient_loss, (REAL, WIDE, MASK), "advantages: expected shape (2, 3), got (2, 4)"),
    (F.entropy_loss, (ROWS, MASK[:, 0]), "entropy: expected 2 dimensions, got shape (2,)"),
    (F.entropy_loss, (LONG, MASK), "entropy: expected a floating-point dtype, got torch.int64"),
    (F.entropy_loss, (REAL, MASK, 0.0), "clip: expected a finite number > 0, got 0.0"),
    (F.value_loss, (ROWS, ROWS, ROWS, MASK[:, 0]), "values: expected 2 dimensions, got shape (2,)"),
    (F.value_loss, (LONG, REAL, REAL, MASK), "values: expected a floating-point dtype, got"),
    (F.value_loss, (REAL, WIDE, REAL, MASK), "old_values: expected shape (2, 3), got (2, 4)"),
    (F.value_loss, (REAL, REAL, REAL, REAL), FLOAT_MASK),
    (F.value_loss, (REAL, REAL, WIDE, MASK), "returns: expected shape (2, 3), got (2, 4)"),
    (F.value_loss, (REAL, REAL, REAL, MASK, 0.0), "value_clip: expected a finite number > 0, got"),
    (F.explained_variance, (ROWS, ROWS, MASK[:, 0]), "values: expected 2 dimensions, got"),
    (F.explained_variance, (LONG, REAL, MASK), "values: expected a floating-point dtype, got"),
    (F.explained_variance, (REAL, WIDE, MASK), "returns: expected shape (2, 3), got (2, 4)"),
    (
        F.normalized_scores,
        (REAL, 0.0, 1.0, None),
        "scores: expected 1 dimensions, got shape (2, 3)",
    ),
    (F.normalized_scores, (ROWS, ROWS, 1.0, None), "mean: expected 0 dimensions, got shape (2,)"),
    (F.normalized_scores, (ROWS, 0.0, 1.0, 0.0), "clip: expected a finite number > 0, got 0.0"),
    (F.normalized_scores, (ROWS, math.nan, 1.0, None), "mean: expected a finite number, got nan"),
    (F.length_penalty, (REAL, 0, 3), "lengths: expected 1 dimensions, got shape (2, 3)"),
    (F.scaled_scores, (ROWS, -1.0), "std: expected a finite number >= 0, got -1.0"),
    (F.scaled_scores, (ROWS, ROWS), "std: expected 0 dimensions, got shape (2,)"),
    (F.normalized_scores, (ROWS, 0.0, -1.0, None), "std: expected a finite number >= 0, got -1.0"),
    (F.clipped_scores, (REAL, 1.0), "scores: expected 1 dimensions, got shape (2, 3)"),
    (F.clipped_scores, (LONG[:, 0], 1.0), "scores: expected a floating-point dtype, got"),
    (F.clipped_scores, (ROWS, -1.0), "clip: expected a finite number > 0, got -1.0"),
    (F.token_rewards, (REAL, REAL, REAL, MASK, 0.1), "scores: expected shape (2,), got (2, 3)"),
    (F.token_rewards, (ROWS, ROWS, REAL, MASK, 0.1), "logprobs: expected 2 dimensions, got"),
    (F.token_rewards, (ROWS, LONG, REAL, MASK, 0.1), "logprobs: expected a floating-point dtype"),
    (F.token_rewards, (ROWS, REAL, WIDE, MASK, 0.1), "ref_logprobs: expected shape (2, 3), got"),
    (F.token_rewards, (ROWS, REAL, REAL, REAL, 0.1), FLOAT_MASK),
    (
        F.token_rewards,
        (ROWS, REAL, REAL, MASK, -0.1),
        "kl_coef: expected a finite number >= 0, got -0.1",
    ),
    (F.pairwise_reward_loss, (REAL, REAL), "chosen: expected 1 dimensions, got shape (2, 3)"),
    (F.pairwise_reward_loss, (LONG[:, 0], ROWS), "chosen: expected a floating-point dtype, got"),
    (F.pairwise_reward_loss, (ROWS, ROWS[:1]), "rejected: expected shape (2,), got (1,)"),
    (F.pairwise_reward_loss, (ROWS, ROWS, ROWS[:1]), "margin: expected shape (2,), got (1,)"),
    (
        F.reward_model_loss,
        (torch.tensor(1.0), torch.tensor(1.0), -1.0),
        "lm_coef: expected a finite number >= 0, got -1.0",
    ),
    (
        F.reward_model_loss,
        (ROWS, torch.tensor(1.0), 1),
        "pairwise_loss: expected shape (), got (2,)",
    ),
    (F.reward_model_loss, (torch.tensor(1.0), ROWS, 1), "lm_loss: expected shape (), got (2,)"),
    (F.response_ngrams, (REAL, MASK), "token_ids: expected an integer dtype, got torch.float32"),
    (F.response_ngrams, (LONG, MASK, 0), "n: expected an integer >= 1, got 0"),
    (F.distinct_n, (REAL, MASK), "token_ids: expected an integer dtype, got torch.float32"),
    (F.distinct_n, (LONG[0], MASK[0]), "token_ids: expected 2 dimensions, got shape (3,)"),
    (F.distinct_n, (LONG, REAL), FLOAT_MASK),
    (F.distinct_n, (LONG, MASK, 0), "n: expected an integer >= 1, got 0"),
]


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    CASES,
    ids=[f"{case[0].__name__}-{case[2].split(':')[0]}" for case in CASES],
)
def test_a_wrong_argument_is_named(
    function: Callable[..., Any], arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        function(*arguments)


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


@pytest.mark.parametrize(
    ("function", "promised"), DEFAULTS, ids=[case[0].__name__ for case in DEFAULTS]
)
def test_defaults(function: Callable[..., Any], promised: dict[str, Any]) -> None:
    parameters = inspect.signature(function).parameters
    assert {name: parameters[name].default for name in promised} == promised


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bool])
def test_only_integers_count(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="lengths: expected an integer dtype"):
        F.length_mask(torch.ones(2).to(dtype), 3)


@pytest.mark.parametrize("number", [math.inf, math.nan, -1.0, 0.0])
def test_a_positive_number_is_finite_too(number: float) -> None:
    with pytest.raises(ValueError, match="clip: expected a finite number > 0"):
        F.clipped_advantages(REAL, number)


@pytest.mark.parametrize("number", [math.inf, math.nan, -1.0])
def test_a_number_that_is_not_negative_is_finite_too(number: float) -> None:
    with pytest.raises(ValueError, match="kl_coef: expected a finite number >= 0"):
        F.token_rewards(ROWS, REAL, REAL, MASK, number)
    F.token_rewards(ROWS, REAL, REAL, MASK, 0.0)


def test_every_exported_function_that_takes_an_argument_to_check_has_a_case() -> None:
    unchecked = {"loss_perplexity", "merged_moments", "preference_probability"}
    functions = {name for name in F.__all__ if callable(getattr(F, name)) and name == name.lower()}
    assert {case[0].__name__ for case in CASES} == functions - unchecked
