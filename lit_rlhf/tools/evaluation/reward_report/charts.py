"""The charts on the page about a reward model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lit_callbacks.charts import COLORS, new_axes
from lit_rlhf.tools.evaluation.reward_report.measures import (
    Accuracy,
    LengthBucket,
    ReliabilityBin,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The colours of a chosen and of a rejected response on the page.
_RIGHT_COLOR = COLORS["c0"]
_WRONG_COLOR = COLORS["collapsed-band"]
_DOT_COLOR = COLORS["c5"]  # an image keeps it in dark mode too, so it has to show on both grounds


def draw_histogram(edges: Sequence[float], counts: Sequence[int], x_title: str) -> Axes:
    """Draw a histogram of score differences: mistakes left of 0, the rest right of it.

    Args:
        edges: Bounds of the bars, `[K + 1]`, from low to high.
        counts: Pairs in each bar, `[K]`.
        x_title: What the difference is.
    """
    from matplotlib.ticker import MaxNLocator

    axes = new_axes(x_title=x_title, y_title="pairs")
    colors = [_WRONG_COLOR if high <= 0 else _RIGHT_COLOR for high in edges[1:]]
    axes.bar(edges[:-1], counts, width=np.diff(edges), align="edge", color=colors)
    axes.axvline(0.0, color=COLORS["faint"], linewidth=0.8)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return axes


def draw_reliability(bins: Sequence[ReliabilityBin]) -> Axes:
    """Draw accuracy by confidence; the dots of a calibrated model lie on the diagonal.

    A larger dot stands for more pairs.
    """
    axes = new_axes(x_title="probability given to the preferred response", y_title="right")
    axes.plot([0.5, 1.0], [0.5, 1.0], color=COLORS["faint"], linestyle="--", linewidth=1.0)
    pairs = np.array([entry.pairs for entry in bins])
    places = [entry.confidence for entry in bins]
    _draw_accuracies(axes, places, bins, sizes=15 + 60 * pairs / pairs.sum())
    axes.set_xlim(0.47, 1.02)
    return axes


def draw_accuracy_by_length(buckets: Sequence[LengthBucket]) -> Axes:
    """Draw accuracy by length difference, from the shortest to the longest chosen response."""
    axes = new_axes(x_title="chosen - rejected length, tokens", y_title="right")
    axes.axhline(0.5, color=COLORS["faint"], linestyle="--", linewidth=1.0)
    places = range(len(buckets))
    _draw_accuracies(axes, places, [bucket.accuracy for bucket in buckets], sizes=30)
    labels = [bucket.label.replace(" or ", "\nor ").replace(" to ", "\nto ") for bucket in buckets]
    axes.set_xticks(places, labels, fontsize=8)
    return axes


def draw_scatter(lengths: NDArray[np.int64], differences: NDArray[np.float64]) -> Axes:
    """Draw score differences against length differences.

    Args:
        lengths: Chosen less rejected, in tokens, `[N]`.
        differences: Chosen less rejected, in scores, `[N]`.
    """
    axes = new_axes(x_title="chosen - rejected length, tokens", y_title="score")
    # one image in the vector graphic: a page of 100,000 dots would not open
    axes.scatter(
        lengths,
        differences,
        s=6,
        alpha=0.6,
        color=_DOT_COLOR,
        rasterized=True,
        linewidths=0,
    )
    axes.axhline(0.0, color=COLORS["faint"], linewidth=0.8)
    axes.axvline(0.0, color=COLORS["faint"], linewidth=0.8)
    reach_x = _reach_without_outliers(lengths)
    reach_y = _reach_without_outliers(differences)
    axes.set_xlim(-reach_x, reach_x)
    axes.set_ylim(-reach_y, reach_y)
    return axes


def _reach_without_outliers(values: NDArray[np.int64] | NDArray[np.float64]) -> float:
    """Half the width of an axis around 0 that shows 99 % of the values."""
    return 1.05 * float(np.quantile(np.abs(values), 0.99)) or 1.0


def _draw_accuracies(
    axes: Axes,
    places: Sequence[float],
    accuracies: Sequence[Accuracy | ReliabilityBin],
    *,
    sizes: float | NDArray[np.float64],
) -> None:
    """Draw accuracies as dots with their intervals."""
    from matplotlib.ticker import PercentFormatter

    lows = [entry.low for entry in accuracies]
    highs = [entry.high for entry in accuracies]
    shares = [entry.accuracy for entry in accuracies]
    axes.vlines(places, lows, highs, color=_RIGHT_COLOR)
    axes.scatter(places, shares, sizes, color=_RIGHT_COLOR, zorder=3)
    axes.set_ylim(0.0, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
