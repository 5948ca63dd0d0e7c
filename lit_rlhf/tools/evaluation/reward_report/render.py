"""The report as one HTML page that needs nothing else, and as a table for the terminal."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lit_callbacks.charts import Svg, to_svg
from lit_callbacks.report import render_page
from lit_rlhf.tools.evaluation.output import make_table, print_table
from lit_rlhf.tools.evaluation.reward_report.charts import (
    draw_accuracy_by_length,
    draw_histogram,
    draw_reliability,
    draw_scatter,
)
from lit_rlhf.tools.evaluation.reward_report.measures import (
    Accuracy,
    ReliabilityBin,
    RewardReport,
    strength_by_source,
)
from lit_rlhf.tools.evaluation.reward_report.scores import LANGUAGE_MODEL

_ROLES = {"user": "Human", "assistant": "Assistant", "system": "System"}
_WEAKEST_PAIRS = 10  # in the table for the terminal
_SHOWN_CHARACTERS = 40  # longest part of a response in that table


class PageTable(NamedTuple):
    """A table on the page or in the terminal.

    Attributes:
        heads: Headings of the columns, the first one over the names of the rows.
        rows: Cells of each row by its name.
    """

    heads: Sequence[str]
    rows: Mapping[str, Sequence[str]]


class Chart(NamedTuple):
    """A chart on the page.

    Attributes:
        title: Heading of its panel, also for a screen reader.
        svg: The chart as an element of the page.
    """

    title: str
    svg: Svg


class Fact(NamedTuple):
    """One of the main numbers at the top of the page.

    Attributes:
        value: The number as text.
        text: What it is.
    """

    value: str
    text: str


def report_html(report: RewardReport) -> str:
    """Build the page, with everything that comes from data escaped."""
    length_title = "Accuracy by length difference"
    scatter_title = "Score difference against length difference"
    reliability_title = "Reliability"
    return render_page(
        "lit_rlhf.tools.evaluation.reward_report",
        "reward.html",
        report=report,
        facts=list(_facts(report)),
        verdict=verdict(report),
        histograms=_histograms(
            report.histogram, title="Difference of the scores", x_title="chosen - rejected score"
        ),
        source_table=_source_table(report),
        length_chart=Chart(
            length_title, to_svg(draw_accuracy_by_length(report.by_length), length_title)
        ),
        length_table=PageTable(
            heads=["chosen - rejected, tokens", "pairs", "right", "95 % interval"],
            rows={bucket.label: _accuracy_cells(bucket.accuracy) for bucket in report.by_length},
        ),
        scatter_chart=Chart(
            scatter_title,
            to_svg(
                draw_scatter(lengths=report.length_differences, differences=report.differences),
                scatter_title,
            ),
        ),
        reliability_chart=Chart(
            reliability_title, to_svg(draw_reliability(report.reliability), reliability_title)
        ),
        reliability_table=PageTable(
            heads=["sure", "pairs", "right", "95 % interval"],
            rows={
                f"{entry.confidence:.1%}": _accuracy_cells(entry) for entry in report.reliability
            },
        ),
        correlation_text=_correlation_text,
        strength_histograms=_histograms(
            report.strengths.get("histogram", {}), title="Strength", x_title="strength"
        ),
        strength_table=_strength_table(report.strengths.get("by_source", {})),
        roles=_ROLES,
        language_model=LANGUAGE_MODEL,
    )


def verdict(report: RewardReport) -> str:
    """Say in one sentence whether the model has learned more than length."""
    gain = report.gain
    rule = f"preferring the {report.length_baseline} response"
    points = f"{100 * gain.mean:+.1f} points [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"
    if gain.low > 0:
        return f"The model is right more often than {rule} would be: {points}."
    if gain.high < 0:
        return f"The model is right less often than {rule} would be: {points}."
    return f"That the model is right more often than {rule} would be is not shown: {points}."


def print_reward_report(report: RewardReport) -> None:
    """Print a table with a row for each source, and one for all if there are several."""
    table = make_table(
        f"{report.accuracy.pairs} pairs; right: the chosen response scores higher",
        ["", "pairs", "right [95 % interval]", "longer is right"],
        caption=f"calibration error {report.calibration_error:.3f}. {verdict(report)}",
    )
    rows = dict(report.by_source)
    if len(rows) > 1:
        rows |= {"all": report.accuracy}
    for name, entry in rows.items():
        table.add_row(
            name,
            str(entry.pairs),
            f"{entry.accuracy:.1%} [{entry.low:.1%}, {entry.high:.1%}]",
            f"{entry.longer:.1%}",
        )
    print_table(table)


def print_strengths(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the strengths in rows of `read_strengths` by source, and the ten weakest pairs."""
    by_source = _strength_table(strength_by_source(rows))
    table = make_table("Strength", by_source.heads)
    for source, cells in by_source.rows.items():
        table.add_row(source, *cells)
    print_table(table)
    table = make_table("Weakest pairs", ["", "strength", "chosen", "rejected"])
    for row in sorted(rows, key=lambda row: float(row["strength"]))[:_WEAKEST_PAIRS]:
        table.add_row(
            row["location"],
            f"{row['strength']:.3f}",
            row["chosen"][:_SHOWN_CHARACTERS],
            row["rejected"][:_SHOWN_CHARACTERS],
        )
    print_table(table)


