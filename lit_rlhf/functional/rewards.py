"""From scores of responses to rewards of tokens (Eqs. 3, 18 and 19 of arXiv 2307.04964).

Notation: `B` batch, `T` response tokens. Nothing here has a graph: rewards are constants.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lit_rlhf.functional.checks import (
    check_dims,
    check_floating,
    check_mask,
    check_not_negative,
    check_positive,
    check_same,
)
from lit_rlhf.functional.kl import KLEstimator, kl_estimate
from lit_rlhf.functional.masking import spread_or_one


class TokenRewards(NamedTuple):
    """Rewards of tokens.

    Attributes:
        rewards: `[B, T]`, 0 outside the mask.
        kl: Estimate of KL(policy || reference) at each token, `[B, T]` nats, 0 outside the mask.
    """

    rewards: Tensor
    kl: Tensor


def normalized_scores(
    scores: Tensor, mean: Tensor | float, std: Tensor | float, clip: float | None
) -> Tensor:
    """Reward normalization and clipping: clip((r - mean) / std, -clip, clip) (Eq. 18).

    Args:
        scores: Of the reward model, `[B]`.
        mean: Of all scores so far, 0-dim.
        std: Of all scores so far, 0-dim; 0 (up to rounding) is taken as 1.
        clip: Bound on the size, positive; `None` does not clip.

    Returns:
        `[B]`, dtype of `scores`.

    Raises:
        ValueError: For a wrong shape, dtype or range.
    """
    _check_scores(scores, mean=mean, std=std)
    # float64: scores far from 0 with a small spread would lose their digits
    normalized = ((scores.detach().double() - mean) / spread_or_one(std)).to(scores.dtype)
    return normalized if clip is None else clipped_scores(normalized, clip)


def scaled_scores(scores: Tensor, std: Tensor | float) -> Tensor:
    """Reward scaling: r / std, which keeps the sign of a score (Section 5.3.1).

    Args:
        scores: Of the reward model, `[B]`.
        std: Of all scores so far, 0-dim; 0 (up to rounding) is taken as 1.

    Returns:
        `[B]`, dtype of `scores`.

    Raises:
        ValueError: For a wrong shape, dtype or range.
    """
    _check_scores(scores, std=std)
    return (scores.detach().double() / spread_or_one(std)).to(scores.dtype)


def clipped_scores(scores: Tensor, clip: float) -> Tensor:
    """Reward clipping: scores no larger than `clip` in size.

    Args:
        scores: `[B]`.
        clip: Positive.

    Returns:
        `[B]`, dtype of `scores`.

    Raises:
        ValueError: For a wrong shape, dtype or range.
    """
    _check_scores(scores)
    check_positive("clip", clip)
    return scores.detach().clamp(-clip, clip)


def length_penalty(lengths: Tensor, shortest: int, longest: int | None) -> Tensor:
    """Minus the distance of a length from a range: -max(shortest - n, n - longest, 0).

    Args:
        lengths: `[B]`, of responses in any unit.
        shortest: Beginning of the range.
        longest: Its end; `None`: no end.

    Returns:
        `[B]` float32, at most 0.

    Raises:
        ValueError: For a wrong shape.
    """
    check_dims("lengths", lengths, 1)
    lengths = lengths.float()
    outside = (shortest - lengths).clamp(min=0)
    if longest is not None:
        outside = outside + (lengths - longest).clamp(min=0)
    return -outside


def token_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    kl_coef: float,
    estimator: KLEstimator = "k1",
) -> TokenRewards:
    """A penalty on KL at each token, and the response's score at its last one (Eqs. 3, 19).

    The last token is the last that the mask keeps, be it EOS or where the response was cut off.

    Args:
        scores: Of the responses, `[B]`. A response without a token has nowhere to put its score.
        logprobs: Of the policy that sampled, `[B, T]` nats.
        ref_logprobs: Of the reference, `[B, T]` nats.
        mask: The responses' tokens, `[B, T]` bool.
        kl_coef: eta of Eqs. 3 and 19, at least 0.
        estimator: How a token's KL is estimated.

    Returns:
        Rewards and KL in the dtype of `logprobs`.

    Raises:
        ValueError: For a wrong shape, dtype or range, or an unknown estimator.
    """
    check_dims("logprobs", logprobs, 2)
    check_same(logprobs.shape, logprobs=logprobs, ref_logprobs=ref_logprobs)
    check_same(logprobs.shape[:1], scores=scores)
    check_mask(mask, logprobs.shape)
    check_not_negative("kl_coef", kl_coef)
    kl = kl_estimate(logprobs.detach(), ref_logprobs.detach(), estimator).masked_fill(~mask, 0.0)
    kept_after = mask.flip(1).cumsum(1).flip(1)  # kept tokens from here on, this one included
    is_last = mask & (kept_after == 1)
    return TokenRewards(
        torch.where(is_last, scores.detach().to(kl.dtype).unsqueeze(1), 0.0) - kl_coef * kl, kl
    )


def _check_scores(scores: Tensor, **numbers: Tensor | float) -> None:
    check_dims("scores", scores, 1)
    check_floating("scores", scores)
    for name, number in numbers.items():
        if isinstance(number, Tensor):
            check_dims(name, number, 0)
        elif name == "std":
            check_not_negative(name, number)
        elif not math.isfinite(number):
            raise ValueError(f"{name}: expected a finite number, got {number}")
