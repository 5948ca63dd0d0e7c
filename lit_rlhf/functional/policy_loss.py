"""Losses of the policy (Sections 3.2.1 and 3.2.3 of arXiv 2307.04964). All are minimized.

Notation: `B` batch, `T` response tokens. Old log-probs and advantages are constants of every loss.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lit_rlhf.functional.checks import (
    check_dims,
    check_mask,
    check_not_negative,
    check_positive,
    check_same,
)
from lit_rlhf.functional.kl import kl_estimate
from lit_rlhf.functional.masking import masked_average, masked_mean

_LARGEST_LOG_RATIO = 80.0  # float32 overflows at 88


class PolicyLoss(NamedTuple):
    """A policy loss and what to watch of it.

    The last three are means over this call's mask whatever the denominator, 0 for an empty mask,
    and have no graph.

    Attributes:
        loss: To minimize, 0-dim.
        clip_fraction: Share of tokens whose gradient the clip cut off, 0-dim, in [0, 1].
        approx_kl: Estimate (k3) of KL(old policy || policy), 0-dim, nats per token.
        ratio_mean: Mean probability ratio policy / old policy, 0-dim.
    """

    loss: Tensor
    clip_fraction: Tensor
    approx_kl: Tensor
    ratio_mean: Tensor


class _Terms(NamedTuple):
    """What the losses are made of, each `[B, T]` and harmless outside the mask."""

    ratio: Tensor
    kl: Tensor
    advantages: Tensor


def _terms(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> _Terms:
    check_dims("logprobs", logprobs, 2)
    check_same(logprobs.shape, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    check_mask(mask, logprobs.shape)
    # first of all: what lies outside the mask, times its gradient of 0, could be NaN
    new, old, weights = (
        x.masked_fill(~mask, 0.0) for x in (logprobs, old_logprobs.detach(), advantages.detach())
    )
    # an infinite ratio would turn the gradient of 0 that the clip gives it into NaN
    ratio = (new - old).clamp(max=_LARGEST_LOG_RATIO).exp()
    return _Terms(ratio, kl_estimate(old, new, "k3"), weights)


def surrogate_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ratio_clip: float | None = 0.2,
    denominator: Tensor | float | None = None,
) -> PolicyLoss:
    """The clipped surrogate of PPO (Eq. 15), or the unclipped one (the objective of Eq. 13).

    Per token max(-A rho, -A clip(rho, 1 - eps, 1 + eps)) with rho = exp(logprobs - old_logprobs):
    the worse of the two, so that nothing is gained by leaving the interval and everything by
    returning.

    Args:
        logprobs: Of the policy, with a graph, `[B, T]` nats.
        old_logprobs: Of the policy that the ratio is taken against, `[B, T]` nats.
        advantages: `[B, T]`.
        mask: Tokens that are trained on, `[B, T]` bool.
        ratio_clip: epsilon, in (0, 1); `None` does not clip.
        denominator: What the sum over tokens is divided by; `None` takes the count of `mask`.

    Returns:
        The loss, 0 with a graph if `mask` is empty.

    Raises:
        ValueError: For a wrong shape, dtype or range.
    """
    ratio, kl, advantages = _terms(logprobs, old_logprobs, advantages, mask)
    losses = -advantages * ratio
    clipped = torch.zeros_like(mask)
    if ratio_clip is not None:
        if not 0.0 < ratio_clip < 1.0:
            raise ValueError(f"ratio_clip: expected a number in (0, 1) or None, got {ratio_clip}")
        bounded = -advantages * ratio.clamp(1.0 - ratio_clip, 1.0 + ratio_clip)
        clipped = bounded > losses
        losses = torch.maximum(losses, bounded)
    return _policy_loss(losses, clipped, kl, ratio, mask, denominator)


def kl_penalty_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    kl_penalty: float,
    denominator: Tensor | float | None = None,
) -> PolicyLoss:
    """PPO-penalty (Eq. 14): the unclipped surrogate plus a penalty on KL(old policy || policy).

    The tokens are samples of the old policy, so their k3 estimate is unbiased in value and
    gradient.

    Args:
        logprobs: Of the policy, with a graph, `[B, T]` nats.
        old_logprobs: Of the policy that sampled, `[B, T]` nats.
        advantages: `[B, T]`.
        mask: Tokens that are trained on, `[B, T]` bool.
        kl_penalty: beta of Eq. 14, at least 0.
        denominator: What the sum over tokens is divided by; `None` takes the count of `mask`.

    Returns:
        The loss, 0 with a graph if `mask` is empty; the clip fraction is 0.

    Raises:
        ValueError: For a wrong shape, dtype or range.
    """
    check_not_negative("kl_penalty", kl_penalty)
    ratio, kl, advantages = _terms(logprobs, old_logprobs, advantages, mask)
    losses = -advantages * ratio + kl_penalty * kl
    return _policy_loss(losses, torch.zeros_like(mask), kl, ratio, mask, denominator)


def policy_gradient_loss(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    denominator: Tensor | float | None = None,
) -> PolicyLoss:
    """The plain policy gradient -A log pi, without a ratio: importance sampling switched off.

    Args:
        logprobs: Of the policy, with a graph, `[B, T]` nats.
        advantages: `[B, T]`.
        mask: Tokens that are trained on, `[B, T]` bool.
        denominator: What the sum over tokens is divided by; `None` takes the count of `mask`.

    Returns:
        The loss, 0 with a graph if `mask` is empty. With no old policy to compare with, clip
        fraction and KL are 0 and the ratio is 1.

    Raises:
        ValueError: For a wrong shape, dtype or range.
    """
    ratio, kl, advantages = _terms(logprobs, logprobs, advantages, mask)
    losses = -advantages * logprobs
    return _policy_loss(losses, torch.zeros_like(mask), kl, ratio, mask, denominator)


def entropy_loss(
    entropy: Tensor,
    mask: Tensor,
    clip: float | None = None,
    denominator: Tensor | float | None = None,
) -> Tensor:
    """The entropy bonus as a loss: minus the mean entropy, with the clip of Appendix B.3.

    An unbounded bonus can drive the policy to noise, since entropy is easier to raise than reward.
    With a clip each token adds min(entropy, clip): the clip is the largest entropy that still earns
    a bonus, a token above it gets no gradient, so the bonus only lifts tokens whose distribution is
    too narrow. The bound acts per token and not on the batch's mean so that micro-batches add up to
    the whole batch.

    Args:
        entropy: `[B, T]` nats, with a graph.
        mask: Tokens that are trained on, `[B, T]` bool.
        clip: Bound in nats per token, positive; `None` does not bound.
        denominator: What the sum over tokens is divided by; `None` takes the count of `mask`.

    Returns:
        0-dim, at most 0; 0 with a graph if `mask` is empty.

    Raises:
        ValueError: For a wrong shape, dtype or range.
    """
    check_dims("entropy", entropy, 2)
    check_same(entropy.shape, entropy=entropy)
    if clip is not None:
        check_positive("clip", clip)
        entropy = entropy.clamp(max=clip)
    return -masked_average(entropy, mask, denominator)


def _policy_loss(
    losses: Tensor,
    clipped: Tensor,
    kl: Tensor,
    ratio: Tensor,
    mask: Tensor,
    denominator: Tensor | float | None,
) -> PolicyLoss:
    """Reduce what is `[B, T]` each."""
    return PolicyLoss(
        loss=masked_average(losses, mask, denominator),
        clip_fraction=masked_mean(clipped.to(losses.dtype), mask),
        approx_kl=masked_mean(kl.detach(), mask),
        ratio_mean=masked_mean(ratio.detach(), mask),
    )
