"""The rules by which results confirm or contradict a claim, version 4 (2026-11-28).

A comparison is an effect in each seed, with an interval of its mean over the seeds against the
margin that the claim names. It holds or fails where the interval lies on one side, and is undecided
where the interval has both. The interval is Student's t: seeds are independent, and of three to ten
of them an exact bootstrap has too few resamples for 95 %.

A claim is confirmed if all of its comparisons hold, each with its own 95 % interval. It is
contradicted, or holds partly, if any of them fails. The more there are, the more likely one fails
by chance, so these verdicts take intervals that Bonferroni's correction has widened. `history.py`
has the earlier versions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np

from experiments.judging import CONFIDENCE, Interval, student_interval
from experiments.reproduce.table import ITERATIONS, Arm, Foundation

VERSION = 4
DATE = "2026-11-28"
MIN_SEEDS = 3
"""Fewer seeds give no verdict."""
MOST_SEEDS = 500
"""Most seeds that `project` assumes."""
TAIL = 0.1
"""Share of a curve over which its start and its end are averaged."""
FLOOR = -1.0
"""A gain below it counts as this: how far a collapsed run has fallen says nothing."""
NOISE = 0.1
"""Least standard deviation of a gain over seeds: what sampling 256 prompts twice leaves."""
RATIOS = ("kl", "response_length", "perplexity", "value_loss", "score_width", "text_perplexity")
"""Positive measures, which are compared as ratios, by their logarithms."""

Runs = Mapping[str, Mapping[str, Any]]
"""Results of one seed by the name of arm or foundation."""
At = Literal["start", "end", "peak", "low", "early"]


class Verdict(StrEnum):
    """A verdict on a claim."""

    CONFIRMED = "confirmed"
    PARTLY = "partly"
    UNDECIDED = "undecided"
    NOT_AT_THIS_SCALE = "not at this scale"
    CONTRADICTED = "contradicted"
    NOT_RUN = "not run yet"


@dataclass(frozen=True)
class Value:
    """A number of a run.

    Attributes:
        part: The arm or foundation.
        measure: A measure of the samples on held-out prompts; or of the curves, of rollouts, which
            `rollout.` before its name asks for; or the dotted name of a single number of the
            result. `gain` is gold minus the gold of the run's first samples, but at least `FLOOR`;
            `score_width` is the standard deviation of a sample's histogram of scores.
        at: Which value of a course: the first, the last, the largest, the smallest, or the mean
            over the first quarter (`early`). Of curves each is a mean over a tenth of the run. Not
            used for a single number.
    """

    part: Arm | Foundation
    measure: str
    at: At = "end"

    def of(self, runs: Runs) -> float:
        """The number; NaN if the run has none. A monitor that never warned did so after the end.

        Raises:
            KeyError: If the run is not there.
        """
        run = runs[self.part.name]
        samples = run.get("samples", {})
        if self.measure == "gain":
            gold = samples["gold"]
            return max(FLOOR, _pick([value - gold[0] for value in gold], self.at, width=1))
        if self.measure == "score_width":
            edges = samples["histogram_edges"]
            return _pick([_width(row, edges) for row in samples["histograms"]], self.at, width=1)
        if self.measure in samples:
            return _pick(samples[self.measure], self.at, width=1)
        curve = self.measure.removeprefix("rollout.")
        if curve in run.get("curves", {}):
            course = run["curves"][curve]
            return _pick(course, self.at, width=max(1, round(TAIL * len(course))))
        value: Any = run
        for name in self.measure.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is None:
            return ITERATIONS + 1 if self.measure.startswith("first_warning.") else math.nan
        return float(value)


def _pick(course: Sequence[float | None], at: At, width: int) -> float:
    values = [value for value in course if value is not None]
    if not values:
        return math.nan
    windows = [values[start : start + width] for start in range(max(1, len(values) - width + 1))]
    parts: dict[At, Sequence[float]] = {
        "start": values[:width],
        "end": values[-width:],
        "early": values[: max(1, len(values) // 4)],
        "peak": max(windows, key=fmean),
        "low": min(windows, key=fmean),
    }
    return fmean(parts[at])


def _width(counts: Sequence[int], edges: Sequence[float]) -> float:
    centres = np.convolve(edges, [0.5, 0.5], "valid")
    mean = np.average(centres, weights=counts)
    return float(np.sqrt(np.average((centres - mean) ** 2, weights=counts)))


@dataclass(frozen=True)
class Check:
    """A comparison: `left` is below, above or near `factor * right + margin`.

    Attributes:
        left: A number.
        sign: `<`, `>`, or `~` for a difference of at most `margin`.
        right: Another, or a constant.
        factor: Factor of the right one.
        margin: Added to the right one.
    """

    left: Value
    sign: Literal["<", ">", "~"]
    right: Value | float
    factor: float = 1.0
    margin: float = 0.0

    @property
    def is_ratio(self) -> bool:
        """Whether it compares logarithms, and its effect is one."""
        return self.margin == 0 and self.left.measure.split(".")[0] in RATIOS

    def effect(self, runs: Runs) -> float:
        """By how much a seed is on the right side; for `~` the difference itself.

        NaN if a number is missing, if a ratio is not positive, or if both gains are at their floor:
        collapsed runs are not compared.
        """
        left = self.left.of(runs)
        right = self.right.of(runs) if isinstance(self.right, Value) else self.right
        if self.left.measure == "gain" and left == right == FLOOR:
            return math.nan
        right *= self.factor
        if self.is_ratio:
            if not (left > 0 and right > 0):
                return math.nan
            left, right = math.log(left), math.log(right)
        difference = left - right - (0 if self.sign == "~" else self.margin)
        return -difference if self.sign == "<" else difference

    def interval(
        self, seeds: Sequence[Runs], *, comparisons: int = 1, n_seeds: int | None = None
    ) -> Interval:
        """The mean effect with its 95 % interval; NaN if the effect of a seed is.

        Args:
            seeds: Results of each seed.
            comparisons: Number of comparisons that are judged together, for Bonferroni.
            n_seeds: Number of seeds to assume, with the mean and spread of these; `None`: these.
        """
        effects = [self.effect(runs) for runs in seeds]
        if not all(map(math.isfinite, effects)):
            return Interval(math.nan, math.nan, math.nan)
        is_gain = self.left.measure == "gain" and not isinstance(self.right, Value)
        return student_interval(
            effects, NOISE if is_gain else 0.0, comparisons=comparisons, n_seeds=n_seeds
        )

    def holds(
        self, seeds: Sequence[Runs], *, comparisons: int = 1, n_seeds: int | None = None
    ) -> bool | None:
        """Whether it holds; None where the interval has both sides of the margin.

        Args:
            seeds: As for `interval`.
            comparisons: As for `interval`.
            n_seeds: As for `interval`.
        """
        low, _, high = self.interval(seeds, comparisons=comparisons, n_seeds=n_seeds)
        if self.sign == "~":
            inside = -self.margin <= low and high <= self.margin
            outside = self.margin
            return True if inside else False if low > outside or high < -outside else None
        return True if low > 0 else False if high < 0 else None

    def values(self) -> list[Value]:
        """The numbers that it compares."""
        return [value for value in (self.left, self.right) if isinstance(value, Value)]


@dataclass(frozen=True)
class Claim:
    """A statement.

    Attributes:
        source: Section or figure of the paper; of claims beyond it, `beyond the paper`.
        text: The statement in our words.
        figure: Name of the figure that shows it.
        checks: The comparisons that make it true, each of which could fail.
        premise: Comparisons without which there is nothing to see at this scale.
        then: Comparisons that say something only where `checks` hold, so they can spoil a claim
            and never save it.
        note: Why the verdict is what it is, where the numbers do not tell.
    """

    source: str
    text: str
    figure: str
    checks: tuple[Check, ...]
    premise: tuple[Check, ...] = ()
    then: tuple[Check, ...] = ()
    note: str = ""

    def all_checks(self) -> tuple[Check, ...]:
        """All comparisons, the premise's first."""
        return (*self.premise, *self.checks, *self.then)

    @property
    def n_comparisons(self) -> int:
        """Number of comparisons that can contradict it."""
        return len(self.checks) + len(self.then)

    def parts(self) -> set[str]:
        """Names of the arms and foundations that it is about."""
        return {value.part.name for check in self.all_checks() for value in check.values()}


