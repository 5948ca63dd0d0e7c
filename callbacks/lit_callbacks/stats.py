"""Statistics of short lists of numbers: noise, trend and shape of a distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import fmean, median, quantiles
from typing import NamedTuple

MAD_TO_STD = 1.4826  # scales a median absolute deviation to the std of normal numbers


def noise_of(values: Sequence[float]) -> float:
    """Standard deviation of a series' noise, from the differences of neighbours.

    The median absolute difference is scaled to the standard deviation of normal numbers, so neither
    a trend nor a few jumps count as noise.

    Args:
        values: The series. Values that are not finite are left out.

    Returns:
        The estimate; 0 for fewer than four values.

    Examples:
        >>> noise_of([1.0, 2.0, 3.0, 4.0, 50.0])
        0.0
    """
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 4:
        return 0.0
    steps = [after - before for before, after in pairwise(finite)]
    middle = median(steps)
    return MAD_TO_STD * median(abs(step - middle) for step in steps) / math.sqrt(2)


class Trend(NamedTuple):
    """Direction of a series.

    Attributes:
        slope: Change per step: the median slope over all pairs of values (Theil-Sen).
        score: Mann-Kendall statistic in standard deviations; approximately standard normal for a
            series without a trend.
    """

    slope: float
    score: float


def trend(values: Sequence[float]) -> Trend:
    """Robust slope of a series, and how certain its sign is (Theil-Sen, Mann-Kendall).

    Both use the order of pairs only, so neither the size of the noise nor a single outlier makes a
    trend. Autocorrelated noise drifts, and a stretch of it can look like a trend. Ties count for
    neither direction, which makes the score conservative.

    Args:
        values: Finite numbers, the newest last. Fewer than three have no trend.

    Examples:
        >>> trend([1.0, 2.0, 3.0, 4.0, 90.0]).slope
        1.0
    """
    n = len(values)
    if n < 3:
        return Trend(0.0, 0.0)
    slopes = [(values[j] - values[i]) / (j - i) for i, j in combinations(range(n), 2)]
    signs = sum((slope > 0) - (slope < 0) for slope in slopes)
    deviation = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    # One less than the sum: the sum moves in steps of two (continuity correction).
    score = 0.0 if signs == 0 else (signs - math.copysign(1, signs)) / deviation
    return Trend(median(slopes), score)


@dataclass(frozen=True)
class Distribution:
    """Shape of a sample.

    Attributes:
        mean: Arithmetic mean.
        std: Population standard deviation.
        skewness: Third standardized moment; 0 if all numbers are equal.
        kurtosis: Fourth standardized moment minus 3; 0 if all numbers are equal.
        q05: 5 % quantile.
        median: 50 % quantile.
        q95: 95 % quantile.
        tail: (q95 - median) / (median - q05): 1 for a symmetric sample. Also 1 if median and q05
            are equal, as there is no lower half to compare with.
    """

    mean: float
    std: float
    skewness: float
    kurtosis: float
    q05: float
    median: float
    q95: float
    tail: float


def distribution(numbers: Sequence[float]) -> Distribution:
    """The shape of a sample.

    Args:
        numbers: The sample.

    Returns:
        The shape; every field is NaN if a number is not finite or there are no numbers.

    Examples:
        >>> shape = distribution([1.0, 2.0, 3.0])
        >>> shape.median, shape.skewness, shape.tail
        (2.0, 0.0, 1.0)
    """
    if not numbers or not all(map(math.isfinite, numbers)):
        return Distribution(*[math.nan] * 8)
    mean = fmean(numbers)
    variance = fmean((x - mean) ** 2 for x in numbers)
    third, fourth = (fmean((x - mean) ** power for x in numbers) for power in (3, 4))
    # Equal numbers have a variance of a few ulps of their mean squared, and no shape.
    flat = variance <= 1e-24 * max(1.0, mean * mean)
    # `quantiles` needs at least two numbers.
    cuts = quantiles(numbers, n=20, method="inclusive") if len(numbers) > 1 else [mean] * 19
    q05, middle, q95 = cuts[0], cuts[9], cuts[18]
    return Distribution(
        mean,
        math.sqrt(variance),
        0.0 if flat else third / variance**1.5,
        0.0 if flat else fourth / variance**2 - 3.0,
        q05,
        middle,
        q95,
        (q95 - middle) / (middle - q05) if middle > q05 else 1.0,
    )
