"""Figures for a notebook or a paper: the course of runs, and who wins against a baseline."""

from __future__ import annotations

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
from matplotlib.ticker import MaxNLocator

from lit_callbacks import Curve, read_run
from lit_callbacks.report import moving_average, thin
from lit_rlhf.files import name_file
from lit_rlhf.tools.evaluation.outcomes import HeadToHead, Outcomes

if TYPE_CHECKING:
    from IPython.display import DisplayHandle, Image

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
_COLUMNS = 3
_AVERAGED_PARTS = 25  # the moving average goes over a 25th of a run
_OF_PPO = ("rollout/", "ppo/")  # logged once per iteration
_SIGNED_LOG = ("rollout/kl",)  # spans orders of magnitude, and its estimate can be negative
_FLOORS = {"ppo/explained_variance": -1.0}  # a new critic's first values would flatten the rest
_NARROW = 0.035  # a share below this has no room for its number
_NOTEBOOK_DPI = 80  # two figures of six panels and their notebook stay below 150 kB


def save_figure(figure: Figure, output: str | Path) -> Path:
    """Write a figure into a file; missing folders are made.

    Args:
        figure: The figure.
        output: Path of the file; its suffix is the format, for example `.png` or `.svg`.

    Returns:
        The path.

    Raises:
        ValueError: If matplotlib does not know the format.
    """
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    with name_file(path):
        figure.savefig(path)
    return path


# --- runs


def run_figure(
    runs: Mapping[str, str | Path],
    keys: Sequence[str] | None = None,
    baseline: Mapping[str, float] | None = None,
) -> Figure:
    """Metrics of runs over their iterations or steps, with one panel per metric.

    As in Figure 4 of arXiv 2307.04964. Thin lines are the logged values, bold ones their moving
    average.

    Args:
        runs: Folder of each run by its name in the legend, see `lit_callbacks.read_run`.
        keys: Metrics to draw. `None`: those of `PANELS` that a run has.
        baseline: Value of the SFT policy by key, drawn as a dashed line.

    Raises:
        ValueError: If there is no run, a folder has none or several, or no run has one of `keys`.
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
            if baseline is not None and key in baseline:
                lines["SFT"] = axis.axhline(baseline[key], color="#555555", linestyle="--")
            _format_panel(axis, key)
            if position + columns >= len(drawn):  # the lowest panel of its column
                axis.set_xlabel("PPO iteration" if key.startswith(_OF_PPO) else "step")
        names = [name for name in dict.fromkeys((*runs, "SFT")) if name in lines]
        handles = [lines[name] for name in names]
        figure.legend(handles, names, loc="outside upper center", ncols=len(names), fontsize=11)
    return figure


class LiveCurves(Callback):
    """Draws the metrics of a run in a notebook while it trains, as `run_figure` does.

    The figure is redrawn in place from the log of the trainer's first logger, a
    `TensorBoardLogger` or `CSVLogger`, on rank 0. It stays in the notebook after the fit.

    Args:
        keys: Metrics to draw, each as soon as it is logged. `None`: those of `PANELS`.
        name: Name of the run in the legend.
        every_n_batches: Number of training batches between two drawings.
        beside: Folders of earlier runs by name, drawn beside this one.

    Raises:
        ValueError: If `every_n_batches` is below 1; when a fit is set up, if the trainer has no
            logger.
        ModuleNotFoundError: When a fit is set up, if IPython is not installed.
    """

    def __init__(
        self,
        keys: Sequence[str] | None = None,
        name: str = "this run",
        every_n_batches: int = 5,
        beside: Mapping[str, str | Path] | None = None,
    ) -> None:
        if every_n_batches < 1:
            raise ValueError(f"every_n_batches: expected an integer >= 1, got {every_n_batches}")
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
        self._display = None  # a second fit has a figure of its own

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
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
        # Those of a validation come later, and a folder without any is an error of `read_run`.
        keys = [key for key in self.keys or PANELS if key in trainer.logged_metrics]
        if folder is None or not trainer.is_global_zero or not keys:
            return
        from IPython.display import display

        trainer.loggers[0].save()  # writes what the logger has collected
        image = _png_image(run_figure({**self.beside, self.name: folder}, keys))
        if self._display is None:
            self._display = display(image, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._display.update(image)  # type: ignore[no-untyped-call]


def _png_image(figure: Figure) -> Image:
    """A figure as an image for a notebook, whatever backend matplotlib has there."""
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
    values = [point.value for point in curve.points]
    axis.plot(steps, values, color=color, linewidth=0.8, alpha=0.3)
    kept = thin(values)  # all of them in a run of up to 800 values
    average = moving_average(values, len(values) // _AVERAGED_PARTS // 2, kept)
    return axis.plot([steps[i] for i in kept], average, color=color, linewidth=1.8)[0]


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


# --- outcomes


def outcome_figure(rows: Sequence[HeadToHead], baseline: str) -> Figure:
    """Win, tie and lose shares as one stacked bar per policy, with one panel per judge.

    As in Figure 10 of arXiv 2307.04964. The lines above and below a bar are the 95 % intervals of
    win and of lose.

    Args:
        rows: The results of each policy under each judge.
        baseline: Name of the policy that the others were compared with.

    Raises:
        ValueError: If there are no results.
    """
    if not rows:
        raise ValueError("chart: expected verdicts of a reward or a judge to draw, got none")
    by_judge: dict[str, list[HeadToHead]] = {}
    for row in rows:
        by_judge.setdefault(row.by, []).append(row)
    heights = [len(group) for group in by_judge.values()]
    with rc_context(_STYLE):
        figure = Figure(figsize=(6.6, 0.9 + 0.45 * sum(heights) + 0.4 * len(heights)))
        axes = figure.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights)
        for axis, (judge, group) in zip(axes[:, 0], by_judge.items(), strict=True):
            _draw_judge(axis, judge, group)
        axis.set_xlabel(f"share of prompts, against {baseline}; lines: 95 % intervals")
        axis.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        handles = [Patch(facecolor=color) for color in _OUTCOME_COLORS.values()]
        figure.legend(
            handles, list(_OUTCOME_COLORS), loc="outside upper center", ncols=3, fontsize=10
        )
    return figure


def _draw_judge(axis: Axes, judge: str, rows: Sequence[HeadToHead]) -> None:
    for place, row in enumerate(rows):
        if row.outcomes is not None:
            _draw_bar(axis, place, row.outcomes)
        else:
            axis.text(0.01, place, "no valid verdict", va="center", fontsize=9)
    axis.set_yticks(range(len(rows)), [row.policy for row in rows], fontsize=9)
    axis.set_ylim(len(rows) - 0.5, -0.5)  # the first policy on top
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
