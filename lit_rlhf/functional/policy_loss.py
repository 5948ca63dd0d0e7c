"""Losses of the policy (Sections 3.2.1 and 3.2.3 of arXiv 2307.04964), all to minimize.

Notation: `B` batch, `T` response tokens. Old log-probs and advantages are constants of every loss.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lit_rlhf.checks import (
    check_dims,
    check_mask,
    check_not_negative,
    check_positive,
    check_same,
)
from lit_rlhf.functional.kl import kl_estimate
from lit_rlhf.functional.masking import masked_average, masked_mean

_LARGEST_LOG_RATIO = 80.0  # exp overflows in float32 at 88


class PolicyLoss(NamedTuple):
    """A policy loss and its diagnostics.

    The diagnostics are means over the mask of the call, whatever the denominator, and have no
    graph. For an empty mask all are 0, the loss with a graph.

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


class _Inputs(NamedTuple):
    """Ratio, KL and advantages of each token, `[B, T]` each; finite outside the mask too."""

    ratio: Tensor
    kl: Tensor
    advantages: Tensor


def _prepare(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> _Inputs:
    check_dims("logprobs", logprobs, 2)
    check_same(logprobs.shape, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    check_mask(mask, logprobs.shape)
    # before anything else: outside the mask, an infinite value times a gradient of 0 would be NaN
    new, old, weights = (
        x.masked_fill(~mask, 0.0) for x in (logprobs, old_logprobs.detach(), advantages.detach())
    )
    # an infinite ratio would turn the gradient of 0 behind the clip into NaN
    ratio = (new - old).clamp(max=_LARGEST_LOG_RATIO).exp()
    return _Inputs(ratio, kl_estimate(old, new, "k3"), weights)


def surrogate_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ratio_clip: float | None = 0.2,
    denominator: Tensor | float | None = None,
    ratio_clip_high: float | None = None,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """The clipped surrogate of PPO (Eq. 15), or the unclipped one (the objective of Eq. 13).

    Per token max(-A rho, -A clip(rho, 1 - eps, 1 + eps)) with rho = exp(logprobs - old_logprobs):
    the larger loss of the two, so that leaving the interval gains nothing, while a ratio that has
    left it on the wrong side keeps the gradient that brings it back.

    That gradient has no bound: for A < 0 the loss grows with rho. Dual clip (arXiv 1912.09729,
    Eq. 5) bounds it there: min(max(-A rho, -A clip(rho, 1 - eps, 1 + eps)), -A c).

    Args:
        logprobs: Of the policy, with a graph, `[B, T]` nats.
        old_logprobs: Of the policy that the ratio is taken against, `[B, T]` nats.
        advantages: `[B, T]`.
        mask: Tokens to train on, `[B, T]` bool.
        ratio_clip: epsilon, in (0, 1); `None` for no clipping.
        denominator: Divisor of the sum over tokens; `None` for the count of `mask`.
        ratio_clip_high: epsilon of the upper end, 1 + epsilon, positive; `None` takes `ratio_clip`.
        dual_clip: c, above 1; `None` for no bound.

    Examples:
        >>> old, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
        >>> new = torch.tensor([[1.5, 0.5]]).log()
        >>> out = surrogate_loss(new, old, advantages=torch.ones(1, 2), mask=mask)
        >>> round(out.loss.item(), 4), out.clip_fraction.item()  # -(1.2 + 0.5) / 2
        (-0.85, 0.5)
    """
    ratio, kl, advantages = _prepare(logprobs, old_logprobs, advantages, mask)
    losses = -advantages * ratio
    clipped = torch.zeros_like(mask)
    if ratio_clip is not None:
        if not 0.0 < ratio_clip < 1.0:
            raise ValueError(f"ratio_clip: expected a number in (0, 1) or None, got {ratio_clip}")
        high = ratio_clip if ratio_clip_high is None else ratio_clip_high
        check_positive("ratio_clip_high", high)
        bounded = -advantages * ratio.clamp(1.0 - ratio_clip, 1.0 + high)
        # where the bounded loss is the larger one, it is constant and so has no gradient
        clipped = bounded > losses
        losses = torch.maximum(losses, bounded)
    if dual_clip is not None:
        if not dual_clip > 1.0:
            raise ValueError(f"dual_clip: expected a number above 1 or None, got {dual_clip}")
        largest = -advantages * dual_clip
        too_large = (advantages < 0) & (losses > largest)
        clipped = clipped | too_large
        losses = torch.where(too_large, largest, losses)
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

    The tokens are samples of the old policy, so value and gradient of their k3 estimate are
    unbiased. The clip fraction is 0.

    Args:
        logprobs: Of the policy, with a graph, `[B, T]` nats.
        old_logprobs: Of the policy that sampled, `[B, T]` nats.
        advantages: `[B, T]`.
        mask: Tokens to train on, `[B, T]` bool.
        kl_penalty: beta of Eq. 14, at least 0.
        denominator: Divisor of the sum over tokens; `None` for the count of `mask`.

    Examples:
        >>> old, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
        >>> out = kl_penalty_loss(old.clone(), old, torch.ones(1, 1), mask, kl_penalty=0.1)
        >>> out.loss.item(), out.approx_kl.item()
        (-1.0, 0.0)
    """
    check_not_negative("kl_penalty", kl_penalty)
    ratio, kl, advantages = _prepare(logprobs, old_logprobs, advantages, mask)
    losses = -advantages * ratio + kl_penalty * kl
    return _policy_loss(losses, torch.zeros_like(mask), kl, ratio, mask, denominator)


def policy_gradient_loss(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    denominator: Tensor | float | None = None,
) -> PolicyLoss:
    """The plain policy gradient -A log pi, without importance sampling.

    There is no old policy, so clip fraction and KL are 0 and the ratio is 1.

    Args:
        logprobs: Of the policy, with a graph, `[B, T]` nats.
        advantages: `[B, T]`.
        mask: Tokens to train on, `[B, T]` bool.
        denominator: Divisor of the sum over tokens; `None` for the count of `mask`.

    Examples:
        >>> logprobs, advantages = torch.tensor([[-0.5, -2.0]]), torch.tensor([[1.0, -1.0]])
        >>> mask = torch.ones(1, 2, dtype=torch.bool)
        >>> policy_gradient_loss(logprobs, advantages, mask).loss.item()  # (0.5 - 2) / 2
        -0.75
    """
    # with itself as old policy the ratio is 1; advantages are 0 outside the mask
    ratio, kl, advantages = _prepare(logprobs, logprobs, advantages, mask)
    losses = -advantages * logprobs
    return _policy_loss(losses, torch.zeros_like(mask), kl, ratio, mask, denominator)


def entropy_loss(
    entropy: Tensor,
    mask: Tensor,
    clip: float | None = None,
    denominator: Tensor | float | None = None,
) -> Tensor:
    """The entropy bonus as a loss, 0-dim: minus the mean entropy, with the clip of Appendix B.3.

    An unbounded bonus can drive the policy to noise, since entropy is easier to raise than reward.
    With a clip each token adds min(entropy, clip), so a token above it gets no gradient and the
    bonus only widens distributions that are too narrow. The clip acts on each token and not on the
    mean, so that micro-batches add up to the whole batch.

    Args:
        entropy: `[B, T]` nats, with a graph.
        mask: Tokens to train on, `[B, T]` bool.
        clip: Largest entropy with a bonus, nats per token, positive; `None` for no limit.
        denominator: Divisor of the sum over tokens; `None` for the count of `mask`.

    Examples:
        >>> mask = torch.ones(1, 2, dtype=torch.bool)
        >>> entropy_loss(torch.tensor([[0.5, 3.0]]), mask, clip=1.0).item()
        -0.75
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
    """Reduce the losses and diagnostics of the tokens, `[B, T]` each."""
    return PolicyLoss(
        loss=masked_average(losses, mask, denominator),
        clip_fraction=masked_mean(clipped.to(losses.dtype), mask),
        approx_kl=masked_mean(kl.detach(), mask),
        ratio_mean=masked_mean(ratio.detach(), mask),
    )
