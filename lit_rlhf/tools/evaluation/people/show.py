"""What people say as tables for the terminal and as one HTML page that needs nothing else."""

from collections.abc import Sequence
from typing import NamedTuple

from lit_callbacks.report import render_page
from lit_rlhf.tools.evaluation.outcomes import Outcomes, outcomes_table
from lit_rlhf.tools.evaluation.output import make_table, print_table
from lit_rlhf.tools.evaluation.people.measure import Agreement, AnnotatorRow, People


class _Row(NamedTuple):
    """A row of a table.

    Attributes:
        name: What the row is about.
        cells: Its other cells.
    """

    name: str
    cells: Sequence[str]


_AGREEMENT_HEADS = ("", "n", "same, %", "kappa")
_ANNOTATOR_HEADS = (
    "annotator",
    "labels",
    "skips",
    "left, %",
    "ties, %",
    "seconds",
    "with oneself, %",
    "with others, %",
)


def print_people(people: People) -> None:
    """Print who wins by people, and who agrees with whom."""
    if people.head_to_heads:
        print_table(outcomes_table(people.head_to_heads, people.baseline))
    agreements = make_table(
        f"{people.n_labels} labels of {len(people.annotators)} people on {people.n_comparisons} "
        "comparisons; agreement [95 % interval]",
        _AGREEMENT_HEADS,
        caption=_note(people),
    )
    for row in _agreement_rows(people):
        agreements.add_row(row.name, *row.cells)
    print_table(agreements)
    annotators = make_table("annotators", _ANNOTATOR_HEADS)
    for name, annotator in people.annotators.items():
        annotators.add_row(name, *_annotator_cells(annotator))
    print_table(annotators)


def people_html(people: People) -> str:
    """Build the page, with everything that comes from labels escaped."""
    return render_page(
        "lit_rlhf.tools.evaluation.people",
        "people.html",
        people=people,
        outcomes=[
            (policy, outcomes, _outcome_cells(outcomes))
            for policy, outcomes in people.outcomes.items()
        ],
        agreement_heads=_AGREEMENT_HEADS,
        agreements=_agreement_rows(people),
        annotator_heads=_ANNOTATOR_HEADS,
        annotators=[_Row(name, _annotator_cells(row)) for name, row in people.annotators.items()],
        note=_note(people),
    )


def _note(people: People) -> str:
    parts = [f"{count} {reason}" for reason, count in people.counts.items() if count]
    if people.from_spread:
        parts.append(
            f"{people.from_spread} comparisons were chosen where reward models disagree; win, tie "
            "and lose are of the others, which were drawn at random"
        )
    if people.both_bad:
        parts.append(f"both bad: {people.both_bad:.1%} of comparisons")
    return "; ".join(parts)


def _agreement_rows(people: People) -> list[_Row]:
    rows = {
        "people with each other": people.between,
        "people with themselves": people.within,
        **{f"most people with {name}": value for name, value in people.machines.items()},
    }
    return [_Row(name, _agreement_cells(value)) for name, value in rows.items()]


def _agreement_cells(value: Agreement | None) -> list[str]:
    if value is None:
        return ["0", "-", "-"]
    low, high = value.interval
    kappa = "-" if value.kappa is None else f"{value.kappa:.2f}"
    return [str(value.n), f"{100 * value.share:.0f} [{100 * low:.0f}, {100 * high:.0f}]", kappa]


def _annotator_cells(row: AnnotatorRow) -> list[str]:
    return [
        str(row.labels),
        str(row.skips),
        _percent(row.left),
        _percent(row.ties),
        "-" if row.seconds is None else f"{row.seconds:.0f}",
        _percent(None if row.consistency is None else row.consistency.share),
        _percent(row.others),
    ]


def _outcome_cells(outcomes: Outcomes) -> list[str]:
    return [
        f"{100 * share:.0f} [{100 * interval.low:.0f}, {100 * interval.high:.0f}]"
        for share, interval in (
            (outcomes.win, outcomes.win_interval),
            (outcomes.tie, outcomes.tie_interval),
            (outcomes.lose, outcomes.lose_interval),
        )
    ]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}"
