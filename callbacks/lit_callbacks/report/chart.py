"""One metric of all runs as an inline SVG picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import groupby
from statistics import fmean
from typing import NamedTuple

from lit_callbacks.monitors import Level
from lit_callbacks.output import format_number
from lit_callbacks.report.axes import Axis, value_axis
from lit_callbacks.report.panels import Panel
from lit_callbacks.runs import Curve, LoggedVerdict, Point, Run

WIDTH = 380  # of the picture, in its own units: about the pixels of a column
LEFT, RIGHT, TOP, BOTTOM = 46, 370, 24, 160  # of the part with the curves
LANE = 8  # height of the lane with the levels of one of several runs
COLUMNS = 400  # a longer curve is drawn by its extremes in so many columns
AVERAGED_PARTS = 25  # the bold line averages over a 25th of the run
FEW = 12  # readings that are drawn as dots too
COLORS = 6  # colours of runs; then they come again, dashed


class NumberedVerdict(NamedTuple):
    """A verdict with its number on the page and the position of its run."""

    number: int
    run: int
    verdict: LoggedVerdict


def chart(
    panel: Panel, runs: Sequence[Run], marks: Sequence[NumberedVerdict], steps: tuple[int, int]
) -> str:
    """The picture of one metric.

    Args:
        panel: what to draw.
        runs: all runs of the page; one may lack the metric.
        marks: verdicts to mark, in order of steps.
        steps: first and last step of the x axis.

    Returns:
        An ``<svg>`` element.
    """
    drawn = {
        place: run.curves[panel.key] for place, run in enumerate(runs) if panel.key in run.curves
    }
    lanes = shaded_runs(runs)
    x = Axis(steps[0], max(steps[1], steps[0] + 1), LEFT + 4, RIGHT - 4)
    y = value_axis(
        [value for curve in drawn.values() for value in _finite_values(curve)],
        BOTTOM,
        TOP,
        panel.signed_log,
        panel.floor,
    )
    # One run's levels fill the background; those of several lie in lanes below, one for each run.
    background = _bands(runs[lanes[0]], x, TOP, BOTTOM - TOP) if len(lanes) == 1 else []
    below = [_lane(row, i, runs[i], x) for row, i in enumerate(lanes)] if len(lanes) > 1 else []
    bottom = BOTTOM + (LANE * len(below) + 4 if below else 0)
    top = 0 if marks else TOP - 8  # no room for numbers that do not come
    inner = [
        *background,
        *_grid(y),
        *(_curve(place, curve, x, y) for place, curve in drawn.items()),
    ]
    outer = [
        *(_y_label(y.at(value), text) for value, text in y.ticks(5)),
        *(_x_label(x.at(value), bottom, text) for value, text in x.ticks(6, whole=True)),
        f'<text class="tick" x="{LEFT - 6}" y="{bottom + 16}" text-anchor="end">step</text>',
        *below,
        *_marks(marks, x, several=len(runs) > 1),
    ]
    label = escape(f"{panel.title} over steps {steps[0]} to {steps[1]}")
    return (
        f'<svg class="chart" viewBox="0 {top} {WIDTH} {bottom + 22 - top}" role="img" '
        f'aria-label="{label}" data-start="{x.start}" data-end="{x.end}">'
        f'<svg x="{LEFT}" y="{TOP}" width="{RIGHT - LEFT}" height="{BOTTOM - TOP}" '
        f'viewBox="{LEFT} {TOP} {RIGHT - LEFT} {BOTTOM - TOP}">{"".join(inner)}</svg>'
        f"{''.join(outer)}"
        f'<line class="cursor" x1="0" x2="0" y1="{TOP}" y2="{BOTTOM}" visibility="hidden"/></svg>'
    )


def shaded_runs(runs: Sequence[Run]) -> list[int]:
    """Positions of the runs that were ever suspicious or collapsed."""
    return [place for place, run in enumerate(runs) if any(_bad(run))]


def moving_average(readings: Sequence[Point], place: int, half_width: int) -> float:
    """Mean of the finite values around one place; nan where there is none."""
    window = readings[max(0, place - half_width) : place + half_width + 1]
    known = [reading.value for reading in window if math.isfinite(reading.value)]
    return fmean(known) if known else math.nan


def thinned(readings: Sequence[Point], columns: int = COLUMNS) -> list[int]:
    """Places of readings that look like all of them: the extremes of each column, and one gap.

    Args:
        readings: in the order of their steps.
        columns: parts of equal length into which they are cut.
    """
    if len(readings) <= 2 * columns:
        return list(range(len(readings)))
    kept: set[int] = {0, len(readings) - 1}
    for column in range(columns):
        places = range(column * len(readings) // columns, (column + 1) * len(readings) // columns)
        finite = [place for place in places if math.isfinite(readings[place].value)]
        if finite:
            kept.add(min(finite, key=lambda place: readings[place].value))
            kept.add(max(finite, key=lambda place: readings[place].value))
        kept.update([place for place in places if not math.isfinite(readings[place].value)][:1])
    return sorted(kept)


def clustered(
    marks: Sequence[NumberedVerdict], at: Callable[[int], float], apart: float
) -> list[list[NumberedVerdict]]:
    """Marks in groups: those whose numbers would lie on top of each other share one label.

    Args:
        marks: in order of steps.
        at: place of a step.
        apart: distance of two places that leaves room for both numbers.
    """
    clusters: list[list[NumberedVerdict]] = []
    for mark in marks:
        if clusters and at(mark.verdict.step) - at(clusters[-1][-1].verdict.step) < apart:
            clusters[-1].append(mark)
        else:
            clusters.append([mark])
    return clusters


def numbers_text(marks: Sequence[NumberedVerdict]) -> str:
    """The numbers of neighbours, for example ``3``, ``3, 5`` or ``3-5``."""
    numbers = [mark.number for mark in marks]
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))


def run_class(place: int) -> str:
    """CSS classes of a run: its colour, and dashes when all colours are taken."""
    return f"run-{place % COLORS}" + (" dashed" if place >= COLORS else "")


def _bad(run: Run) -> Iterator[tuple[int, int, Level]]:
    return (span for span in run.spans if span.level is not Level.HEALTHY)


def _finite_values(curve: Curve) -> Iterator[float]:
    for readings in (curve.points, *curve.undone):
        yield from (reading.value for reading in readings if math.isfinite(reading.value))


# --- what is in the picture


def _bands(run: Run, x: Axis, top: float, height: float) -> Iterator[str]:
    """The spans in which a run was not healthy."""
    for start, end, level in _bad(run):
        left = x.at(start)
        width = max(2.0, x.at(end) - left)  # a level of one record only is still seen
        box = f'x="{left:.1f}" y="{top}" width="{width:.1f}" height="{height}"'
        yield f'<rect class="band {level.word}" {box}/>'
        if level is Level.COLLAPSED:
            yield f'<rect {box} fill="url(#hatch)"/>'


def _lane(row: int, place: int, run: Run, x: Axis) -> str:
    top = BOTTOM + 4 + LANE * row
    bands = "".join(_bands(run, x, top, LANE - 2))
    line = f'<path class="swatch-line" d="M{LEFT - 18} {top + (LANE - 2) / 2}h12"/>'
    return f'<g class="lane {run_class(place)}">{line}{bands}</g>'


def _grid(y: Axis) -> Iterator[str]:
    for value, _ in y.ticks(5):
        zero = " zero" if value == 0 else ""
        yield f'<path class="grid{zero}" d="M{LEFT} {y.at(value):.1f}H{RIGHT}"/>'


def _y_label(place: float, text: str) -> str:
    squeezed = f' textLength="{LEFT - 8}" lengthAdjust="spacingAndGlyphs"' if len(text) > 6 else ""
    return (
        f'<text class="tick" x="{LEFT - 6}" y="{place + 3.5:.1f}" text-anchor="end"{squeezed}>'
        f"{text}</text>"
    )


def _x_label(place: float, bottom: float, text: str) -> str:
    return (
        f'<text class="tick" x="{place:.1f}" y="{bottom + 16}" text-anchor="middle">{text}</text>'
    )


def _curve(place: int, curve: Curve, x: Axis, y: Axis) -> str:
    readings = curve.points
    kept = thinned(readings)
    half_width = len(readings) // AVERAGED_PARTS // 2
    raw = [(readings[i].step, readings[i].value) for i in kept]
    parts = [f'<g class="{run_class(place)}">']
    for piece in curve.undone:
        places = thinned(piece)
        undone = _path([(piece[i].step, piece[i].value) for i in places], x, y)
        parts.append(f'<path class="undone" d="{undone}"/>')
    parts.append(
        f'<path class="{"thin" if half_width else "bold"}" data-run="{place}" '
        f'data-x="{" ".join(str(step) for step, _ in raw)}" '
        f'data-y="{" ".join(format_number(value) for _, value in raw)}" d="{_path(raw, x, y)}"/>'
    )
    if half_width:
        average = [(readings[i].step, moving_average(readings, i, half_width)) for i in kept]
        parts.append(f'<path class="bold" d="{_path(average, x, y)}"/>')
    if len(raw) <= FEW:
        dots = "".join(_path([point], x, y) for point in raw)
        parts.append(f'<path class="dots" d="{dots}"/>')
    broken = "".join(
        f"M{x.at(step):.1f} {BOTTOM}v-7" for step, value in raw if not math.isfinite(value)
    )
    if broken:
        parts.append(f'<path class="broken" d="{broken}"/>')
    return "".join(parts) + "</g>"


def _path(points: Sequence[tuple[int, float]], x: Axis, y: Axis) -> str:
    """A line with a gap at every value that is not finite; a point alone becomes a dot."""
    drawn = []
    for finite, group in groupby(points, key=lambda point: math.isfinite(point[1])):
        if finite:
            places = [f"{x.at(step):.1f} {y.at(value):.1f}" for step, value in group]
            drawn.append("M" + "L".join(places) + ("h0" if len(places) == 1 else ""))
    return "".join(drawn)


def _marks(marks: Sequence[NumberedVerdict], x: Axis, several: bool) -> Iterator[str]:
    for numbered in marks:
        place = x.at(numbered.verdict.step)
        color = f" {run_class(numbered.run)}" if several else ""
        yield (
            f'<path class="mark{color}" data-number="{numbered.number}" '
            f'd="M{place:.1f} {TOP - 6}V{BOTTOM}"/>'
        )
    for cluster in clustered(marks, x.at, apart=16):
        text = numbers_text(cluster)
        place = (x.at(cluster[0].verdict.step) + x.at(cluster[-1].verdict.step)) / 2
        half = 3.5 + 3 * len(text)
        place = min(place, WIDTH - half)
        worst = max(m.verdict.level or Level.HEALTHY for m in cluster)
        told = "\n".join(f"{m.number}: {m.verdict.sentence}" for m in cluster)
        yield (
            f'<a href="#verdict-{cluster[0].number}"><title>{escape(told)}</title>'
            f'<rect class="pill {worst.word}" x="{place - half:.1f}" y="{TOP - 20}" '
            f'width="{2 * half:.1f}" height="14" rx="7"/>'
            f'<text class="number {worst.word}" x="{place:.1f}" y="{TOP - 9.5}" '
            f'text-anchor="middle">{text}</text></a>'
        )
