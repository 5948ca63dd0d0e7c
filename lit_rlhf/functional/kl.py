"""KL divergence between policies: estimates from samples, the exact value, an adaptive coefficient.

Notation: `B` batch, `T` tokens, `V` vocabulary. KL is in nats.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from lit_rlhf.checks import check_not_negative, check_number, check_positive
from lit_rlhf.functional.logprobs import tempered_logits
from lit_rlhf.tensor_checks import check_floating

__all__ = ["KLEstimator", "adaptive_kl_coef", "exact_kl", "kl_estimate"]

KLEstimator = Literal["k1", "k2", "k3"]
"""Estimators of KL from samples, as `kl_estimate` describes them."""


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator = "k1") -> Tensor:
    """Estimate of KL(policy || reference) at each token that the policy sampled, in nats.

    With x = log policy - log reference: `k1` = x is unbiased and can be negative; `k2` = x^2 / 2 is
    biased, never negative and has a low variance; `k3` = exp(-x) - 1 + x is unbiased and never
    negative.

    An unbiased value does not make an unbiased gradient. In a reward, the policy gradient weighs
    the score function with the estimate: E[k1 grad log pi] = grad KL(pi || ref), whereas
    E[k3 grad log pi] = grad KL(pi || ref) - grad KL(ref || pi), which is about 0 near the
    reference, and E[k2 grad log pi] is of second order there. So k1 belongs in rewards; k3 belongs
    in losses (Eq. 14) and monitors.

    Args:
        logprobs: Log-probs under the policy that sampled the tokens, any shape, nats.
        ref_logprobs: Log-probs of the same tokens under the reference, the same shape, nats.
        estimator: Which of the three estimates.

    Returns:
        The estimate at each token, in the shape of the log-probs, nats; with their graph.

    Examples:
        >>> logprobs, ref_logprobs = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
        >>> kl_estimate(logprobs, ref_logprobs).tolist()
        [0.5, -1.0]
        >>> kl_estimate(logprobs, ref_logprobs, "k2").tolist()
        [0.125, 0.5]
    """
    check_floating(None, logprobs=logprobs, ref_logprobs=ref_logprobs)
    log_ratio = logprobs - ref_logprobs
    match estimator:
        case "k1":
            return log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            # expm1 keeps the digits of policies that hardly differ
            return torch.expm1(-log_ratio) + log_ratio
    raise ValueError(f"estimator: expected one of {get_args(KLEstimator)}, got {estimator!r}")


def exact_kl(logits: Tensor, ref_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(policy || reference) at each position, summed over the whole vocabulary.

    KL = sum_v p(v) (log p(v) - log q(v)).

    Args:
        logits: Logits of the policy p, `[B, T, V]`; -inf rules a token out.
        ref_logits: Logits of the reference q, `[B, T, V]`; -inf rules a token out.
        temperature: Sampling temperature of both distributions, positive.

    Returns:
        KL at each position, `[B, T]` nats, at least 0 up to rounding; float64 for float64 logits,
        float32 for all others.

    Examples:
        >>> certain, uniform = torch.tensor([[[0.0, -torch.inf]]]), torch.zeros(1, 1, 2)
        >>> round(exact_kl(certain, uniform).item(), 4)  # log 2
        0.6931
    """
    logprobs = tempered_logits(logits, temperature).log_softmax(-1)
    check_floating(logits.shape, ref_logits=ref_logits)
    log_ratio = logprobs - tempered_logits(ref_logits, temperature).log_softmax(-1)
    # a token that the policy rules out adds 0, and would add 0 * (-inf minus -inf) = NaN
    log_ratio = log_ratio.masked_fill(logprobs == -torch.inf, 0.0)
    return (logprobs.exp() * log_ratio).sum(-1)


def adaptive_kl_coef(
    coef: float,
    *,
    kl: float,
    target: float,
    horizon: int,
    n_samples: int,
    error_clip: float = 0.2,
) -> float:
    """The KL coefficient after an iteration: higher if KL was above its target, lower if below.

    The proportional controller of Ziegler et al. (arXiv 1909.08593, Section 2.2): the coefficient
    is multiplied by 1 + e * n_samples / horizon with e = clip(kl / target - 1, -error_clip,
    error_clip).

    Args:
        coef: The coefficient so far, at least 0.
        kl: KL of the iteration, nats per response, finite.
        target: Target of KL, nats per response, positive.
        horizon: Responses over which the coefficient adapts, more than `error_clip * n_samples`:
            otherwise one iteration could bring the coefficient to 0, where it would stay.
        n_samples: Responses of the iteration over all ranks, at least 0.
        error_clip: Bound on the absolute value of the relative error, positive.

    Returns:
        The coefficient of the next iteration, at least 0.

    Examples:
        >>> round(adaptive_kl_coef(0.1, kl=12.0, target=6.0, horizon=1000, n_samples=100), 6)
        0.102
    """
    check_not_negative("coef", coef)
    check_positive("target", target)
    check_positive("horizon", horizon)
    check_not_negative("n_samples", n_samples)
    check_positive("error_clip", error_clip)
    check_number("kl", kl, "a finite number", math.isfinite)
    # the factor 1 - error_clip * n_samples / horizon has to stay positive
    if error_clip * n_samples >= horizon:
        raise ValueError(
            f"horizon: expected more than error_clip * n_samples = {error_clip * n_samples:g}, "
            f"got {horizon}"
        )
    error = min(max(kl / target - 1.0, -error_clip), error_clip)
    return coef * (1.0 + error * n_samples / horizon)
