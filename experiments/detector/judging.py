"""Chooses settings on some families and judges them on others, see `criterion`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from statistics import fmean, median
from typing import Any, NamedTuple

from experiments.detector.criterion import CHOOSING, MAX_FALSE, MIN_SEEN
from experiments.detector.labels import JUDGED, Question
from experiments.detector.replaying import UNNAMED, Flags
from lit_callbacks.verdict import Trouble

Row = dict[str, Any]
"""What each detector says of one run, see `experiments.detector.study.replay`."""
DETECTORS = ("ours", "KL", "rules")


class Flag(NamedTuple):
    """The first flag of a run.

    Attributes:
        place: Its place in the steps of the run.
        kind: The trouble it names, or `UNNAMED`.
    """

    place: int
    kind: str


class Count(NamedTuple):
    """How many of some runs are flagged.

    Attributes:
        flagged: Number of those that are flagged.
        runs: Number of all.
    """

    flagged: int = 0
    runs: int = 0

    def __str__(self) -> str:
        return f"{self.flagged} of {self.runs}" if self.runs else "-"

    @property
    def share(self) -> float:
        """Share of the runs that are flagged; 0 without runs."""
        return self.flagged / self.runs if self.runs else 0.0


class Score(NamedTuple):
    """How a detector did on some runs.

    Attributes:
        untroubled: Untroubled runs, and how many of them are flagged.
        troubled: Troubled runs, and how many of them are seen.
        right: Troubled runs that are seen, and how many of them with the right kind.
        harmless: Runs without harm, and how many are flagged as broken or exploiting.
        harmed: Runs with harm, and how many are flagged as broken or exploiting.
        varied: Runs that keep their variety, and how many are flagged as monotonous.
        monotonous: Runs that lose their variety, and how many are flagged as monotonous.
        leads: Steps from the flag to the harm, for the runs of which the harm is known.
    """

    untroubled: Count
    troubled: Count
    right: Count
    harmless: Count
    harmed: Count
    varied: Count
    monotonous: Count
    leads: list[int]


def judged_kinds(row: Row) -> frozenset[str]:
    """Kinds of flags that a run is judged on."""
    answered = [JUDGED[Question(question)] for question in row["tells"]]
    kinds = frozenset[str]().union(*answered)
    changed = {Trouble.DATA_CHANGED} & set(row["troubles"])
    return kinds | changed | ({UNNAMED} if answered else set())


def flags_of(row: Row, detector: str, place: int) -> Flags:
    """All flags of a run; detectors other than ours name no kind.

    Args:
        row: The run.
        detector: One of `DETECTORS`, or `shipped` or `calibrated` in the rows of `calibrating`.
        place: Place of the setting.
    """
    flagged: Flags | int | None = row[detector][place]
    if isinstance(flagged, dict):
        return flagged
    return {} if flagged is None else {UNNAMED: flagged}


def first_flag(row: Row, detector: str, place: int) -> Flag | None:
    """The first flag of a run of a kind on which it is judged; the gravest kind at one place.

    Args:
        row: The run.
        detector: One of `DETECTORS`, or `shipped` or `calibrated` in the rows of `calibrating`.
        place: Place of the setting.
    """
    kinds = judged_kinds(row)
    flags = flags_of(row, detector, place)
    known = [Flag(step, kind) for kind, step in flags.items() if kind in kinds]
    return min(known, default=None)  # the words of kinds sort from the gravest on


def count(flags: Iterable[bool]) -> Count:
    """Count runs by whether they are flagged."""
    listed = list(flags)
    return Count(sum(listed), len(listed))


def score(rows: Sequence[Row], detector: str, place: int) -> Score:
    """Count on some runs, with the setting at `place`.

    Args:
        rows: The runs; those that nobody labelled are left out.
        detector: One of `DETECTORS`, or `shipped` or `calibrated` in the rows of `calibrating`.
        place: Place of the setting.
    """
    labelled = [row for row in rows if row["tells"]]
    flags = [(row, first_flag(row, detector, place)) for row in labelled]
    troubled = [(row, flag) for row, flag in flags if row["troubles"]]
    seen = [(row, flag) for row, flag in troubled if flag is not None]
    harm = JUDGED[Question.HARM] | {UNNAMED}
    variety = JUDGED[Question.VARIETY]

    def ask(question: Question, kinds: AbstractSet[str], holds: bool) -> Count:
        """Count the flags of some kinds over the runs for which a question has this answer."""
        return count(
            any(kind in kinds for kind in flags_of(row, detector, place))
            for row in labelled
            if question in row["tells"] and bool(JUDGED[question] & set(row["troubles"])) is holds
        )

    return Score(
        untroubled=count(flag is not None for row, flag in flags if not row["troubles"]),
        troubled=count(flag is not None for _, flag in troubled),
        right=count(flag.kind in row["troubles"] for row, flag in seen),
        harmless=ask(Question.HARM, harm, False),
        harmed=ask(Question.HARM, harm, True),
        varied=ask(Question.VARIETY, variety, False),
        monotonous=ask(Question.VARIETY, variety, True),
        leads=[
            (row["harm"] - flag.place) * row["every"]
            for row, flag in seen
            if row["harm"] is not None
        ],
    )


def family_of(rows: Sequence[Row], family: str) -> list[Row]:
    """The runs of a family."""
    return [row for row in rows if row["family"] == family]


def choose(rows: Sequence[Row], detector: str, families: Sequence[str]) -> int:
    """Place of the best setting on the families, by the rule of `criterion`.

    Args:
        rows: The runs.
        detector: One of `DETECTORS`, or `shipped` or `calibrated` in the rows of `calibrating`.
        families: Names of the families.
    """
    by_family = [family_of(rows, family) for family in families]

    def cost(place: int) -> float:
        scores = [score(runs, detector, place) for runs in by_family if runs]
        false = [s.untroubled.share for s in scores if s.untroubled.runs]
        missed = [1 - s.troubled.share for s in scores if s.troubled.runs]
        shares = (
            fmean(false) / MAX_FALSE if false else 0.0,
            fmean(missed) / (1 - MIN_SEEN) if missed else 0.0,
        )
        return round(sum(shares), 9)

    return min(range(len(rows[0][detector])), key=cost)


def choose_settings(rows: Sequence[Row], detector: str) -> dict[str, int]:
    """Place of the setting of each family, chosen on the others of `CHOOSING`."""
    families = dict.fromkeys(row["family"] for row in rows)
    return {
        family: choose(rows, detector, [name for name in CHOOSING if name != family])
        for family in families
    }


def total(scores: Sequence[Score]) -> Score:
    """The sum over families."""

    def added(counts: Iterable[Count]) -> Count:
        listed = list(counts)
        return Count(sum(c.flagged for c in listed), sum(c.runs for c in listed))

    return Score(
        untroubled=added(s.untroubled for s in scores),
        troubled=added(s.troubled for s in scores),
        right=added(s.right for s in scores),
        harmless=added(s.harmless for s in scores),
        harmed=added(s.harmed for s in scores),
        varied=added(s.varied for s in scores),
        monotonous=added(s.monotonous for s in scores),
        leads=[lead for s in scores for lead in s.leads],
    )


def score_families(rows: Sequence[Row], detector: str) -> dict[str, Score]:
    """The score of each family with the setting that is best on the others."""
    return {
        family: score(family_of(rows, family), detector, place)
        for family, place in choose_settings(rows, detector).items()
    }


def describe_scores(rows: Sequence[Row]) -> list[str]:
    """A line for each family and detector."""
    lines = []
    for detector in DETECTORS:
        chosen = choose_settings(rows, detector)
        scores = score_families(rows, detector)
        for family, s in {**scores, "all": total(list(scores.values()))}.items():
            lead = median(s.leads) if s.leads else None
            lines.append(
                f"{detector:6}{chosen.get(family, -1):4} {family:36} false {s.untroubled} "
                f"seen {s.troubled} right {s.right} lead {lead}"
            )
    return lines
