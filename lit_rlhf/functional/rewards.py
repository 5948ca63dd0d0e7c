"""Rewards of tokens from scores of responses (Eqs. 3, 18 and 19 of arXiv 2307.04964).

Notation: `B` batch, `T` response tokens. The losses take rewards as constants, so these have no
graph.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from lit_rlhf.checks import check_not_negative, check_number, check_positive
from lit_rlhf.functional.kl import KLEstimator, kl_estimate
from lit_rlhf.functional.masking import safe_std
from lit_rlhf.tensor_checks import check_floating, check_mask

__all__ = [
    "Ensemble",
    "clipped_scores",
    "ensemble_scores",
    "length_penalty",
    "normalized_scores",
    "scaled_scores",
    "soft_overlong_penalty",
    "token_rewards",
]


Ensemble = Literal["sum", "mean", "min"]
"""Ways to combine the scores of several reward models, which `ensemble_scores` describes."""


def ensemble_scores(member_scores: Tensor, ensemble: Ensemble = "sum") -> Tensor:
    """One score for each response from the scores of several reward models.

    Args:
        member_scores: Scores of `M` reward models, `[M, B]`.
        ensemble: `sum`, `mean`, or `min` over the models; `min` is the worst-case optimization of
            Coste et al. (arXiv 2310.02743).

    Returns:
        Scores, `[B]`.

    Examples:
        >>> ensemble_scores(torch.tensor([[1.0, 2.0], [3.0, 2.0]]), "min").tolist()
        [1.0, 2.0]
    """
    check_floating(2, member_scores=member_scores)
    match ensemble:
        case "sum":
            return member_scores.sum(0)
        case "mean":
            return member_scores.mean(0)
        case "min":
            return member_scores.amin(0)
    raise ValueError(f"ensemble: expected one of {get_args(Ensemble)}, got {ensemble!r}")


def normalized_scores(
    scores: Tensor, *, mean: Tensor | float, std: Tensor | float, clip: float | None
) -> Tensor:
    """Reward normalization and clipping: clip((r - mean) / std, -clip, clip) (Eq. 18).

    Args:
        scores: Raw scores r, `[B]`.
        mean: Mean of all scores so far, 0-dim.
        std: Standard deviation of all scores so far, 0-dim, at least 0; 0 (up to rounding) counts
            as 1.
        clip: Bound on the absolute value of the result, positive, in standard deviations; `None`
            for no clipping.

    Returns:
        Normalized scores, `[B]`, in the dtype of `scores`.

    Examples:
        >>> normalized_scores(torch.tensor([1.0, 9.0]), mean=2.0, std=2.0, clip=0.75).tolist()
        [-0.5, 0.75]
    """
    _check_scores(scores, mean=mean, std=std)
    # float64: in float32, scores far from 0 with a small deviation would lose their digits
    normalized = ((scores.detach().double() - mean) / safe_std(std)).to(scores.dtype)
    return normalized if clip is None else clipped_scores(normalized, clip)


def scaled_scores(scores: Tensor, std: Tensor | float) -> Tensor:
    """Reward scaling: r / std, which keeps the sign of a score (Section 5.3.1).

    Args:
        scores: Raw scores r, `[B]`.
        std: Standard deviation of all scores so far, 0-dim, at least 0; 0 (up to rounding) counts
            as 1.

    Returns:
        Scaled scores, `[B]`, in the dtype of `scores`.

    Examples:
        >>> scaled_scores(torch.tensor([-1.0, 3.0]), std=2.0).tolist()
        [-0.5, 1.5]
    """
    _check_scores(scores, std=std)
    return (scores.detach().double() / safe_std(std)).to(scores.dtype)


def clipped_scores(scores: Tensor, clip: float) -> Tensor:
    """Reward clipping: scores clipped to [-clip, clip] (Section 5.3.1).

    Args:
        scores: Scores, `[B]`.
        clip: Largest absolute value, positive, in the units of the scores.

    Returns:
        Clipped scores, `[B]`.

    Examples:
        >>> clipped_scores(torch.tensor([-3.0, 0.5]), clip=2.0).tolist()
        [-2.0, 0.5]
    """
    _check_scores(scores)
    check_positive("clip", clip)
    return scores.detach().clamp(-clip, clip)


def length_penalty(lengths: Tensor, *, shortest: int, longest: int | None) -> Tensor:
    """Minus the distance of a length n from a range: -max(shortest - n, n - longest, 0).

    Args:
        lengths: Lengths of any shape and dtype, in any unit, for instance tokens.
        shortest: Smallest length without a penalty, in that unit.
        longest: Largest length without a penalty, in that unit; `None` for no limit.

    Returns:
        Penalties in the shape of `lengths`, float32, at most 0.

    Examples:
        >>> length_penalty(torch.tensor([1, 9]), shortest=3, longest=5).tolist()
        [-2.0, -4.0]
    """
    lengths = lengths.float()
    outside = (shortest - lengths).clamp(min=0)
    if longest is not None:
        outside = outside + (lengths - longest).clamp(min=0)
    return -outside


def soft_overlong_penalty(lengths: Tensor, *, longest: int, buffer: int) -> Tensor:
    """DAPO's penalty for long responses (arXiv 2503.14476, Eq. 13).

    It is 0 up to a length of `longest - buffer` tokens, and falls linearly to -1 at `longest`.

    Args:
        lengths: Tokens of each response, any shape.
        longest: Length with the full penalty, tokens.
        buffer: Tokens over which the penalty grows, positive.

    Returns:
        Penalties in the shape of `lengths`, float32, in [-1, 0].

    Examples:
        >>> soft_overlong_penalty(torch.tensor([7, 10]), longest=10, buffer=4).tolist()
        [-0.25, -1.0]
    """
    check_positive("buffer", buffer)
    return (length_penalty(lengths, shortest=0, longest=longest - buffer) / buffer).clamp(min=-1.0)


def token_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    kl_coef: float,
    estimator: KLEstimator = "k1",
) -> Tensor:
    """The score at the last token of a response, minus a KL penalty at every token (Eqs. 3, 19).

    r_t = [t is last] score - eta KL_t. The last token is the last one that the mask keeps, whether
    it is EOS or the response was cut off.

    Args:
        scores: One score for each response, `[B]`. It has no effect if the response has no token.
        logprobs: Log-probs under the policy that sampled the tokens, `[B, T]` nats.
        ref_logprobs: Log-probs of the same tokens under the reference, `[B, T]` nats.
        mask: Response tokens, `[B, T]` bool.
        kl_coef: eta, at least 0, in units of the score per nat.
        estimator: Estimate of KL at a token, see `kl_estimate`.

    Returns:
        Rewards, `[B, T]`, in units of the score and the dtype of the log-probs; 0 outside the mask.

    Examples:
        >>> logprobs, ref_logprobs = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-2.0, -1.0]])
        >>> scores, mask = torch.tensor([2.0]), torch.ones(1, 2, dtype=torch.bool)
        >>> token_rewards(scores, logprobs, ref_logprobs, mask, kl_coef=0.5).tolist()
        [[-0.5, 2.0]]
    """
    check_floating(2, logprobs=logprobs, ref_logprobs=ref_logprobs)
    check_mask(logprobs.shape, mask=mask)
    check_floating(logprobs.shape[:1], scores=scores)
    check_not_negative("kl_coef", kl_coef)
    kl = kl_estimate(logprobs.detach(), ref_logprobs.detach(), estimator).masked_fill(~mask, 0.0)
    # the last kept token, wherever padding and gaps lie
    kept_after = mask.flip(1).cumsum(1).flip(1)  # kept tokens from this one on
    is_last = mask & (kept_after == 1)
    return torch.where(is_last, scores.detach().to(kl.dtype).unsqueeze(1), 0.0) - kl_coef * kl


def _check_scores(scores: Tensor, **numbers: Tensor | float) -> None:
    check_floating(1, scores=scores)
    for name, number in numbers.items():
        if isinstance(number, Tensor):
            check_floating((), **{name: number})
        elif name == "std":
            check_not_negative(name, number)
        else:
            check_number(name, number, "a finite number", math.isfinite)
