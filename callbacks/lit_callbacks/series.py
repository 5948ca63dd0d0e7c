"""Robust statistics of short series of numbers: baseline, smoothing and trend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

MAD_TO_STD = 1.4826  # makes the median absolute deviation of normal numbers their std


class Baseline(NamedTuple):
    """What a signal is like while nothing is wrong.

    Attributes:
        center: median.
        spread: median absolute deviation times 1.4826, the standard deviation of normal numbers.
    """

    center: float
    spread: float


def robust_baseline(values: Sequence[float]) -> Baseline:
    """Median and scaled median absolute deviation; half the values may be outliers.

    Args:
        values: finite numbers, at least one.

    Raises:
        ValueError: without values.
    """
    if not values:
        raise ValueError("values: expected at least one number, got none")
    center = median(values)
    return Baseline(center, MAD_TO_STD * median(abs(value - center) for value in values))


class Trend(NamedTuple):
    """Where a series is going.

    Attributes:
        slope: change per record: the median slope of all pairs (Theil-Sen).
        score: Mann-Kendall's statistic in standard deviations; about normal without a trend.
    """

    slope: float
    score: float


def trend(values: Sequence[float]) -> Trend:
    """Robust slope of a series and how sure its sign is (Theil-Sen, Mann-Kendall).

    Both look at the order of pairs only, so that neither the size of noise nor one wild value makes
    a trend. Noise with memory wanders, and a stretch of it can be a trend. Ties count to neither
    side, which makes the score smaller than it might be.

    Args:
        values: finite numbers, the newest last. Fewer than three have no trend.
    """
    n = len(values)
    if n < 3:
        return Trend(0.0, 0.0)
    rises = [(values[j] - values[i]) / (j - i) for i, j in combinations(range(n), 2)]
    signs = sum((rise > 0) - (rise < 0) for rise in rises)
    deviation = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    # One less than the sum: the sum moves in steps of two (continuity correction).
    score = 0.0 if signs == 0 else (signs - math.copysign(1, signs)) / deviation
    return Trend(median(rises), score)
