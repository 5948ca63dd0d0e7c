"""KL between policies: estimates from samples, the exact value, an adaptive coefficient.

Notation: `B` batch, `T` tokens, `V` vocabulary. KL is in nats.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from lit_rlhf.functional.checks import (
    check_floating,
    check_not_negative,
    check_positive,
    check_same,
    check_shape,
)
from lit_rlhf.functional.logprobs import tempered_logits

KLEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator = "k1") -> Tensor:
    """Estimate of KL(policy || reference) from tokens that the policy sampled.

    With x = log policy - log reference: `k1` = x is unbiased and can be negative; `k2` = x^2 / 2 is
    biased, never negative and of low variance; `k3` = exp(-x) - 1 + x is unbiased and never
    negative.

    Args:
        logprobs: Log-probs of the policy that sampled, any shape, nats.
        ref_logprobs: Log-probs of the same tokens under the reference, same shape.
        estimator: Which of the three.

    Returns:
        Shape of `logprobs`, nats.

    Raises:
        ValueError: For a wrong shape or dtype, or an unknown estimator.
    """
    check_floating("logprobs", logprobs)
    check_same(logprobs.shape, ref_logprobs=ref_logprobs)
    log_ratio = logprobs - ref_logprobs
    match estimator:
        case "k1":
            return log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            return torch.expm1(-log_ratio) + log_ratio
    raise ValueError(f"estimator: expected one of {get_args(KLEstimator)}, got {estimator!r}")


def exact_kl(logits: Tensor, ref_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(policy || reference) of each position, summed over the whole vocabulary.

    Args:
        logits: Of the policy, `[B, T, V]`, floating-point; -inf rules a token out.
        ref_logits: Of the reference, `[B, T, V]`.
        temperature: That of sampling, for both.

    Returns:
        `[B, T]` nats, at least 0 up to rounding; float32, or float64 for float64 logits.

    Raises:
        ValueError: For a wrong shape or dtype, or a temperature that is not positive.
    """
    logprobs = tempered_logits(logits, temperature).log_softmax(-1)
    check_floating("ref_logits", ref_logits)
    check_shape("ref_logits", ref_logits, logits.shape)
    log_ratio = logprobs - tempered_logits(ref_logits, temperature).log_softmax(-1)
    # a token that the policy rules out adds nothing; -inf minus -inf would be NaN
    log_ratio = log_ratio.masked_fill(logprobs == -torch.inf, 0.0)
    return (logprobs.exp() * log_ratio).sum(-1)


def adaptive_kl_coef(
    coef: float, kl: float, target: float, horizon: int, n_samples: int, error_clip: float = 0.2
) -> float:
    """The KL coefficient after an iteration: up when KL was above its target, down when below.

    The proportional controller of Ziegler et al. (arXiv 1909.08593, Section 2.2): the coefficient
    is multiplied by 1 + e * n_samples / horizon with e = clip(kl / target - 1, -error_clip,
    error_clip).

    Args:
        coef: The coefficient so far, at least 0.
        kl: KL of the iteration, nats per response.
        target: KL to keep, nats per response, positive.
        horizon: Responses over which the coefficient adapts, at least 1.
        n_samples: Responses of the iteration over all ranks, at least 0.
        error_clip: Bound on the size of the relative error, positive.

    Raises:
        ValueError: If an argument is out of range, `kl` is not finite, or `horizon` is so short
            that one iteration could bring the coefficient to 0, from where it never returns.
    """
    check_not_negative("coef", coef)
    check_positive("target", target)
    check_positive("horizon", horizon)
    check_not_negative("n_samples", n_samples)
    check_positive("error_clip", error_clip)
    if not math.isfinite(kl):
        raise ValueError(f"kl: expected a finite number, got {kl}")
    if error_clip * n_samples >= horizon:
        raise ValueError(
            f"horizon: expected more than error_clip * n_samples = {error_clip * n_samples:g}, "
            f"got {horizon}"
        )
    error = min(max(kl / target - 1.0, -error_clip), error_clip)
    return coef * (1.0 + error * n_samples / horizon)
