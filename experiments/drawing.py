"""Shared parts of the experiments' figures: style, bands over seeds, and files that repeat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_callbacks.charts import FIGURE_COLORS, FIGURE_STYLE
from lit_callbacks.charts import figure_colors as figure_colors

COLORS = FIGURE_COLORS
STYLE = FIGURE_STYLE | {"text.parse_math": True}  # the numbers on axes of powers of ten
TITLES = {
    "score": "reward model's score, above SFT's",
    "gold": "gold reward",
    "kl": "KL to the reference, nats",
    "response_length": "response length, tokens",
    "perplexity": "perplexity of the responses",
    "win": "wins against SFT by gold, share",
    "policy_loss": "policy loss",
    "value_loss": "value loss",
    "explained_variance": "critic's explained variance",
}
SIGNED_LOG = {"kl": 5.0, "value_loss": 5.0, "perplexity": 50.0}
"""Measures on a logarithmic scale beyond 1 where their largest value is above this."""
FLOORS = {"explained_variance": -1.0}


def window_means(values: Sequence[float], width: int) -> list[float]:
    """Means over windows of `width` values, of whole windows only."""
    return [fmean(values[i : i + width]) for i in range(len(values) - width + 1)]


def save(figure: Figure, path: Path) -> None:
    """Write a figure as SVG; the same data give the same file."""
    with rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path, metadata={"Date": None})


def band(
    axis: Axes,
    courses: Sequence[Sequence[float | None] | np.ndarray],
    steps: Sequence[float],
    label: str,
    color: str,
) -> None:
    """Draw the mean of courses as a line, and their range as a band."""
    size = min([len(steps), *map(len, courses)])
    values = np.array([course[:size] for course in courses], float)
    # the policy has no loss while the critic is pre-trained
    is_logged = ~np.isnan(values).all(axis=0)
    values, x = values[:, is_logged], np.array(steps[:size], float)[is_logged]
    axis.plot(x, np.nanmean(values, axis=0), color=color, linewidth=1.6, label=label)
    axis.fill_between(
        x,
        np.nanmin(values, axis=0),
        np.nanmax(values, axis=0),
        color=color,
        alpha=0.18,
        linewidth=0,
    )


def finish_panel(axis: Axes, measure: str) -> None:
    """Title, scale and grid of a panel."""
    if axis.dataLim.y1 > SIGNED_LOG.get(measure, math.inf):
        axis.set_yscale("symlog", linthresh=1.0)
        axis.yaxis.set_major_formatter("{x:g}")
    if measure in FLOORS:
        axis.set_ylim(bottom=max(axis.get_ylim()[0], FLOORS[measure]))
    axis.set_title(TITLES.get(measure, measure))
    finish_axis(axis)


def finish_axis(axis: Axes) -> None:
    """Grid and frame of a panel."""
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