class Finding(NamedTuple):
    """The verdict on a claim.

    Attributes:
        verdict: The verdict.
        seeds: The results that it rests on, of the seeds with all runs.
    """

    verdict: Verdict
    seeds: list[Runs]


class Projection(NamedTuple):
    """What more seeds would decide.

    Attributes:
        n_seeds: The least number of seeds that decides the claim.
        verdict: The verdict with as many.
    """

    n_seeds: int
    verdict: Verdict


def judge(claim: Claim, results: Mapping[int, Runs]) -> Finding:
    """Judge a claim.

    - Fewer than `MIN_SEEDS` seeds with all its runs: not run yet.
    - Else as `decide` says.

    Args:
        claim: The claim.
        results: Results by seed.
    """
    seeds = [runs for runs in results.values() if claim.parts() <= runs.keys()]
    if len(seeds) < MIN_SEEDS:
        return Finding(Verdict.NOT_RUN, seeds)
    return Finding(decide(claim, seeds), seeds)


def decide(claim: Claim, seeds: Sequence[Runs], n_seeds: int | None = None) -> Verdict:
    """The verdict on a claim whose runs are there.

    - A premise fails, with Bonferroni's correction for the premises: not at this scale.
    - Each premise and each comparison holds at 95 %: confirmed. This needs no correction, since
      a false claim is confirmed only if its false comparison is found to hold.
    - With Bonferroni's correction for the claim's comparisons, one fails and one holds: partly; one
      fails and none holds: contradicted.
    - Else undecided.

    Args:
        claim: The claim.
        seeds: Results of each seed with all runs of the claim.
        n_seeds: Number of seeds to assume, with the mean and spread of these; `None`: these.
    """

    def hold(checks: Sequence[Check], *, comparisons: int = 1) -> list[bool | None]:
        return [check.holds(seeds, comparisons=comparisons, n_seeds=n_seeds) for check in checks]

    if False in hold(claim.premise, comparisons=len(claim.premise)):
        return Verdict.NOT_AT_THIS_SCALE
    if not all(hold(claim.premise)):
        return Verdict.UNDECIDED
    checks = claim.checks
    if all(hold(checks)):
        checks = (*checks, *claim.then)
        if all(hold(checks)):
            return Verdict.CONFIRMED
    together = hold(checks, comparisons=claim.n_comparisons)
    if False not in together:
        return Verdict.UNDECIDED
    return Verdict.PARTLY if True in together else Verdict.CONTRADICTED