def _facts(report: RewardReport) -> Iterator[Fact]:
    """Yield the main numbers, each with its description."""
    overall = report.accuracy
    baseline = max(overall.longer, 1.0 - overall.longer)
    yield Fact(f"{overall.accuracy:.1%}", f"right [{overall.low:.1%}, {overall.high:.1%}]")
    yield Fact(f"{baseline:.1%}", f"would be right by preferring the {report.length_baseline}")
    yield Fact(f"{report.calibration_error:.3f}", "expected calibration error")
    yield Fact(
        _coefficient_text(report.difference_by_length["pearson"]),
        "correlation of score and length differences",
    )
    for reader, perplexity in report.perplexity.items():
        yield Fact(f"{perplexity['all']:.2f}", f"perplexity of chosen responses, {reader}")
    yield Fact(f"{report.pairwise_loss:.3f}", "pairwise loss (Eq. 1), nats; 0.693 is guessing")


def _histograms(histogram: Mapping[str, Any], *, title: str, x_title: str) -> list[Chart]:
    """Draw the histograms of all sources together and of each."""
    counts: dict[str, list[int]] = histogram.get("counts", {})
    by_name: dict[str, list[int]] = {}
    if len(counts) > 1:
        by_name["all sources"] = [sum(bars) for bars in zip(*counts.values(), strict=True)]
    by_name |= counts
    charts = []
    for name, bars in by_name.items():
        chart_title = f"{title}, {name}"
        axes = draw_histogram(edges=histogram["edges"], counts=bars, x_title=x_title)
        charts.append(Chart(chart_title, to_svg(axes, chart_title)))
    return charts


def _strength_table(by_source: Mapping[str, Mapping[str, float]]) -> PageTable:
    return PageTable(
        heads=["", "pairs", "mean", "share below 0"],
        rows={
            name: [f"{entry['pairs']:,}", f"{entry['mean']:.3f}", f"{entry['negative']:.1%}"]
            for name, entry in by_source.items()
        },
    )


def _source_table(report: RewardReport) -> PageTable:
    rows = dict(report.by_source)
    if len(rows) > 1:
        rows = {"all": report.accuracy, **rows}
    readers = report.perplexity
    return PageTable(
        heads=[
            "",
            "pairs",
            "right",
            "95 % interval",
            "longer is right",
            "mean difference",
            *(f"perplexity, {reader}" for reader in readers),
        ],
        rows={
            name: [
                *_accuracy_cells(entry),
                f"{entry.longer:.1%}",
                f"{entry.margin:.3f}",
                *(f"{p['by_source'].get(name, p['all']):.2f}" for p in readers.values()),
            ]
            for name, entry in rows.items()
        },
    )


def _accuracy_cells(entry: Accuracy | ReliabilityBin) -> list[str]:
    """Format number of pairs, accuracy and its interval."""
    return [
        f"{entry.pairs:,}",
        f"{entry.accuracy:.1%}",
        f"{entry.low:.1%} - {entry.high:.1%}",
    ]


def _correlation_text(correlation: Mapping[str, float | None]) -> str:
    pearson = _coefficient_text(correlation["pearson"])
    spearman = _coefficient_text(correlation["spearman"])
    return f"Pearson {pearson}, Spearman {spearman}"


def _coefficient_text(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"
