"""The report's pictures as inline SVG, in the colours of the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from lit_callbacks import format_number
from lit_callbacks.report.axes import Axis
from lit_rlhf.evaluation.reward_report.measures import LengthBucket, ReliabilityBin

WIDTH, HEIGHT = 380, 220  # in the picture's own units: about the pixels of a column
LEFT, RIGHT, TOP, BOTTOM = 46, 370, 10, 176  # of the part with the data
MOST_DOTS = 1500


def histogram_chart(edges: Sequence[float], counts: Sequence[int], title: str) -> str:
    """Bars of differences: mistakes left of 0, the rest right of it.

    Args:
        edges: Edges of the bars, `[K + 1]`.
        counts: Their heights, `[K]`.
        title: What it shows, for readers of the page who do not see it.
    """
    x = Axis(edges[0], edges[-1], LEFT, RIGHT)
    y = Axis(0.0, max(max(counts), 1) * 1.05, BOTTOM, TOP)
    bars = []
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        kind = "wrong" if high <= 0 else "right"
        text = f"{format_number(low)} to {format_number(high)}: {count} pairs"
        bars.append(
            f'<rect class="bar {kind}" x="{x.at(low) + 0.4:.1f}" y="{y.at(count):.1f}" '
            f'width="{x.at(high) - x.at(low) - 0.8:.1f}" height="{BOTTOM - y.at(count):.1f}">'
            f"<title>{text}</title></rect>"
        )
    zero = f'<path class="zero-line" d="M{x.at(0.0):.1f} {TOP}V{BOTTOM}"/>'
    return _picture(title, x, y, [*bars, zero], "chosen - rejected score", "pairs", whole=True)


def reliability_chart(bins: Sequence[ReliabilityBin]) -> str:
    """Accuracy against confidence, with intervals; on the diagonal the model is calibrated."""
    pairs = sum(found.pairs for found in bins)
    x, y = Axis(0.5, 1.0, LEFT + 6, RIGHT - 6), Axis(0.0, 1.02, BOTTOM, TOP)
    start, end = (f"{x.at(share):.1f} {y.at(share):.1f}" for share in (0.5, 1.0))
    ideal = f'<path class="ideal" d="M{start}L{end}"/>'
    marks = [
        _whisker(
            x.at(found.confidence),
            (y.at(found.low), y.at(found.accuracy), y.at(found.high)),
            f"{found.pairs} of {pairs} pairs: {found.confidence:.1%} sure, "
            f"{found.accuracy:.1%} right [{found.low:.1%}, {found.high:.1%}]",
            radius=2.5 + 4.5 * (found.pairs / pairs) ** 0.5,
        )
        for found in bins
    ]
    return _picture(
        "How often the model is right by how sure it is",
        x,
        y,
        [ideal, *marks],
        "probability given to the preferred response",
        "right",
    )


def length_chart(buckets: Sequence[LengthBucket]) -> str:
    """Accuracy with intervals by length difference."""
    y = Axis(0.0, 1.02, BOTTOM, TOP)
    x = Axis(-0.5, len(buckets) - 0.5, LEFT, RIGHT)
    marks, labels = [], []
    for place, bucket in enumerate(buckets):
        found = bucket.accuracy
        marks.append(
            _whisker(
                x.at(place),
                (y.at(found.low), y.at(found.accuracy), y.at(found.high)),
                f"{bucket.label} tokens: {found.pairs} pairs, {found.accuracy:.1%} right "
                f"[{found.low:.1%}, {found.high:.1%}]",
                radius=4.0,
            )
        )
        short = bucket.label.replace(" to ", "..")
        if bucket.low is None or bucket.high is None:
            short = f"≤{bucket.high}" if bucket.low is None else f"≥{bucket.low}"
        labels.append(
            f'<text class="tick" x="{x.at(place):.1f}" y="{BOTTOM + 16}" '
            f'text-anchor="middle">{escape(short)}</text>'
        )
    coin = f'<path class="ideal" d="M{LEFT} {y.at(0.5):.1f}H{RIGHT}"/>'
    return _picture(
        "Accuracy by length difference",
        None,
        y,
        [coin, *marks, *labels],
        "chosen - rejected length, tokens",
        "right",
    )


def scatter_chart(lengths: NDArray[np.int64], differences: NDArray[np.float64]) -> str:
    """Score difference against length difference, a dot for each pair.

    Args:
        lengths: Length differences in tokens, `[N]`.
        differences: Score differences, `[N]`.
    """
    x, y = _reach(lengths, LEFT, RIGHT), _reach(differences, BOTTOM, TOP)
    rows = np.unique(np.linspace(0, len(lengths) - 1, MOST_DOTS).astype(int))
    dots = "".join(
        f"M{x.at(float(np.clip(lengths[row], x.low, x.high))):.1f} "
        f"{y.at(float(np.clip(differences[row], y.low, y.high))):.1f}h0"
        for row in rows
    )
    return _picture(
        "Score difference against length difference",
        x,
        y,
        [
            f'<path class="zero-line" d="M{x.at(0.0):.1f} {TOP}V{BOTTOM}"/>',
            f'<path class="zero-line" d="M{LEFT} {y.at(0.0):.1f}H{RIGHT}"/>',
            f'<path class="dots pair-dots" d="{dots}"/>',
        ],
        "chosen - rejected length, tokens",
        "score",
    )


def _reach(values: NDArray[np.generic], start: float, end: float) -> Axis:
    """An axis with 0 in its middle, from which no more than one value in 100 is left out."""
    reach = float(np.quantile(np.abs(values), 0.99)) * 1.05 or 1.0
    return Axis(-reach, reach, start, end)


def _whisker(x: float, ys: tuple[float, float, float], text: str, radius: float) -> str:
    low, middle, high = ys
    caps = f"M{x - 4:.1f} {low:.1f}h8M{x - 4:.1f} {high:.1f}h8"
    return (
        f'<g class="whisker"><title>{escape(text)}</title>'
        f'<path d="M{x:.1f} {low:.1f}V{high:.1f}{caps}"/>'
        f'<circle cx="{x:.1f}" cy="{middle:.1f}" r="{radius:.1f}"/></g>'
    )


def _picture(
    title: str,
    x: Axis | None,
    y: Axis,
    data: Sequence[str],
    x_name: str,
    y_name: str,
    whole: bool = False,
) -> str:
    """Axes with their names around the data; without an x axis the data brings its own labels."""
    parts = [*_grid(y, whole), *data, *(() if x is None else _x_ticks(x))]
    names = (
        f'<text class="tick axis" x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 34}" '
        f'text-anchor="middle">{escape(x_name)}</text>'
        f'<text class="tick axis" x="{LEFT - 34}" y="{(TOP + BOTTOM) / 2}" text-anchor="middle" '
        f'transform="rotate(-90 {LEFT - 34} {(TOP + BOTTOM) / 2})">{escape(y_name)}</text>'
    )
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}{names}</svg>'
    )


def _grid(y: Axis, whole: bool) -> Iterator[str]:
    for value, text in y.ticks(5, whole):
        place = y.at(value)
        yield f'<path class="grid" d="M{LEFT} {place:.1f}H{RIGHT}"/>'
        yield (
            f'<text class="tick" x="{LEFT - 5}" y="{place + 3.5:.1f}" '
            f'text-anchor="end">{text}</text>'
        )


def _x_ticks(x: Axis) -> Iterator[str]:
    for value, text in x.ticks(6):
        yield (
            f'<text class="tick" x="{x.at(value):.1f}" y="{BOTTOM + 16}" '
            f'text-anchor="middle">{text}</text>'
        )
