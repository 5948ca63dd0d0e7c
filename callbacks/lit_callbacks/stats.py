"""Statistics of short lists of numbers: noise, trend and shape of a distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, pairwise
from statistics import fmean, median, pstdev, quantiles

MAD_TO_STD = 1.4826  # scales a median absolute deviation to the std of normal numbers


def noise_of(values: Sequence[float]) -> float:
    """Standard deviation of a series' noise, from the differences of neighbours.

    The median absolute difference is scaled to the standard deviation of normal numbers, so neither
    a trend nor a few jumps count as noise. Values that are not finite are left out, and fewer than
    four have a noise of 0.

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


def trend(values: Sequence[float]) -> tuple[float, float]:
    """Robust slope of a series, and a score of how certain its sign is.

    The slope is the median over all pairs of values (Theil-Sen), per step, and the score is
    Mann-Kendall's statistic, nearly standard normal for a series without a trend.

    Neither the size of the noise nor an outlier makes a trend; autocorrelated noise can look like
    one. Ties count for neither direction. Fewer than three have no trend.
    """
    n = len(values)
    if n < 3:
        return 0.0, 0.0
    slopes = [(values[j] - values[i]) / (j - i) for i, j in combinations(range(n), 2)]
    signs = sum((slope > 0) - (slope < 0) for slope in slopes)
    deviation = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    # One less than the sum: the sum moves in steps of two (continuity correction).
    score = 0.0 if signs == 0 else (signs - math.copysign(1, signs)) / deviation
    return median(slopes), score


def distribution(numbers: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation, and 5 %, 50 % and 95 % quantiles of a sample.

    All are NaN if a number is not finite or there are none.
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
