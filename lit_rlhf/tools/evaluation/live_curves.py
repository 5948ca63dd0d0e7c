"""A callback that draws the metrics of a run in a notebook while it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lit_callbacks.charts import FIGURE_KEYS, run_figure
from lit_rlhf.checks import check_count

if TYPE_CHECKING:
    from IPython.display import DisplayHandle, Image
    from matplotlib.figure import Figure

_NOTEBOOK_DPI = 80  # two figures of six panels and their notebook stay below 150 kB
_COLOR_LEVELS = 16  # for each channel; looks the same and halves the file


class LiveCurves(Callback):
    """Draws the metrics of a run in a notebook while it trains, as `run_figure` does.

    The figure is redrawn in place from the log of the trainer's first logger, a
    `TensorBoardLogger` or `CSVLogger`, on rank 0. It stays in the notebook after the fit.

    Args:
        keys: Metrics to draw, each as soon as it is logged. `None`: the usual ones of PPO,
            `lit_callbacks.charts.FIGURE_KEYS`.
        name: Name of the run in the legend.
        every_n_batches: Number of training batches between two drawings, at least 1.
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
        """Check that there is a log to read and a notebook to draw in.

        Args:
            trainer: Trainer of the run, with a logger.
            pl_module: Not used.
            stage: Not used.
        """
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
        keys = [key for key in self.keys or FIGURE_KEYS if key in trainer.logged_metrics]
        if folder is None or not trainer.is_global_zero or not keys:
            return
        from IPython.display import display

        trainer.loggers[0].save()  # writes what the logger has collected
        image = _render_png(run_figure({self.name: folder, **self.beside}, keys))
        if self._display is None:
            self._display = display(image, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._display.update(image)  # type: ignore[no-untyped-call]


def _render_png(figure: Figure) -> Image:
    """Render a figure for a notebook, whatever backend matplotlib has there."""
    import numpy as np
    from IPython.display import Image
    from matplotlib.image import imread, imsave

    image = BytesIO()
    figure.savefig(image, format="png", dpi=_NOTEBOOK_DPI)
    image.seek(0)
    top = _COLOR_LEVELS - 1
    small = BytesIO()
    imsave(small, np.round(imread(image) * top) / top, format="png")
    return Image(data=small.getvalue())  # type: ignore[no-untyped-call]
