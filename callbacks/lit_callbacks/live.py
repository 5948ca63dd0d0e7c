"""A view of the collapse detector in the terminal while a module trains."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_callbacks.detector import CollapseDetector
from lit_callbacks.monitors import Level
from lit_callbacks.words import format_number

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

_STYLES = {
    Level.DATA_CHANGED: "cyan",
    Level.HEALTHY: "green",
    Level.SUSPICIOUS: "yellow",
    Level.COLLAPSED: "bold red",
}


class LiveView(Callback):
    """Shows each monitor of the run's `CollapseDetector` with its history, redrawn in place.

    The progress of the fit and the verdict's sentence stand above the monitors. The view is written
    to standard error, on rank 0; nothing is written if standard error is not a terminal. The
    trainer's progress bar is disabled meanwhile, since two displays cannot redraw the same lines.

    Args:
        width: Number of characters of a history, one for each of the newest values.

    Raises:
        ValueError: If `width` is below 1, or a fit is set up without a `CollapseDetector`.
        ModuleNotFoundError: When a fit is set up, if rich is not installed.
    """

    def __init__(self, width: int = 40) -> None:
        if width < 1:
            raise ValueError(f"width: expected at least 1 character, got {width}")
        self.width = width
        self._detectors: list[CollapseDetector] = []
        self._progress = ""
        self._console: Console | None = None  # None if nothing is shown
        self._live: Live | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the detectors and disable the trainer's progress bar."""
        if stage != "fit":
            return
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set, but not declared
        self._detectors = [c for c in callbacks if isinstance(c, CollapseDetector)]
        if not self._detectors:
            raise ValueError("LiveView: expected a CollapseDetector in trainer.callbacks, got none")
        console = stderr_console("LiveView")
        # With FORCE_COLOR set, rich treats a file as a terminal.
        if trainer.is_global_zero and console.is_terminal and console.file.isatty():
            self._console = console
            if trainer.progress_bar_callback is not None:
                trainer.progress_bar_callback.disable()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start drawing."""
        if self._console is None:
            return
        from rich.live import Live

        self._count(trainer)
        self._live = Live(
            get_renderable=self.render,
            console=self._console,
            redirect_stdout=sys.stdout.isatty(),  # a file or a pipe keeps its output
        )
        stderr = sys.stderr
        self._live.start(refresh=True)
        # rich replaces sys.stderr, but existing log handlers hold the old stream and would write
        # into the view.
        _move_handlers(stderr, sys.stderr)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Count the batch for the next redraw."""
        self._count(trainer)

    def _count(self, trainer: Trainer) -> None:
        done, total = trainer.fit_loop.batch_idx + 1, trainer.num_training_batches
        of_total = "" if math.isinf(total) else f"/{total}"
        self._progress = f"epoch {trainer.current_epoch + 1}, batch {done}{of_total}"

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the last state and leave it on the screen."""
        live, self._live = self._live, None
        if live is not None:
            redirected = sys.stderr
            live.stop()
            _move_handlers(redirected, sys.stderr)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave the last state above the traceback, and restore the terminal."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Enable the trainer's progress bar again."""
        self.on_train_end(trainer, pl_module)
        if self._console is not None and trainer.progress_bar_callback is not None:
            trainer.progress_bar_callback.enable()
        self._console = None

    def render(self) -> RenderableType:
        """The current view.

        rich calls this from its own thread while training changes the state. It only reads, and
        copies each list in one operation.
        """
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        lines: list[RenderableType] = [Text(self._progress)]
        table = Table("signal", "latest", "unit", "baseline", "history", "state", box=None)
        for detector in self._detectors:
            level, sentence, _ = detector.verdict
            lines.append(Text.assemble((f"{level.word}: ", _STYLES[level]), sentence))
            for monitor in detector.monitors:
                history = list(monitor.history)
                baseline = monitor.baseline
                table.add_row(
                    Text(monitor.name),
                    format_number(history[-1]) if history else "-",
                    Text(monitor.unit),
                    "-" if baseline is None else format_number(baseline),
                    Text(sparkline(history, self.width), no_wrap=True),
                    Text(monitor.level.word, _STYLES[monitor.level]),
                )
        return Group(*lines, table)


def sparkline(values: Sequence[float], width: int) -> str:
    """A series in block characters, from the lowest value shown to the highest.

    Only the newest `width` values are shown. One that is not finite leaves a gap.

    Examples:
        >>> sparkline([1, 2, float("nan"), 4], width=10)
        '▁▃ █'
    """
    shown = list(values)[-width:]
    finite = [value for value in shown if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)

    def block(value: float) -> str:
        if not math.isfinite(value):
            return " "
        if low == high:
            return "▄"
        share = (value / 2 - low / 2) / (high / 2 - low / 2)  # halves, as the range may overflow
        return "▁▂▃▄▅▆▇█"[min(7, int(share * 8))]

    return "".join(map(block, shown))


def stderr_console(user: str) -> Console:
    """A `rich` console on standard error, for a callback named `user`."""
    try:
        from rich.console import Console
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{user} draws with rich: pip install rich") from error
    return Console(stderr=True)


def _move_handlers(old: TextIO, new: TextIO) -> None:
    """Redirect all log handlers that write to `old` to `new`."""
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        for handler in getattr(logger, "handlers", []):
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.setStream(new)
