"""The charts of the report on a reward model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lit_callbacks import format_number
from lit_callbacks.report import Chart, Scale, Tick
from lit_rlhf.tools.evaluation.reward_report.measures import LengthBucket, ReliabilityBin

HEIGHT = 166  # of the plot area; the page has few charts, so they may be tall
MAX_DOTS = 1500
SHARES = Scale(0.0, 1.02)  # room for a dot at 1


def histogram_chart(edges: Sequence[float], counts: Sequence[int], label: str) -> Chart:
    """Histogram of score differences: mistakes left of 0, the rest right of it.

    Args:
        edges: Edges of the bars, `[K + 1]`.
        counts: Their heights, `[K]`.
        label: Description for readers who do not see the chart.
    """
    chart = Chart(
        label,
        x=Scale(edges[0], edges[-1]),
        y=Scale(0.0, max(max(counts), 1) * 1.05, whole=True),
        x_title="chosen - rejected score",
        y_title="pairs",
        height=HEIGHT,
    )
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        kind = "wrong" if high <= 0 else "right"
        title = f"{format_number(low)} to {format_number(high)}: {count} pairs"
        chart.bar(low, high, count, f"bar {kind}", title)
    chart.rule("zero-line", x=0.0)
    return chart


def reliability_chart(bins: Sequence[ReliabilityBin]) -> Chart:
    """Accuracy by confidence, with intervals; a calibrated model lies on the diagonal.

    Args:
        bins: The bins. A larger dot stands for more pairs.
    """
    pairs = sum(found.pairs for found in bins)
    chart = Chart(
        "How often the model is right by how sure it is",
        x=Scale(0.5, 1.0),
        y=SHARES,
        x_title="probability given to the preferred response",
        y_title="right",
        height=HEIGHT,
        margin=6,
    )
    chart.line([(0.5, 0.5), (1.0, 1.0)], "ideal")
    for found in bins:
        chart.interval(
            found.confidence,
            found.low,
            found.accuracy,
            found.high,
            f"{found.pairs} of {pairs} pairs: {found.confidence:.1%} sure, "
            f"{found.accuracy:.1%} right [{found.low:.1%}, {found.high:.1%}]",
            radius=2.5 + 4.5 * (found.pairs / pairs) ** 0.5,
        )
    return chart


def length_chart(buckets: Sequence[LengthBucket]) -> Chart:
    """Accuracy by length difference, with intervals.

    Args:
        buckets: The buckets, from the shortest to the longest chosen response.
    """
    chart = Chart(
        "Accuracy by length difference",
        x=Scale(-0.5, len(buckets) - 0.5),
        y=SHARES,
        x_title="chosen - rejected length, tokens",
        y_title="right",
        x_ticks=[Tick(place, _short_label(bucket)) for place, bucket in enumerate(buckets)],
        height=HEIGHT,
    )
    chart.rule("ideal", y=0.5)
    for place, bucket in enumerate(buckets):
        found = bucket.accuracy
        title = (
            f"{bucket.label} tokens: {found.pairs} pairs, {found.accuracy:.1%} right "
            f"[{found.low:.1%}, {found.high:.1%}]"
        )
        chart.interval(place, found.low, found.accuracy, found.high, title)
    return chart


def scatter_chart(lengths: NDArray[np.int64], differences: NDArray[np.float64]) -> Chart:
    """Score difference against length difference, with a dot for each pair.

    Args:
        lengths: Length differences in tokens, `[N]`.
        differences: Score differences, `[N]`.
    """
    x, y = _centered_scale(lengths), _centered_scale(differences)
    chart = Chart(
        "Score difference against length difference",
        x,
        y,
        x_title="chosen - rejected length, tokens",
        y_title="score",
        height=HEIGHT,
    )
    chart.rule("zero-line", x=0.0)
    chart.rule("zero-line", y=0.0)
    # Evenly spaced rows stand for a larger data set: a page of 100,000 dots would not open.
    rows = np.unique(np.linspace(0, len(lengths) - 1, MAX_DOTS).astype(int))
    columns = zip(
        np.clip(lengths[rows], x.low, x.high).tolist(),
        np.clip(differences[rows], y.low, y.high).tolist(),
        strict=True,
    )
    chart.dots(list(columns), "dots pair-dots")
    return chart


def _short_label(bucket: LengthBucket) -> str:
    if bucket.low is None:
        return f"≤{bucket.high}"
    if bucket.high is None:
        return f"≥{bucket.low}"
    return bucket.label.replace(" to ", "..")


def _centered_scale(values: NDArray[np.generic]) -> Scale:
    """A scale with 0 in its middle that holds 99 % of the values."""
    reach = float(np.quantile(np.abs(values), 0.99)) * 1.05 or 1.0
    return Scale(-reach, reach)
