"""Judgements that several experiments share: verdicts by seed, and Student's interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)
"""Quantiles of Student's t for 95 % intervals, from one degree of freedom on."""


class Interval(NamedTuple):
    """The mean of an effect over seeds.

    Attributes:
        low: Lower end of the 95 % interval of the mean.
        mean: The mean.
        high: Upper end of the interval.
    """

    low: float
    mean: float
    high: float


def student_interval(effects: Sequence[float], least_spread: float = 0.0) -> Interval:
    """Mean of an effect with Student's 95 % interval.

    Args:
        effects: The effect in each seed; two or more.
        least_spread: Standard deviation over the seeds that is assumed if theirs is smaller.
    """
    mean = fmean(effects)
    spread = max(stdev(effects), least_spread)
    half = T_975[len(effects) - 2] * spread / math.sqrt(len(effects))
    return Interval(low=mean - half, mean=mean, high=mean + half)


def compare_by_seed(differences: Sequence[float], margin: float, seeds: int) -> str:
    """The verdict on an arm, which has to differ from another one with each seed.

    Args:
        differences: Difference of the two arms in each seed; NaN where one has no value.
        margin: What a difference has to exceed.
        seeds: Number of seeds that are planned.

    Returns:
        `better` or `worse` if the arm differs by more than the margin with each seed, `open` while
        seeds are missing, `not comparable` if a difference is NaN, else `no difference shown`.
    """
    if len(differences) != seeds:
        return "open"
    if any(math.isnan(difference) for difference in differences):
        return "not comparable"
    exact = [round(difference, 9) for difference in differences]  # 12 of 1200 are 0.01, not more
    if all(difference > margin for difference in exact):
        return "better"
    return "worse" if all(difference < -margin for difference in exact) else "no difference shown"
