"""Sums, means and whitening over the elements that a mask keeps.

Masks are bool; True keeps an element. Elements outside a mask may hold anything, NaN included: they
affect no value and no gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lit_rlhf.checks import check_positive
from lit_rlhf.tensor_checks import check_floating, check_mask

__all__ = [
    "Moments",
    "masked_mean",
    "masked_moments",
    "masked_sum",
    "masked_whiten",
    "merged_moments",
]

_SMALLEST_STD = 1e-8  # a smaller one is rounding error, and dividing by it would amplify noise


class Moments(NamedTuple):
    """Moments of a set of numbers; all are 0 for an empty set.

    Attributes:
        mean: Mean, 0-dim float64.
        var: Population variance (divisor `count`), 0-dim float64, at least 0.
        count: How many numbers, 0-dim float64.
    """

    mean: Tensor
    var: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which nobody needs here


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of the kept values.

    Args:
        values: Numbers of any shape and dtype.
        mask: Which to keep, bool of the same shape.
        dim: Dimension to sum over; `None` for all.

    Returns:
        The sum, 0-dim or without `dim`; 0 where nothing is kept.

    Examples:
        >>> values, mask = torch.tensor([1.0, 2.0, torch.nan]), torch.tensor([True, True, False])
        >>> masked_sum(values, mask).item()
        3.0
    """
    check_mask(values.shape, mask=mask)
    # filled and not multiplied, because 0 * NaN is NaN
    masked_values = values.masked_fill(~mask, 0)
    return masked_values.sum() if dim is None else masked_values.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the kept values.

    Args:
        values: Floating-point numbers of any shape.
        mask: Which to keep, bool of the same shape.
        dim: Dimension to average over; `None` for all.

    Returns:
        The mean, 0-dim or without `dim`; 0 where nothing is kept.

    Examples:
        >>> values, mask = torch.tensor([1.0, 2.0, torch.nan]), torch.tensor([True, True, False])
        >>> masked_mean(values, mask).item()
        1.5
    """
    check_floating(None, values=values)
    total = masked_sum(values, mask, dim)
    return total / (mask.sum() if dim is None else mask.sum(dim)).clamp(min=1)


def masked_average(values: Tensor, mask: Tensor, denominator: Tensor | float | None) -> Tensor:
    """Sum of the kept values, divided by a denominator that may count more than this mask.

    With the token count of a whole step as denominator, the results of its micro-batches and ranks
    add up to the mean over all of its tokens, however unevenly these are distributed.

    Args:
        values: Floating-point numbers of any shape.
        mask: Which to keep, bool of the same shape.
        denominator: Positive number, or 0-dim tensor without a graph; `None` for the count of
            `mask`. A tensor of 0 (no token in the whole step) counts as 1.

    Returns:
        The quotient, 0-dim.

    Examples:
        >>> values, mask = torch.tensor([1.0, 2.0]), torch.tensor([True, True])
        >>> masked_average(values, mask, denominator=4.0).item()
        0.75
    """
    if denominator is None:
        return masked_mean(values, mask)
    check_floating(None, values=values)
    if isinstance(denominator, Tensor):
        if denominator.dim():
            raise ValueError(f"denominator: expected 0-dim, got shape {tuple(denominator.shape)}")
    else:
        check_positive("denominator", denominator)
    total = masked_sum(values, mask)
    divisor = torch.as_tensor(denominator, dtype=total.dtype, device=total.device).detach()
    return total / torch.where(divisor == 0, torch.ones_like(divisor), divisor)


def masked_moments(values: Tensor, mask: Tensor) -> Moments:
    """Mean, population variance and count of the kept values, in float64.

    Args:
        values: Floating-point numbers of any shape.
        mask: Which to keep, bool of the same shape.

    Returns:
        The moments, without a graph.

    Examples:
        >>> values, mask = torch.tensor([1.0, 3.0, torch.nan]), torch.tensor([True, True, False])
        >>> [x.item() for x in masked_moments(values, mask)]
        [2.0, 1.0, 2.0]
    """
    check_floating(None, values=values)
    # float64, because float32 would lose the variance of values far from 0
    exact = values.detach().double()
    count = mask.sum()
    mean = masked_mean(exact, mask)
    squares = (exact - mean).masked_fill(~mask, 0).square().sum()
    return Moments(mean, squares / count.clamp(min=1), count.double())


def merged_moments(a: Moments, b: Moments) -> Moments:
    """Moments of the union of two sets (the parallel formula of Chan, Golub and LeVeque).

    Args:
        a: Moments of one set, which may be empty.
        b: Moments of the other, which may be empty, on the same device.

    Returns:
        Moments of the union, on that device.

    Examples:
        >>> pair = masked_moments(torch.tensor([1.0, 3.0]), torch.tensor([True, True]))
        >>> single = masked_moments(torch.tensor([5.0]), torch.tensor([True]))
        >>> [round(x.item(), 4) for x in merged_moments(pair, single)]
        [3.0, 2.6667, 3.0]
    """
    count = a.count + b.count
    # weigh by shares of the union: they stay finite when one set is empty, or both are
    share = b.count / count.clamp(min=1)
    delta = b.mean - a.mean
    within = a.var * (1 - share) + b.var * share
    between = delta.square() * share * (1 - share)
    return Moments(a.mean + delta * share, within + between, count)


def safe_std(std: Tensor | float) -> Tensor:
    """Standard deviation to divide by: 1 where `std` is 0 up to rounding.

    Args:
        std: Standard deviation of any shape, at least 0.

    Returns:
        Standard deviation of the same shape, float64, positive.

    Examples:
        >>> safe_std(torch.tensor([2.0, 1e-12])).tolist()
        [2.0, 1.0]
    """
    exact = torch.as_tensor(std, dtype=torch.float64)
    return torch.where(exact > _SMALLEST_STD, exact, torch.ones_like(exact))


def masked_whiten(values: Tensor, mask: Tensor, moments: Moments | None = None) -> Tensor:
    """The kept values shifted to mean 0 and scaled to unit variance: (x - mean) / std.

    Mean and variance are constants for autograd. Values that are all equal are only shifted.

    Args:
        values: Floating-point numbers of any shape.
        mask: Which to keep, bool of the same shape.
        moments: Mean and variance to use, for instance over all ranks; `None` for the moments of
            the kept values.

    Returns:
        Whitened values in the shape and dtype of `values`; 0 outside the mask.

    Examples:
        >>> values, mask = torch.tensor([2.0, 6.0, 99.0]), torch.tensor([True, True, False])
        >>> masked_whiten(values, mask).tolist()
        [-1.0, 1.0, 0.0]
    """
    check_floating(None, values=values)
    check_mask(values.shape, mask=mask)
    if moments is None:
        moments = masked_moments(values, mask)
    # float64 until the end: in float32 a large mean would leave its rounding error behind
    whitened = (values.double() - moments.mean) / safe_std(moments.var.sqrt())
    return whitened.to(values.dtype).masked_fill(~mask, 0)
