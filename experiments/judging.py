"""Judgements that several experiments share: verdicts by seed, and Student's interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal, NamedTuple

from scipy.special import stdtrit

CONFIDENCE = 0.95
"""Share of intervals, or of families of intervals, that hold the truth."""


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

    @property
    def bound(self) -> float:
        """The largest effect, of either sign, that the interval holds."""
        return max(abs(self.low), abs(self.high))

    @property
    def excludes_zero(self) -> bool:
        """Whether all of the interval has one sign."""
        return self.low > 0 or self.high < 0


def student_interval(
    effects: Sequence[float],
    least_spread: float = 0.0,
    *,
    comparisons: int = 1,
    n_seeds: int | None = None,
) -> Interval:
    """Mean of an effect with Student's 95 % interval.

    Args:
        effects: The effect in each seed; two or more.
        least_spread: Standard deviation over the seeds that is assumed if theirs is smaller.
        comparisons: Number of intervals that are judged together. By Bonferroni each misses the
            truth with that part of 5 %, so that all of them hold it with at least 95 %.
        n_seeds: Number of seeds to compute the interval for, as if their effects had the mean and
            the spread of these; `None`: the number of these.
    """
    seeds = len(effects) if n_seeds is None else n_seeds
    mean = fmean(effects)
    spread = max(stdev(effects), least_spread)
    tail = (1 - CONFIDENCE) / 2 / comparisons
    half = float(stdtrit(seeds - 1, 1 - tail)) * spread / math.sqrt(seeds)
    return Interval(low=mean - half, mean=mean, high=mean + half)


@dataclass(frozen=True)
class Comparison:
    """How an arm compares with another one.

    Attributes:
        verdict: `better` or `worse` if the arm differs by more than a margin with each seed, `open`
            while seeds are missing, `not comparable` if an arm has no value with a seed, else
            `undecided`.
        interval: Paired 95 % interval of the difference; None if it is open or not comparable.
    """

    verdict: Literal["better", "worse", "open", "not comparable", "undecided"]
    interval: Interval | None = None

    @property
    def is_small_difference(self) -> bool:
        """Whether there is a difference by the interval, and none by the margin."""
        return (
            self.verdict == "undecided"
            and self.interval is not None
            and self.interval.excludes_zero
        )

    def __str__(self) -> str:
        """The verdict; of an undecided one the interval, and how large the difference may be."""
        if self.verdict != "undecided" or self.interval is None:
            return self.verdict
        low, mean, high = self.interval
        return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}], at most {self.interval.bound:.3f}"


def compare_by_seed(differences: Sequence[float], margin: float, seeds: int) -> Comparison:
    """Compare an arm with another one, from which it has to differ with each seed.

    Args:
        differences: Difference of the two arms in each seed; NaN where one has no value.
        margin: What a difference has to exceed.
        seeds: Number of seeds that are planned.
    """
    if len(differences) != seeds:
        return Comparison("open")
    if any(math.isnan(difference) for difference in differences):
        return Comparison("not comparable")
    interval = student_interval(differences)
    exact = [round(difference, 9) for difference in differences]  # 12 of 1200 are 0.01, not more
    if all(difference > margin for difference in exact):
        return Comparison("better", interval)
    if all(difference < -margin for difference in exact):
        return Comparison("worse", interval)
    return Comparison("undecided", interval)
