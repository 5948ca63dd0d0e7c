"""The chart of one metric over all runs: curves, levels and verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import NamedTuple
from xml.etree.ElementTree import Element

from lit_callbacks.monitors import Level
from lit_callbacks.output import format_number
from lit_callbacks.report.chart import LEFT, TOP, WIDTH, Chart, Scale, fit_scale
from lit_callbacks.report.panels import Panel
from lit_callbacks.runs import Curve, LoggedVerdict, Run

LANE = 8  # height of a lane that shows the levels of one of several runs
COLUMNS = 400  # a longer curve is drawn by the extremes of this many columns
AVERAGED_PARTS = 25  # the bold line averages over a 25th of the run
MAX_DOTS = 12  # curves of up to this many values are drawn with dots
COLORS = 6  # colours of runs; further runs have the same ones, dashed


class NumberedVerdict(NamedTuple):
    """A verdict with its number on the page and the index of its run."""

    number: int
    run: int
    verdict: LoggedVerdict


def metric_chart(
    panel: Panel,
    runs: Sequence[Run],
    verdicts: Sequence[NumberedVerdict],
    steps: tuple[int, int],
) -> Chart:
    """The chart of one metric.

    Args:
        panel: The metric.
        runs: All runs of the page; some may lack the metric.
        verdicts: Verdicts to mark, in order of steps.
        steps: First and last step of the x axis.
    """
    drawn = {i: run.curves[panel.key] for i, run in enumerate(runs) if panel.key in run.curves}
    values = [value for curve in drawn.values() for value in _finite_values(curve)]
    judged = unhealthy_runs(runs)
    # The levels of one run fill the background; those of several lie in lanes below, one per run.
    lanes = judged if len(judged) > 1 else []
    chart = Chart(
        f"{panel.title} over steps {steps[0]} to {steps[1]}",
        x=Scale(steps[0], max(steps[1], steps[0] + 1), whole=True),
        y=fit_scale(values, panel.signed_log, panel.floor),
        margin=4,
        header=bool(verdicts),
        footer=LANE * len(lanes) + 4 if lanes else 0,
    )
    chart.text(LEFT - 6, chart.axis + 16, "step", "end")
    if len(judged) == 1:
        _add_bands(chart, chart.plot, runs[judged[0]], TOP, chart.bottom - TOP)
    for run, curve in drawn.items():
        _add_curve(chart, run, curve)
    for row, run in enumerate(lanes):
        _add_lane(chart, row, run, runs[run])
    _add_verdicts(chart, verdicts, several=len(runs) > 1)
    # `page.js` moves it to the step under the pointer.
    ends = {"x1": 0, "x2": 0, "y1": TOP, "y2": chart.bottom}
    chart.add("line", {"class": "cursor", **ends, "visibility": "hidden"})
    return chart


def unhealthy_runs(runs: Sequence[Run]) -> list[int]:
    """Indices of the runs that were ever suspicious or collapsed."""
    return [i for i, run in enumerate(runs) if any(s.level is not Level.HEALTHY for s in run.spans)]


def moving_average(
    values: Sequence[float], half_width: int, indices: Sequence[int] | None = None
) -> list[float]:
    """Mean of the finite values in a centered window, which shrinks at the ends.

    Args:
        values: The series.
        half_width: Number of neighbours on either side.
        indices: Indices at which to compute it; by default all.

    Returns:
        The means; NaN where the window has no finite value.

    Examples:
        >>> moving_average([0.0, 3.0, 6.0, 0.0], half_width=1)
        [1.5, 3.0, 3.0, 3.0]
    """
    means = []
    for i in range(len(values)) if indices is None else indices:
        window = values[max(0, i - half_width) : i + half_width + 1]
        finite = [value for value in window if math.isfinite(value)]
        means.append(fmean(finite) if finite else math.nan)
    return means


def thin(values: Sequence[float], columns: int = COLUMNS) -> list[int]:
    """Indices of values that look like the whole series when drawn.

    They are the extremes of each column and its first gap, and both ends.

    Args:
        values: The series.
        columns: Number of parts of equal length.
    """
    n = len(values)
    if n <= 2 * columns:
        return list(range(n))
    kept = {0, n - 1}
    for column in range(columns):
        indices = range(column * n // columns, (column + 1) * n // columns)
        finite = [i for i in indices if math.isfinite(values[i])]
        if finite:
            kept.add(min(finite, key=lambda i: values[i]))
            kept.add(max(finite, key=lambda i: values[i]))
        kept.update([i for i in indices if not math.isfinite(values[i])][:1])
    return sorted(kept)


def cluster_verdicts(
    verdicts: Sequence[NumberedVerdict], at: Callable[[int], float], apart: float
) -> list[list[NumberedVerdict]]:
    """Group verdicts whose numbers would overlap, so that they share one label.

    Args:
        verdicts: Verdicts in order of steps.
        at: Position of a step.
        apart: Distance of two positions that leaves room for both numbers.
    """
    clusters: list[list[NumberedVerdict]] = []
    for item in verdicts:
        if clusters and at(item.verdict.step) - at(clusters[-1][-1].verdict.step) < apart:
            clusters[-1].append(item)
        else:
            clusters.append([item])
    return clusters


def numbers_text(verdicts: Sequence[NumberedVerdict]) -> str:
    """The numbers of neighbouring verdicts, for example `3`, `3, 5` or `3-5`."""
    numbers = [item.number for item in verdicts]
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))


def run_class(run: int) -> str:
    """CSS classes of a run, by its index: its colour, and dashes when all colours are taken."""
    return f"run-{run % COLORS}" + (" dashed" if run >= COLORS else "")


def _finite_values(curve: Curve) -> Iterator[float]:
    for points in (curve.points, *curve.undone):
        yield from (point.value for point in points if math.isfinite(point.value))


def _add_bands(chart: Chart, parent: Element, run: Run, top: float, height: float) -> None:
    """Mark the spans in which a run was not healthy."""
    for start, end, level in run.spans:
        if level is Level.HEALTHY:
            continue
        left = chart.x_at(start)
        width = max(2.0, chart.x_at(end) - left)  # the level of a single step is still visible
        box = {"x": left, "y": top, "width": width, "height": height}
        chart.add("rect", {"class": f"band {level.word}", **box}, parent)
        # Stripes tell a collapse from a suspicion without colours.
        if level is Level.COLLAPSED:
            chart.add("rect", {"fill": "url(#hatch)", **box}, parent)


def _add_lane(chart: Chart, row: int, index: int, run: Run) -> None:
    top, height = chart.bottom + 4 + LANE * row, LANE - 2
    lane = chart.add("g", {"class": f"lane {run_class(index)}"})
    swatch = f"M{LEFT - 18} {top + height / 2}h12"
    chart.add("path", {"class": "swatch-line", "d": swatch}, lane)
    _add_bands(chart, lane, run, top, height)


def _add_curve(chart: Chart, run: int, curve: Curve) -> None:
    group = chart.add("g", {"class": run_class(run)}, chart.plot)
    for piece in curve.undone:
        kept = thin([point.value for point in piece])
        chart.line([(piece[i].step, piece[i].value) for i in kept], "undone", group)
    values = [point.value for point in curve.points]
    kept = thin(values)
    points = [(curve.points[i].step, values[i]) for i in kept]
    half_width = len(values) // AVERAGED_PARTS // 2
    # `page.js` reads the values under the pointer from these.
    data = {
        "data-run": run,
        "data-x": " ".join(str(step) for step, _ in points),
        "data-y": " ".join(format_number(value) for _, value in points),
    }
    chart.line(points, "thin" if half_width else "bold", group, data)
    if half_width:
        means = moving_average(values, half_width, kept)
        steps = [step for step, _ in points]
        chart.line(list(zip(steps, means, strict=True)), "bold", group)
    if len(points) <= MAX_DOTS:
        chart.dots(points, "dots", group)
    strokes = "".join(
        f"M{chart.x_at(step):.1f} {chart.bottom}v-7"
        for step, value in points
        if not math.isfinite(value)
    )
    if strokes:
        chart.add("path", {"class": "broken", "d": strokes}, group)


def _add_verdicts(chart: Chart, verdicts: Sequence[NumberedVerdict], several: bool) -> None:
    """Mark verdicts with dotted lines, and their numbers above the plot area."""
    for number, run, verdict in verdicts:
        css = f"mark {run_class(run)}" if several else "mark"
        line = f"M{chart.x_at(verdict.step):.1f} {TOP - 6}V{chart.bottom}"
        chart.add("path", {"class": css, "data-number": number, "d": line})
    for cluster in cluster_verdicts(verdicts, chart.x_at, apart=16):
        text = numbers_text(cluster)
        half = 3.5 + 3 * len(text)
        ends = [chart.x_at(item.verdict.step) for item in (cluster[0], cluster[-1])]
        place = min(fmean(ends), WIDTH - half)
        worst = max(item.verdict.level or Level.HEALTHY for item in cluster)
        sentences = "\n".join(f"{item.number}: {item.verdict.sentence}" for item in cluster)
        link = chart.add("a", {"href": f"#verdict-{cluster[0].number}"}, title=sentences)
        pill = {"x": place - half, "y": TOP - 20, "width": 2 * half, "height": 14, "rx": 7}
        chart.add("rect", {"class": f"pill {worst.word}", **pill}, link)
        middle = {"x": place, "y": TOP - 9.5, "text-anchor": "middle"}
        chart.add("text", {"class": f"number {worst.word}", **middle}, link, text)
