"""The report as one HTML page that needs nothing else, and as a table for the terminal."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lit_callbacks.report import render_page
from lit_rlhf.tools.evaluation.charts import (
    histogram_chart,
    length_chart,
    reliability_chart,
    scatter_chart,
    svg_address,
)
from lit_rlhf.tools.evaluation.output import make_table, print_table
from lit_rlhf.tools.evaluation.reward_report.measures import (
    Accuracy,
    ReliabilityBin,
    RewardReport,
    strength_by_source,
)
from lit_rlhf.tools.evaluation.reward_report.scores import LANGUAGE_MODEL

_ROLES = {"user": "Human", "assistant": "Assistant", "system": "System"}


def report_html(report: RewardReport) -> str:
    """Build the page, with everything that comes from data escaped."""
    return render_page(
        "lit_rlhf.tools.evaluation.reward_report",
        "reward.html",
        report=report,
        facts=list(_facts(report)),
        verdict=verdict(report),
        histograms=_histograms(report.histogram, "chosen - rejected score"),
        source_table=_source_table(report),
        length_chart=svg_address(length_chart(report.by_length)),
        length_table=dict(
            heads=["chosen - rejected, tokens", "pairs", "right", "95 % interval"],
            rows={bucket.label: _accuracy_cells(bucket.accuracy) for bucket in report.by_length},
        ),
        scatter_chart=svg_address(scatter_chart(report.length_differences, report.differences)),
        reliability_chart=svg_address(reliability_chart(report.reliability)),
        reliability_table=dict(
            heads=["sure", "pairs", "right", "95 % interval"],
            rows={
                f"{found.confidence:.1%}": _accuracy_cells(found) for found in report.reliability
            },
        ),
        correlation_text=lambda found: "Pearson {}, Spearman {}".format(
            *map(_coefficient_text, found.values())
        ),
        strength_histograms=_histograms(report.strengths.get("histogram", {}), "strength"),
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
        *("", "pairs", "right [95 % interval]", "longer is right"),
        caption=f"calibration error {report.calibration_error:.3f}. {verdict(report)}",
    )
    rows = dict(report.by_source)
    if len(rows) > 1:
        rows |= {"all": report.accuracy}
    for name, found in rows.items():
        table.add_row(
            name,
            str(found.pairs),
            f"{found.accuracy:.1%} [{found.low:.1%}, {found.high:.1%}]",
            f"{found.longer:.1%}",
        )
    print_table(table)


def print_strengths(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the strength of pairs by source, and the ten weakest of them."""
    found = _strength_table(strength_by_source(rows))
    table = make_table("Strength", *found["heads"])
    for source, cells in found["rows"].items():
        table.add_row(source, *cells)
    print_table(table)
    table = make_table("Weakest pairs", "", "strength", "chosen", "rejected")
    for row in sorted(rows, key=lambda row: float(row["strength"]))[:10]:
        responses = (row[side][:40] for side in ("chosen", "rejected"))
        table.add_row(row["location"], f"{row['strength']:.3f}", *responses)
    print_table(table)


def _facts(report: RewardReport) -> Iterator[tuple[str, str]]:
    """Yield the main numbers, each with its description."""
    whole = report.accuracy
    baseline = max(whole.longer, 1.0 - whole.longer)
    yield f"{whole.accuracy:.1%}", f"right [{whole.low:.1%}, {whole.high:.1%}]"
    yield f"{baseline:.1%}", f"would be right by preferring the {report.length_baseline}"
    yield f"{report.calibration_error:.3f}", "expected calibration error"
    correlation = _coefficient_text(report.difference_by_length["pearson"])
    yield correlation, "correlation of score and length differences"
    for reader, found in report.perplexity.items():
        yield f"{found['all']:.2f}", f"perplexity of chosen responses, {reader}"
    yield f"{report.pairwise_loss:.3f}", "pairwise loss (Eq. 1), nats; 0.693 is guessing"


def _histograms(histogram: Mapping[str, Any], x_title: str) -> dict[str, str]:
    """Draw the histograms of all sources together and of each."""
    edges, counts = histogram.get("edges", []), histogram.get("counts", {})
    shown: dict[str, list[int]] = {}
    if len(counts) > 1:
        shown["all sources"] = [sum(bars) for bars in zip(*counts.values(), strict=True)]
    shown |= counts
    return {
        name: svg_address(histogram_chart(edges, bars, x_title)) for name, bars in shown.items()
    }


def _strength_table(by_source: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    rows = {
        name: [f"{found['pairs']:,}", f"{found['mean']:.3f}", f"{found['negative']:.1%}"]
        for name, found in by_source.items()
    }
    return dict(heads=["", "pairs", "mean", "share below 0"], rows=rows)


def _source_table(report: RewardReport) -> dict[str, Any]:
    readers = report.perplexity
    rows = dict(report.by_source)
    if len(rows) > 1:
        rows = {"all": report.accuracy, **rows}
    heads = ["pairs", "right", "95 % interval", "longer is right", "mean difference"]
    return dict(
        heads=["", *heads, *(f"perplexity, {reader}" for reader in readers)],
        rows={
            name: [
                *_accuracy_cells(found),
                f"{found.longer:.1%}",
                f"{found.margin:.3f}",
                *(f"{p['by_source'].get(name, p['all']):.2f}" for p in readers.values()),
            ]
            for name, found in rows.items()
        },
    )


def _accuracy_cells(found: Accuracy | ReliabilityBin) -> list[str]:
    interval = f"{found.low:.1%} - {found.high:.1%}"
    return [f"{found.pairs:,}", f"{found.accuracy:.1%}", interval]


def _coefficient_text(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"
