"""Chooses settings on some families and judges them on others."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from experiments.detector.criterion import CHOOSING, MAX_FALSE, MAX_MISSED

Row = dict[str, Any]
"""What each detector says of one run, see `experiments.detector.study.replay`."""
DETECTORS = ("ours", "KL", "rules")


class Score(NamedTuple):
    """How a detector did on a family.

    Attributes:
        family: Name of the family.
        healthy: Number of healthy runs.
        false: Number of those that were flagged.
        collapsed: Number of collapsed runs.
        found: Number of those that were flagged.
        leads: Steps from the flag to the harm, for the runs of which the harm is known.
    """

    family: str
    healthy: int
    false: int
    collapsed: int
    found: int
    leads: list[int]


def score(rows: Sequence[Row], detector: str, place: int, family: str) -> Score:
    """Count on a family, with the setting at `place`."""
    runs = [row for row in rows if row["family"] == family and row["collapsed"] is not None]
    flags = [(row, row[detector][place]) for row in runs]
    bad = [(row, flag) for row, flag in flags if row["collapsed"]]
    good = [flag for row, flag in flags if not row["collapsed"]]
    leads = [
        (row["harm"] - flag) * row["every"]
        for row, flag in bad
        if flag is not None and row["harm"] is not None
    ]
    return Score(
        family=family,
        healthy=len(good),
        false=sum(flag is not None for flag in good),
        collapsed=len(bad),
        found=sum(flag is not None for _, flag in bad),
        leads=leads,
    )


def choose(rows: Sequence[Row], detector: str, families: Sequence[str]) -> int:
    """Place of the best setting on the families, by the rule of `criterion`."""

    def cost(place: int) -> float:
        scores = [score(rows, detector, place, family) for family in families]
        false = fmean(s.false / s.healthy for s in scores if s.healthy)
        missed = fmean(1 - s.found / s.collapsed for s in scores if s.collapsed)
        return round(false / MAX_FALSE + missed / MAX_MISSED, 9)

    return min(range(len(rows[0][detector])), key=cost)


def choose_and_score(rows: Sequence[Row], detector: str) -> list[tuple[int, Score]]:
    """The setting and the score of each family, chosen on the others of `CHOOSING`."""
    families = list(dict.fromkeys(row["family"] for row in rows))
    chosen = []
    for family in families:
        place = choose(rows, detector, [name for name in CHOOSING if name != family])
        chosen.append((place, score(rows, detector, place, family)))
    return chosen


def total(scores: Sequence[Score]) -> Score:
    """The sum over families."""
    return Score(
        family="all",
        healthy=sum(s.healthy for s in scores),
        false=sum(s.false for s in scores),
        collapsed=sum(s.collapsed for s in scores),
        found=sum(s.found for s in scores),
        leads=[lead for s in scores for lead in s.leads],
    )


def judge_families(rows: Sequence[Row]) -> list[str]:
    """A line for each family and detector."""
    lines = []
    for detector in DETECTORS:
        chosen = choose_and_score(rows, detector)
        for place, s in [*chosen, (-1, total([s for _, s in chosen]))]:
            lead = median(s.leads) if s.leads else None
            lines.append(
                f"{detector:6}{place:4} {s.family:36} false {s.false}/{s.healthy} "
                f"found {s.found}/{s.collapsed} lead {lead}"
            )
    return lines
