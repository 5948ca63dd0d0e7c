"""Charts by matplotlib: the course of runs, who wins against a baseline, and reward models."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread, imsave
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from lit_callbacks import Curve, read_run
from lit_rlhf.checks import check_count
from lit_rlhf.tools.evaluation.outcomes import HeadToHeads, Outcomes, ScoreSummary

if TYPE_CHECKING:
    from IPython.display import DisplayHandle, Image

    from lit_rlhf.tools.evaluation.compare import Comparison
    from lit_rlhf.tools.evaluation.reward_report.measures import (
        Accuracy,
        LengthBucket,
        ReliabilityBin,
    )

PANELS = {
    "rollout/score": "score that PPO optimizes",
    "rollout/gold": "gold reward",
    "rollout/kl": "KL to the SFT policy, nats per response",
    "rollout/response_length": "response length, tokens",
    "rollout/perplexity": "perplexity of the responses",
    "ppo/explained_variance": "critic's explained variance",
}
"""Metrics that a figure of runs has by default, with the titles of their panels."""

# Colours that readers with colour blindness can tell apart (Okabe and Ito).
_BLUE, _ORANGE, _GRAY = "#0072B2", "#D55E00", "#D9D9D9"
_RUN_COLORS = (_ORANGE, _BLUE, "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_OUTCOME_COLORS = {"win": _BLUE, "tie": _GRAY, "lose": _ORANGE}
_OUTCOME_TEXT = {"win": "white", "tie": "black", "lose": "white"}
_STYLE: dict[Any, Any] = {  # Any: older stubs of matplotlib type the keys as str
    "figure.dpi": 160,
    "figure.constrained_layout.use": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "legend.frameon": False,
}
_IDEAL: dict[str, Any] = {"color": "#777777", "linestyle": "--", "linewidth": 1.0}
_COLUMNS = 3
_AVERAGED_PARTS = 25  # the moving average covers a 25th of a run
_OF_PPO = ("rollout/", "ppo/")  # logged once per iteration
_SIGNED_LOG = ("rollout/kl",)  # spans orders of magnitude, and its estimate can be negative
_FLOORS = {"ppo/explained_variance": -1.0}  # a new critic's first values would flatten the rest
_NARROW = 0.035  # a share below this has no room for its number
_NOTEBOOK_DPI = 80  # two figures of six panels and their notebook stay below 150 kB


def save_figure(figure: Figure, output: str | Path) -> Path:
    """Write a figure into a file whose suffix is the format, for example `.png` or `.svg`."""
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def run_figure(runs: Mapping[str, str | Path], keys: Sequence[str] | None = None) -> Figure:
    """Draw metrics of runs over their iterations or steps, with one panel per metric.

    As in Figure 4 of arXiv 2307.04964. Thin lines are the logged values, bold ones their moving
    average.

    Args:
        runs: Folder of each run by its name in the legend, see `lit_callbacks.read_run`.
        keys: Metrics to draw. `None`: the metrics of `PANELS` that a run has.
    """
    if not runs:
        raise ValueError("runs: expected at least one run, got none")
    loaded = [read_run(name, folder) for name, folder in runs.items()]
    drawn = _choose_keys(keys, {key for run in loaded for key in run.curves})
    columns = min(_COLUMNS, len(drawn))
    rows = math.ceil(len(drawn) / columns)
    lines: dict[str, Line2D] = {}
    with rc_context(_STYLE):
        figure = Figure(figsize=(3.3 * columns, 2.3 * rows + 0.5))
        axes: list[Axes] = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
        for unused in axes[len(drawn) :]:
            unused.set_axis_off()
        for position, (axis, key) in enumerate(zip(axes, drawn, strict=False)):
            for color, run in zip(cycle(_RUN_COLORS), loaded, strict=False):
                if key in run.curves:
                    lines[run.name] = _draw_curve(axis, run.curves[key], color)
            _format_panel(axis, key)
            if position + columns >= len(drawn):  # the lowest panel of its column
                axis.set_xlabel("PPO iteration" if key.startswith(_OF_PPO) else "step")
        names = [name for name in runs if name in lines]
        handles = [lines[name] for name in names]
        figure.legend(handles, names, loc="outside upper center", ncols=len(names), fontsize=11)
    return figure


class LiveCurves(Callback):
    """Draws the metrics of a run in a notebook while it trains, as `run_figure` does.

    The figure is redrawn in place from the log of the trainer's first logger, a
    `TensorBoardLogger` or `CSVLogger`, on rank 0. It stays in the notebook after the fit.

    Args:
        keys: Metrics to draw, each as soon as it is logged. `None`: the keys of `PANELS`.
        name: Name of the run in the legend.
        every_n_batches: Number of training batches between two drawings.
        beside: Folders of earlier runs by other names, which come after it in the legend.
    """

    def __init__(
        self,
        keys: Sequence[str] | None = None,
        name: str = "this run",
        every_n_batches: int = 5,
        beside: Mapping[str, str | Path] | None = None,
    ) -> None:
        check_count("every_n_batches", every_n_batches)
        self.keys = keys
        self.name = name
        self.every_n_batches = every_n_batches
        self.beside = dict(beside or {})
        self._display: DisplayHandle | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that there is a log to read and a notebook to draw in."""
        if not trainer.loggers:
            raise ValueError(
                "LiveCurves: expected a Trainer with a TensorBoardLogger or a CSVLogger, whose log "
                "is drawn, got one without a logger"
            )
        try:
            import IPython.display  # noqa: F401
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "LiveCurves draws in a notebook: pip install ipykernel"
            ) from error
        self._display = None  # a second fit has another figure

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Draw what has been logged so far."""
        if (trainer.fit_loop.total_batch_idx + 1) % self.every_n_batches == 0:
            self._draw(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the whole run, and name the metrics that it never logged."""
        self._draw(trainer)
        missing = [key for key in self.keys or () if key not in trainer.logged_metrics]
        if missing:
            rank_zero_warn(
                f"LiveCurves: expected keys that the run logs, got {', '.join(missing)}; it logged "
                f"{', '.join(sorted(trainer.logged_metrics))}"
            )

    def _draw(self, trainer: Trainer) -> None:
        folder = trainer.log_dir  # communicates between ranks, so it is read on all of them
        # metrics of a validation come later, and `read_run` refuses a folder without any
        keys = [key for key in self.keys or PANELS if key in trainer.logged_metrics]
        if folder is None or not trainer.is_global_zero or not keys:
            return
        from IPython.display import display

        trainer.loggers[0].save()  # writes what the logger has collected
        image = _png_image(run_figure({self.name: folder, **self.beside}, keys))
        if self._display is None:
            self._display = display(image, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._display.update(image)  # type: ignore[no-untyped-call]


def _png_image(figure: Figure) -> Image:
    """Render a figure for a notebook, whatever backend matplotlib has there."""
    from IPython.display import Image

    drawn, small = BytesIO(), BytesIO()
    figure.savefig(drawn, format="png", dpi=_NOTEBOOK_DPI)
    drawn.seek(0)
    # 16 levels per channel look the same and halve the file, which is part of the notebook.
    imsave(small, np.round(imread(drawn) * 15) / 15, format="png")
    return Image(data=small.getvalue())  # type: ignore[no-untyped-call]


def _choose_keys(keys: Sequence[str] | None, logged: set[str]) -> list[str]:
    drawn = [key for key in PANELS if key in logged] if keys is None else list(keys)
    missing = [key for key in drawn if key not in logged]
    if missing or not drawn:
        raise ValueError(
            f"keys: expected metrics that a run logged ({', '.join(sorted(logged))}), "
            f"got {', '.join(missing) or 'none of the usual ones'}"
        )
    return drawn


def _draw_curve(axis: Axes, curve: Curve, color: str) -> Line2D:
    steps = [point.step for point in curve.points]
    values = np.array([point.value for point in curve.points])
    axis.plot(steps, values, color=color, linewidth=0.8, alpha=0.3)
    return axis.plot(steps, _moving_average(values), color=color, linewidth=1.8)[0]


def _moving_average(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean of the finite values in a centered window, which shrinks at the ends."""
    window = np.ones(2 * (len(values) // _AVERAGED_PARTS // 2) + 1)
    finite = np.isfinite(values)
    counts = np.convolve(finite, window, "same")
    sums = np.convolve(np.where(finite, values, 0.0), window, "same")
    with np.errstate(invalid="ignore"):
        means: NDArray[np.float64] = np.where(counts > 0, sums / counts, np.nan)
    return means


def _format_panel(axis: Axes, key: str) -> None:
    # Below a few units a logarithmic axis has no room for ticks.
    if key in _SIGNED_LOG and axis.dataLim.y1 > 3.0:
        lowest = axis.dataLim.y0
        axis.set_yscale("symlog", linthresh=1.0)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_ylim(bottom=min(lowest if math.isfinite(lowest) else 0.0, 0.0) - 0.1)
    if key in _FLOORS:
        axis.set_ylim(bottom=max(axis.get_ylim()[0], _FLOORS[key]))
    axis.set_title(PANELS.get(key, key))
    axis.tick_params(labelsize=8)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def outcome_figure(judged: Sequence[HeadToHeads], baseline: str) -> Figure:
    """Draw win, tie and lose shares as one stacked bar per policy, with one panel per judge.

    As in Figure 10 of arXiv 2307.04964. The lines above and below a bar are the 95 % intervals of
    win and of lose.
    """
    if not judged:
        raise ValueError("chart: expected verdicts of a reward or a judge to draw, got none")
    heights = [len(outcomes) for _, outcomes in judged]
    with rc_context(_STYLE):
        figure = Figure(figsize=(6.6, 0.9 + 0.45 * sum(heights) + 0.4 * len(heights)))
        axes = figure.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights)
        for axis, (judge, outcomes) in zip(axes[:, 0], judged, strict=True):
            _draw_judge(axis, judge, outcomes)
        axis.set_xlabel(f"share of prompts, against {baseline}; lines: 95 % intervals")
        axis.xaxis.set_major_formatter(PercentFormatter(1.0))
        handles = [Patch(facecolor=color) for color in _OUTCOME_COLORS.values()]
        figure.legend(
            handles, list(_OUTCOME_COLORS), loc="outside upper center", ncols=3, fontsize=10
        )
    return figure


def kl_figure(comparison: Comparison) -> Figure:
    """Draw scores against the square root of the KL from the baseline, with a panel per reward.

    As in Figure 1 of arXiv 2210.10760. Lines at the points are 95 % intervals.
    """
    rewards, best_of = list(comparison.rewards), comparison.best_of
    with rc_context(_STYLE):
        figure = Figure(figsize=(0.6 + 3.4 * len(rewards), 3.2))
        axes = figure.subplots(1, len(rewards), squeeze=False)[0]
        for axis, reward in zip(axes, rewards, strict=True):
            for color, (name, report) in zip(cycle(_RUN_COLORS), comparison.policies.items()):
                _draw_point(axis, report.metrics["kl"], report.scores[reward], color, name)
            points = [(math.sqrt(best.kl), best.scores[reward].mean) for best in best_of]
            for best, point in zip(best_of, points, strict=True):
                _draw_point(axis, best.kl, best.scores[reward], "0.45")
                axis.annotate(str(best.n), point, fontsize=8)
            if points:
                axis.plot(*zip(*points, strict=True), color="0.45", label="best of n")
            axis.set_title(reward)
            axis.set_xlabel(f"square root of the KL from {comparison.baseline}, nats")
            axis.grid(alpha=0.25, linewidth=0.6)
        axes[0].set_ylabel("mean score")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=9)
    return figure


def _draw_point(
    axis: Axes, kl: float, score: ScoreSummary, color: str, label: str | None = None
) -> None:
    place = math.sqrt(max(kl, 0.0))  # an estimate may be negative
    axis.plot([place], [score.mean], "o", color=color, label=label)
    axis.plot([place] * 2, [score.low, score.high], color=color)


def _draw_judge(axis: Axes, judge: str, outcomes: Mapping[str, Outcomes | None]) -> None:
    for place, result in enumerate(outcomes.values()):
        if result is not None:
            _draw_bar(axis, place, result)
        else:
            axis.text(0.01, place, "no valid verdict", va="center", fontsize=9)
    axis.set_yticks(range(len(outcomes)), list(outcomes), fontsize=9)
    axis.set_ylim(len(outcomes) - 0.5, -0.5)  # the first policy on top
    axis.set_xlim(0, 1)
    axis.set_title(judge)
    axis.tick_params(length=0, labelsize=9)
    axis.spines[:].set_visible(False)


def _draw_bar(axis: Axes, place: int, outcomes: Outcomes) -> None:
    left = 0.0
    for name, color in _OUTCOME_COLORS.items():
        share = getattr(outcomes, name)
        axis.barh(place, share, left=left, height=0.56, color=color)
        if share >= _NARROW:
            middle, percent = left + share / 2, f"{100 * share:.0f}"
            axis.text(middle, place, percent, ha="center", va="center", color=_OUTCOME_TEXT[name])
        left += share
    win, lose = outcomes.win_interval, outcomes.lose_interval
    axis.plot([win.low, win.high], [place - 0.35] * 2, color=_OUTCOME_COLORS["win"])
    # Lose is counted from the right end of the bar.
    axis.plot([1 - lose.high, 1 - lose.low], [place + 0.35] * 2, color=_OUTCOME_COLORS["lose"])


def histogram_chart(edges: Sequence[float], counts: Sequence[int], x_title: str) -> Figure:
    """Draw a histogram of score differences: mistakes left of 0, the rest right of it."""
    figure, axis = _small_figure(x_title, "pairs")
    colors = [_ORANGE if high <= 0 else _BLUE for high in edges[1:]]
    axis.bar(edges[:-1], counts, np.diff(edges), align="edge", color=colors)
    axis.axvline(0.0, color="black", linewidth=0.8)
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def reliability_chart(bins: Sequence[ReliabilityBin]) -> Figure:
    """Draw accuracy by confidence; the dots of a calibrated model lie on the diagonal.

    A larger dot stands for more pairs.
    """
    figure, axis = _small_figure("probability given to the preferred response", "right")
    axis.plot([0.5, 1.0], [0.5, 1.0], **_IDEAL)
    pairs = np.array([found.pairs for found in bins])
    places = [found.confidence for found in bins]
    _draw_shares(axis, places, bins, 15 + 60 * pairs / pairs.sum())
    axis.set_xlim(0.49, 1.01)
    return figure


def length_chart(buckets: Sequence[LengthBucket]) -> Figure:
    """Draw accuracy by length difference, from the shortest to the longest chosen response."""
    figure, axis = _small_figure("chosen - rejected length, tokens", "right")
    axis.axhline(0.5, **_IDEAL)
    places = range(len(buckets))
    _draw_shares(axis, places, [bucket.accuracy for bucket in buckets], 30)
    labels = [bucket.label.replace(" or ", "\nor ").replace(" to ", "\nto ") for bucket in buckets]
    axis.set_xticks(places, labels, fontsize=8)
    return figure


def scatter_chart(lengths: NDArray[np.int64], differences: NDArray[np.float64]) -> Figure:
    """Draw score differences `[N]` against length differences `[N]` in tokens."""
    figure, axis = _small_figure("chosen - rejected length, tokens", "score")
    # one image in the vector graphic: a page of 100,000 dots would not open
    axis.scatter(lengths, differences, s=6, alpha=0.35, color=_BLUE, rasterized=True, linewidths=0)
    axis.axhline(0.0, color="black", linewidth=0.8)
    axis.axvline(0.0, color="black", linewidth=0.8)
    reach_x, reach_y = (
        1.05 * float(np.quantile(np.abs(values), 0.99)) or 1.0 for values in (lengths, differences)
    )  # outliers lie outside
    axis.set_xlim(-reach_x, reach_x)
    axis.set_ylim(-reach_y, reach_y)
    return figure


def svg_address(figure: Figure) -> str:
    """Render a figure as a `data:` address, for an image that is part of an HTML page."""
    svg = BytesIO()
    # without the date, equal figures are equal bytes
    with rc_context({"svg.hashsalt": "lit_rlhf"}):
        figure.savefig(svg, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.getvalue()).decode()}"


def _small_figure(x_title: str, y_title: str) -> tuple[Figure, Axes]:
    with rc_context(_STYLE):
        figure = Figure(figsize=(5.2, 2.6))
        axis = figure.subplots()
    axis.set_xlabel(x_title)
    axis.set_ylabel(y_title)
    axis.spines[["top", "right"]].set_visible(False)
    return figure, axis


def _draw_shares(
    axis: Axes,
    places: Sequence[float],
    found: Sequence[Accuracy | ReliabilityBin],
    sizes: float | NDArray[np.float64],
) -> None:
    """Draw accuracies as dots with their intervals."""
    axis.vlines(places, [f.low for f in found], [f.high for f in found], color=_BLUE)
    axis.scatter(places, [f.accuracy for f in found], sizes, color=_BLUE, zorder=3)
    axis.set_ylim(0.0, 1.03)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
