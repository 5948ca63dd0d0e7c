"""Statistics of short lists of numbers: noise, trend and shape of a distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, pairwise
from statistics import fmean, median, pstdev, quantiles
from typing import NamedTuple

MAD_TO_STD = 1.4826
"""Scales a median absolute deviation to the standard deviation of normal numbers."""


class Trend(NamedTuple):
    """The direction of a series.

    Attributes:
        slope: Median slope, in units of the series per step.
        score: How certain the sign of the slope is, nearly standard normal for a series without a
            trend.
    """

    slope: float
    score: float


def noise_of(values: Sequence[float]) -> float:
    """Standard deviation of a series' noise, from the differences of neighbours.

    The median absolute difference is scaled to the standard deviation of normal numbers, so neither
    a trend nor a few jumps count as noise.

    Args:
        values: The series. Values that are not finite are left out.

    Returns:
        The noise, in units of the series; 0 for fewer than four finite values.

    Examples:
        >>> noise_of([1.0, 2.0, 3.0, 4.0, 50.0])
        0.0
    """
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 4:
        return 0.0
    steps = [next_value - value for value, next_value in pairwise(finite)]
    middle = median(steps)
    return MAD_TO_STD * median(abs(step - middle) for step in steps) / math.sqrt(2)


def trend(values: Sequence[float]) -> Trend:
    """Robust slope of a series, and a score of how certain its sign is.

    The slope is the median over all pairs of values (Theil-Sen), and the score is Mann-Kendall's
    statistic.

    Neither the size of the noise nor an outlier makes a trend; autocorrelated noise can look like
    one. Ties count for neither direction.

    Args:
        values: The series, finite, one value per step.

    Returns:
        Slope and score; both are 0 for fewer than three values.
    """
    n = len(values)
    if n < 3:
        return Trend(0.0, 0.0)
    slopes = [(values[j] - values[i]) / (j - i) for i, j in combinations(range(n), 2)]
    signs = sum((slope > 0) - (slope < 0) for slope in slopes)
    deviation = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    # subtract 1 for continuity: the sum moves in steps of two
    score = 0.0 if signs == 0 else (signs - math.copysign(1, signs)) / deviation
    return Trend(median(slopes), score)


def distribution(numbers: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation, and 5 %, 50 % and 95 % quantiles of a sample.

    Args:
        numbers: The sample.

    Returns:
        `mean`, `std` (of the population), `q05`, `median` and `q95`, in units of the sample. All
        are NaN if a number is not finite or there are none.
    """
    if not numbers or not all(map(math.isfinite, numbers)):
        return dict.fromkeys(("mean", "std", "q05", "median", "q95"), math.nan)
    # `quantiles` needs at least two numbers
    cuts = quantiles([*numbers, *numbers[:1]][: max(2, len(numbers))], n=20, method="inclusive")
    return {
        "mean": fmean(numbers),
        "std": pstdev(numbers),
        "q05": cuts[0],
        "median": cuts[9],
        "q95": cuts[18],
    }
