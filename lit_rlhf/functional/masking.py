"""Sums, means and whitening over the elements that a mask keeps.

Masks are bool, True means keep. What lies outside a mask may be anything, NaN included: it takes
part in no value and no gradient. Notation: `B` batch, `T` tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lit_rlhf.functional.checks import (
    check_dims,
    check_floating,
    check_integer,
    check_mask,
    check_positive,
)

_SMALLEST_STD = 1e-8  # below it a spread is rounding error, and dividing by it makes noise large


class Moments(NamedTuple):
    """First two moments of a set of numbers, without a graph.

    Attributes:
        mean: Mean, 0-dim float64; 0 for an empty set.
        var: Population variance, 0-dim float64; 0 for an empty set.
        count: Number of elements, 0-dim float64.
    """

    mean: Tensor
    var: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which nobody needs here


def length_mask(lengths: Tensor, max_length: int) -> Tensor:
    """Mask of the first `lengths` places of each row.

    Args:
        lengths: Elements to keep, `[B]` integers in [0, max_length].
        max_length: Width of the mask.

    Returns:
        `[B, max_length]` bool.

    Raises:
        ValueError: If `lengths` is not a vector of integers, or one is out of range.
    """
    check_dims("lengths", lengths, 1)
    check_integer("lengths", lengths)
    if bool(((lengths < 0) | (lengths > max_length)).any()):
        raise ValueError(f"lengths: expected values in [0, {max_length}], got {lengths.tolist()}")
    return torch.arange(max_length, device=lengths.device) < lengths.unsqueeze(1)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of the kept values.

    Args:
        values: Any shape.
        mask: Bool, shape of `values`.
        dim: Dimension to sum over; `None` sums over all.

    Returns:
        0-dim, or the shape of `values` without `dim`; 0 where nothing is kept.

    Raises:
        ValueError: If `mask` is not bool or of another shape.
    """
    check_mask(mask, values.shape)
    kept = values.masked_fill(~mask, 0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the kept values.

    Args:
        values: Floating-point, any shape.
        mask: Bool, shape of `values`.
        dim: Dimension to average over; `None` averages over all.

    Returns:
        0-dim, or the shape of `values` without `dim`; 0 where nothing is kept.

    Raises:
        ValueError: If `values` is not floating-point, or `mask` not bool or of another shape.
    """
    check_floating("values", values)
    total = masked_sum(values, mask, dim)
    return total / (mask.sum() if dim is None else mask.sum(dim)).clamp(min=1)


def masked_average(values: Tensor, mask: Tensor, denominator: Tensor | float | None) -> Tensor:
    """Sum of the kept values over a denominator that may count more than this mask.

    With the token count of a whole step as denominator, the results of micro-batches (and of ranks,
    summed) add up to the mean over all of the step's tokens, however unevenly they are spread.

    Args:
        values: Floating-point, any shape.
        mask: Bool, shape of `values`.
        denominator: Positive number or 0-dim tensor; `None` takes the count of `mask`. A tensor
            that is 0 (nothing is kept anywhere) counts as 1.

    Returns:
        0-dim; 0 with a graph where nothing is kept.

    Raises:
        ValueError: If `values` is not floating-point, `mask` not bool or of another shape, or the
            denominator not 0-dim, or a number that is not positive.
    """
    if denominator is None:
        return masked_mean(values, mask)
    check_floating("values", values)
    if isinstance(denominator, Tensor):
        check_dims("denominator", denominator, 0)
    else:
        check_positive("denominator", denominator)
    total = masked_sum(values, mask)
    divisor = torch.as_tensor(denominator, dtype=total.dtype, device=total.device).detach()
    return total / torch.where(divisor == 0, torch.ones_like(divisor), divisor)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = False) -> Tensor:
    """Variance of the kept values.

    Args:
        values: Floating-point, any shape.
        mask: Bool, shape of `values`.
        unbiased: Divide by the count less one (sample variance) and not by the count (population).

    Returns:
        0-dim; 0 where fewer than two values are kept.

    Raises:
        ValueError: If `values` is not floating-point, or `mask` not bool or of another shape.
    """
    # filled before the square: 0 times a NaN outside the mask would be a NaN in the gradient
    differences = (values - masked_mean(values, mask)).masked_fill(~mask, 0)
    squares = differences.square().sum()
    return squares / (mask.sum() - int(unbiased)).clamp(min=1)


def masked_moments(values: Tensor, mask: Tensor) -> Moments:
    """Mean, population variance and count of the kept values, in float64.

    Args:
        values: Floating-point, any shape.
        mask: Bool, shape of `values`.

    Raises:
        ValueError: If `values` is not floating-point, or `mask` not bool or of another shape.
    """
    check_floating("values", values)
    exact = values.detach().double()
    return Moments(masked_mean(exact, mask), masked_var(exact, mask), mask.sum().double())


def merged_moments(a: Moments, b: Moments) -> Moments:
    """Moments of two sets taken together (Chan, Golub and LeVeque's parallel formula).

    Args:
        a: Moments of the one set; it may be empty.
        b: Moments of the other, on the same device; it may be empty.
    """
    count = a.count + b.count
    share = b.count / count.clamp(min=1)
    delta = b.mean - a.mean
    within = a.var * (1 - share) + b.var * share
    between = delta.square() * share * (1 - share)
    return Moments(a.mean + delta * share, within + between, count)


def spread_or_one(std: Tensor | float) -> Tensor:
    """A standard deviation to divide by: `std`, or 1 where it is 0 up to rounding.

    Args:
        std: Standard deviation, any shape.

    Returns:
        Float64, shape of `std`.
    """
    exact = torch.as_tensor(std, dtype=torch.float64)
    return torch.where(exact > _SMALLEST_STD, exact, torch.ones_like(exact))


def masked_whiten(
    values: Tensor, mask: Tensor, shift_mean: bool = True, moments: Moments | None = None
) -> Tensor:
    """The kept values at unit variance, and at mean 0 unless `shift_mean` is off.

    The statistics are constants for autograd.

    Args:
        values: Floating-point, any shape.
        mask: Bool, shape of `values`.
        shift_mean: Move the mean to 0, as advantages need it; else it stays where it is.
        moments: Moments to whiten by, for instance those over all ranks; `None` takes those of the
            kept values.

    Returns:
        Shape and dtype of `values`; 0 outside the mask. Values without a spread are only shifted.

    Raises:
        ValueError: If `values` is not floating-point, or `mask` not bool or of another shape.
    """
    check_floating("values", values)
    check_mask(mask, values.shape)
    if moments is None:
        moments = masked_moments(values, mask)
    # float64 up to the end: float32 would leave the rounding error of a large mean behind
    whitened = (values.double() - moments.mean) / spread_or_one(moments.var.sqrt())
    if not shift_mean:
        whitened = whitened + moments.mean
    return whitened.to(values.dtype).masked_fill(~mask, 0)
