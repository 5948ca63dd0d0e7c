"""Loss and explained variance of the critic (Eq. 16 of arXiv 2307.04964).

Notation: `B` batch, `T` response tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lit_rlhf.checks import check_dims, check_mask, check_positive, check_same
from lit_rlhf.functional.masking import Moments, masked_average, masked_mean, masked_moments


class ValueLoss(NamedTuple):
    """The critic's loss and its diagnostics.

    Attributes:
        loss: To minimize, 0-dim.
        clip_fraction: Share of the tokens of the call whose gradient the clip cut off, 0-dim, no
            graph.
    """

    loss: Tensor
    clip_fraction: Tensor


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    value_clip: float | None = 0.2,
    denominator: Tensor | float | None = None,
) -> ValueLoss:
    """Half the squared error of the critic, clipped (Eq. 16).

    Per token 0.5 max((V - R)^2, (V_clip - R)^2), where V_clip is V clipped to within `value_clip`
    of the value at the rollout. The larger error counts, so that leaving the interval gains
    nothing. The loss is 0 with a graph if `mask` is empty.

    Args:
        values: Of the critic, with a graph, `[B, T]`.
        old_values: Of the critic at the rollout, `[B, T]`; constants.
        returns: Targets, `[B, T]`; constants.
        mask: Tokens to train on, `[B, T]` bool.
        value_clip: Largest distance from the old value, positive; `None` for no clipping.
        denominator: Divisor of the sum over tokens; `None` for the count of `mask`.

    Examples:
        >>> values, old_values = torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 1.0]])
        >>> returns, mask = torch.tensor([[2.0, 3.0]]), torch.ones(1, 2, dtype=torch.bool)
        >>> out = value_loss(values, old_values, returns, mask, value_clip=1.0)
        >>> out.loss.item(), out.clip_fraction.item()  # (1 + 1) / 4: the second value counts as 2
        (0.5, 0.5)
    """
    check_dims("values", values, 2)
    check_same(values.shape, values=values, old_values=old_values, returns=returns)
    check_mask(mask, values.shape)
    # before the squares: values outside the mask could overflow and make the gradient NaN
    values, old_values, returns = (
        x.masked_fill(~mask, 0.0) for x in (values, old_values.detach(), returns.detach())
    )
    errors = (values - returns).square()
    clipped = torch.zeros_like(mask)
    if value_clip is not None:
        check_positive("value_clip", value_clip)
        bounded = old_values + (values - old_values).clamp(-value_clip, value_clip)
        bounded_errors = (bounded - returns).square()
        # within the interval both errors are equal up to rounding, which must not count as clipped
        clipped = (bounded_errors > errors) & ((values - old_values).abs() > value_clip)
        errors = torch.maximum(errors, bounded_errors)
    return ValueLoss(
        loss=0.5 * masked_average(errors, mask, denominator),
        clip_fraction=masked_mean(clipped.to(errors.dtype), mask),
    )


def explained_variance(
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    moments: Callable[[Tensor, Tensor], Moments] = masked_moments,
) -> Tensor:
    """Share of the returns' variance that the critic explains: 1 - Var(R - V) / Var(R), 0-dim.

    At most 1: 1 for a perfect critic, 0 for a constant one, and 0 if the returns have no variance
    to explain. It has no graph.

    Args:
        values: `[B, T]`.
        returns: `[B, T]`.
        mask: `[B, T]` bool.
        moments: Computes the moments of masked numbers; pass
            `lit_rlhf.stats.global_masked_moments` to count the tokens of all ranks.

    Examples:
        >>> returns, mask = torch.tensor([[1.0, 3.0]]), torch.ones(1, 2, dtype=torch.bool)
        >>> explained_variance(torch.tensor([[1.5, 2.5]]), returns, mask).item()
        0.75
    """
    check_dims("values", values, 2)
    check_same(values.shape, values=values, returns=returns)
    total = moments(returns, mask).var
    unexplained = moments(returns.double() - values.double(), mask).var
    explained = 1.0 - unexplained / torch.where(total > 0, total, torch.ones_like(total))
    return torch.where(total > 0, explained, torch.zeros_like(total)).to(values.dtype)
