"""The charts of the report on a reward model, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lit_callbacks.report import COLORS, Svg, new_axes, to_svg
from lit_rlhf.tools.evaluation.reward_report.measures import (
    Accuracy,
    LengthBucket,
    ReliabilityBin,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_DOTS = 1500
RIGHT, WRONG = COLORS["c0"], COLORS["collapsed-band"]


def histogram_chart(edges: Sequence[float], counts: Sequence[int], label: str) -> Svg:
    """Histogram of score differences: mistakes left of 0, the rest right of it.

    Args:
        edges: Edges of the bars, `[K + 1]`.
        counts: Their heights, `[K]`.
        label: Description for readers who do not see the chart.
    """
    axes = new_axes(x_title="chosen - rejected score", y_title="pairs")
    colors = [WRONG if high <= 0 else RIGHT for high in edges[1:]]
    axes.bar(edges[:-1], counts, width=np.diff(edges) * 0.9, align="edge", color=colors)
    axes.axvline(0, color=COLORS["zero"], linewidth=1)
    axes.locator_params(axis="y", integer=True, nbins=6)
    return to_svg(axes, label)


def reliability_chart(bins: Sequence[ReliabilityBin]) -> Svg:
    """Accuracy by confidence, with intervals; a calibrated model lies on the diagonal.

    Args:
        bins: The bins. A larger dot stands for more pairs.
    """
    axes = _share_axes("probability given to the preferred response")
    axes.plot([0.5, 1], [0.5, 1], "--", color=COLORS["faint"], linewidth=1)
    _draw_shares(axes, [found.confidence for found in bins], bins)
    return to_svg(axes, "How often the model is right by how sure it is")


def length_chart(buckets: Sequence[LengthBucket]) -> Svg:
    """Accuracy by length difference, with intervals.

    Args:
        buckets: The buckets, from the shortest to the longest chosen response.
    """
    axes = _share_axes("chosen - rejected length, tokens")
    axes.axhline(0.5, color=COLORS["faint"], linewidth=1, linestyle="--")
    places = list(range(len(buckets)))
    axes.set_xticks(places, [_short_label(bucket) for bucket in buckets])
    _draw_shares(axes, places, [bucket.accuracy for bucket in buckets])
    return to_svg(axes, "Accuracy by length difference")


def scatter_chart(lengths: NDArray[np.int64], differences: NDArray[np.float64]) -> Svg:
    """Score difference against length difference, with a dot for each pair.

    Args:
        lengths: Length differences in tokens, `[N]`.
        differences: Score differences, `[N]`.
    """
    axes = new_axes(x_title="chosen - rejected length, tokens", y_title="score")
    axes.axvline(0, color=COLORS["zero"], linewidth=1)
    axes.axhline(0, color=COLORS["zero"], linewidth=1)
    # Evenly spaced rows stand for a larger data set: a page of 100,000 dots would not open.
    rows = np.unique(np.linspace(0, len(lengths) - 1, MAX_DOTS).astype(int))
    x_reach, y_reach = _reach(lengths), _reach(differences)
    x = np.clip(lengths[rows], -x_reach, x_reach)
    y = np.clip(differences[rows], -y_reach, y_reach)
    axes.plot(x, y, ".", color=RIGHT, alpha=0.35, markeredgewidth=0)
    axes.set(xlim=(-x_reach, x_reach), ylim=(-y_reach, y_reach))
    return to_svg(axes, "Score difference against length difference")


def _share_axes(x_title: str) -> Axes:
    axes = new_axes(x_title=x_title, y_title="right")
    axes.set_ylim(0, 1.02)  # room for a dot at 1
    return axes


def _draw_shares(
    axes: Axes, places: Sequence[float], shares: Sequence[Accuracy | ReliabilityBin]
) -> None:
    """Draw shares with their intervals; a larger dot stands for more pairs."""
    pairs = sum(share.pairs for share in shares)
    for place, share in zip(places, shares, strict=True):
        axes.plot([place, place], [share.low, share.high], "-_", color=RIGHT, linewidth=1.2)
        size = 4 + 9 * (share.pairs / pairs) ** 0.5
        axes.plot(place, share.accuracy, "o", color=RIGHT, markersize=size)


def _short_label(bucket: LengthBucket) -> str:
    if bucket.low is None:
        return f"≤{bucket.high}"
    if bucket.high is None:
        return f"≥{bucket.low}"
    return bucket.label.replace(" to ", "..")


def _reach(values: NDArray[np.generic]) -> float:
    """A distance from 0 that holds 99 % of the values."""
    return float(np.quantile(np.abs(values), 0.99)) * 1.05 or 1.0