def project(claim: Claim, seeds: Sequence[Runs]) -> Projection | None:
    """How many seeds would decide a claim if each effect kept its mean and spread.

    Args:
        claim: The claim.
        seeds: Results of each seed with all runs of the claim.

    Returns:
        None if `MOST_SEEDS` seeds would not decide it either.
    """
    for n_seeds in range(len(seeds), MOST_SEEDS + 1):
        verdict = decide(claim, seeds, n_seeds)
        if verdict is not Verdict.UNDECIDED:
            return Projection(n_seeds=n_seeds, verdict=verdict)
    return None


def hash_rules(claims: Sequence[Claim]) -> str:
    """Hash of the version and of every comparison; words and labels do not change it."""
    constants = (VERSION, MIN_SEEDS, CONFIDENCE, TAIL, FLOOR, NOISE, RATIOS)

    def plain(value: Value | float) -> object:
        if not isinstance(value, Value):
            return value
        return (value.part.name, value.measure, value.at)

    rules = [
        [
            [(plain(c.left), c.sign, plain(c.right), c.factor, c.margin) for c in checks]
            for checks in (claim.premise, claim.checks, claim.then)
        ]
        for claim in claims
    ]
    return hashlib.sha256(repr((constants, rules)).encode()).hexdigest()[:12]
