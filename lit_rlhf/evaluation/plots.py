"""How PPO runs went, drawn from their TensorBoard logs as in Figure 4 of arXiv 2307.04964."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from lit_callbacks import Run, read_run

PANELS = {
    "rollout/score": "reward model's score",
    "rollout/gold": "gold reward",
    "rollout/kl": "KL to the SFT policy, nats per response",
    "rollout/response_length": "response length, tokens",
    "rollout/perplexity": "perplexity of the responses",
    "ppo/explained_variance": "critic's explained variance",
}
"""Keys that are drawn unless others are asked for, with the titles of their panels."""

_SIGNED_LOG = ("rollout/kl",)  # spans orders of magnitude, and its estimate can be negative
_FLOORS = {"ppo/explained_variance": -1.0}  # a new critic's first readings would flatten the rest
_COLUMNS = 3
_COLORS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_AVERAGED_PARTS = 25  # the moving average goes over a 25th of a run


class Scalars(NamedTuple):
    """A metric over a run.

    Attributes:
        steps: Steps at which it was logged, ascending, `[N]`.
        values: Its values, `[N]`.
    """

    steps: NDArray[np.int64]
    values: NDArray[np.float64]


def scalars(folder: str | Path, key: str) -> Scalars:
    """Read one metric of a run.

    Args:
        folder: Folder with TensorBoard event files, or one that has a single such folder below it.
        key: The metric's key, for instance `rollout/kl`.

    Raises:
        ValueError: If there is no run in the folder or there are several, or the run has no such
            metric.
    """
    return _scalars(read_run(str(folder), folder), key)


def collapse_figure(
    runs: Mapping[str, str | Path],
    output: str | Path,
    keys: Sequence[str] | None = None,
    baseline: Mapping[str, float] | None = None,
) -> Path:
    """Draw metrics of several PPO runs over their iterations into a file.

    Args:
        runs: As for `run_figure`.
        output: Where the figure goes; its suffix is its format, for instance `.png`.
        keys: As for `run_figure`.
        baseline: As for `run_figure`.

    Returns:
        The path of the figure.

    Raises:
        ValueError: As `run_figure`, and for a format that matplotlib does not know.
    """
    path = Path(output)
    figure = run_figure(runs, keys, baseline)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def run_figure(
    runs: Mapping[str, str | Path],
    keys: Sequence[str] | None = None,
    baseline: Mapping[str, float] | None = None,
) -> Figure:
    """Metrics of several PPO runs over their iterations, a panel for each metric.

    Every point is drawn thinly, their moving average on top of it.

    Args:
        runs: Folder of each run (see `scalars`) by the name it gets in the legend.
        keys: Metrics to draw. `None`: those of `PANELS` that at least one run has.
        baseline: Level of the SFT policy by key, drawn as a dashed line.

    Raises:
        ValueError: If there is no run, a folder holds none, or no run has one of the `keys`.
    """
    if not runs:
        raise ValueError("runs: expected at least one run, got none")
    logged = [read_run(name, folder) for name, folder in runs.items()]
    drawn = _checked_keys(keys, {key for run in logged for key in run.curves})
    columns = min(_COLUMNS, len(drawn))
    rows = math.ceil(len(drawn) / columns)
    figure = Figure(figsize=(3.3 * columns, 2.3 * rows + 0.5), dpi=160, layout="constrained")
    axes: list[Axes] = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for unused in axes[len(drawn) :]:
        unused.set_axis_off()
    lines: dict[str, Line2D] = {}
    for position, (axis, key) in enumerate(zip(axes, drawn, strict=False)):
        for color, run in zip(cycle(_COLORS), logged, strict=False):
            if key in run.curves:
                lines[run.name] = _draw_run(axis, _scalars(run, key), color)
        if baseline is not None and key in baseline:
            lines["SFT"] = axis.axhline(baseline[key], color="#555555", linestyle="--")
        _format_panel(axis, key)
        if position + columns >= len(drawn):
            axis.set_xlabel("PPO iteration", fontsize=9)
    names = [name for name in (*runs, "SFT") if name in lines]
    figure.legend(
        [lines[name] for name in names],
        names,
        loc="outside upper center",
        ncols=len(names),
        frameon=False,
        fontsize=11,
    )
    return figure


def moving_average(values: NDArray[np.float64], half_width: int) -> NDArray[np.float64]:
    """Mean of each value and its neighbors.

    Args:
        values: `[N]`; NaN is a gap, which no mean counts.
        half_width: How many neighbors on either side; at the ends there are fewer.

    Returns:
        `[N]`; NaN where there is no value to average.
    """
    windows = (
        values[max(0, place - half_width) : place + half_width + 1] for place in range(len(values))
    )
    known = (window[np.isfinite(window)] for window in windows)
    return np.array([window.mean() if len(window) else np.nan for window in known])


def _checked_keys(keys: Sequence[str] | None, there: set[str]) -> list[str]:
    drawn = [key for key in PANELS if key in there] if keys is None else list(keys)
    missing = [key for key in drawn if key not in there]
    if missing or not drawn:
        raise ValueError(
            f"keys: expected metrics that a run logged ({', '.join(sorted(there))}), "
            f"got {', '.join(missing) or 'none of the usual ones'}"
        )
    return drawn


def _draw_run(axis: Axes, series: Scalars, color: str) -> Line2D:
    steps, values = series
    axis.plot(steps, values, color=color, linewidth=0.8, alpha=0.3)
    average = moving_average(values, len(values) // _AVERAGED_PARTS // 2)
    return axis.plot(steps, average, color=color, linewidth=1.8)[0]


def _format_panel(axis: Axes, key: str) -> None:
    # below a few units a logarithmic axis has no room for ticks
    if key in _SIGNED_LOG and axis.dataLim.y1 > 3.0:
        lowest = axis.dataLim.y0
        axis.set_yscale("symlog", linthresh=1.0)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_ylim(bottom=min(lowest if math.isfinite(lowest) else 0.0, 0.0) - 0.1)
    if key in _FLOORS:
        axis.set_ylim(bottom=max(axis.get_ylim()[0], _FLOORS[key]))
    axis.set_title(PANELS.get(key, key), fontsize=10, loc="left")
    axis.tick_params(labelsize=8)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def _scalars(run: Run, key: str) -> Scalars:
    if key not in run.curves:
        raise ValueError(
            f"key: expected one that {run.folder} has ({', '.join(run.curves)}), got {key!r}"
        )
    points = run.curves[key].points
    return Scalars(
        np.array([point.step for point in points], dtype=np.int64),
        np.array([point.value for point in points]),
    )
