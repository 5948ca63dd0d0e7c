"""A view of the collapse detector in the terminal while a module trains."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from time import monotonic
from typing import TYPE_CHECKING, TextIO

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_callbacks.detector import CollapseDetector
from lit_callbacks.monitors import HISTORY, Level
from lit_callbacks.output import (
    format_duration,
    format_number,
    shorten_keys,
    sparkline,
    stderr_console,
)

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.live import Live
    from rich.measure import Measurement
    from rich.table import Table

_STYLES = {Level.HEALTHY: "green", Level.SUSPICIOUS: "yellow", Level.COLLAPSED: "bold red"}


class LiveView(Callback):
    """Shows each monitor of the run's `CollapseDetector` with its history, redrawn in place.

    The progress of the fit and the verdict's sentence stand above the monitors. The view is written
    to standard error, on rank 0, from the start of training to its end; nothing is written if
    standard error is not a terminal. The trainer's progress bar is disabled meanwhile, since two
    displays cannot redraw the same lines; a `StageProgressBar` may stay for log files.

    Args:
        width: Number of characters of a history, one for each of the newest values.
        refresh_per_second: Number of redraws per second.
        metrics: Keys of further logged metrics to show, without a baseline or a level. Their
            history has a value for each training batch since this process began.

    Raises:
        ValueError: If an argument is out of range; when a fit is set up, if the trainer has no
            `CollapseDetector` and no `metrics` are given.
        ModuleNotFoundError: When a fit is set up, if rich is not installed.
    """

    def __init__(
        self, width: int = 40, refresh_per_second: float = 4, metrics: list[str] | None = None
    ) -> None:
        if width < 1:
            raise ValueError(f"width: expected at least 1 character, got {width}")
        if refresh_per_second <= 0:
            raise ValueError(
                f"refresh_per_second: expected a number above 0, got {refresh_per_second}"
            )
        if isinstance(metrics, str):
            raise ValueError(f"metrics: expected a list of keys, got the string {metrics!r}")
        self.width = width
        self.refresh_per_second = refresh_per_second
        self.metrics = list(metrics or [])
        self._detectors: list[CollapseDetector] = []
        self._histories: dict[str, list[float]] = {}
        self._progress = ""
        self._started = 0.0
        self._console: Console | None = None  # None if nothing is shown
        self._live: Live | None = None

    # --- Lightning's hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the detectors and disable the trainer's progress bar."""
        if stage != "fit":
            return
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set, but not declared
        self._detectors = [c for c in callbacks if isinstance(c, CollapseDetector)]
        if not self._detectors and not self.metrics:
            raise ValueError(
                "LiveView: expected a CollapseDetector among the trainer's callbacks, or metrics, "
                "got neither"
            )
        self._histories = {key: [] for key in self.metrics}
        console = stderr_console("LiveView")
        # With FORCE_COLOR set, rich treats a file as a terminal.
        is_terminal = console.is_terminal and console.file.isatty() and not console.is_dumb_terminal
        is_shown = trainer.is_global_zero and is_terminal
        self._console = console if is_shown else None
        if is_shown and trainer.progress_bar_callback is not None:
            trainer.progress_bar_callback.disable()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start drawing."""
        if self._console is None:
            return
        from rich.live import Live

        self._started = monotonic()
        self._progress = self._progress_text(trainer, 0)
        self._live = Live(
            get_renderable=self.render,
            console=self._console,
            refresh_per_second=self.refresh_per_second,
            redirect_stdout=sys.stdout.isatty(),  # a file or a pipe keeps its output
        )
        stderr = sys.stderr
        self._live.start(refresh=True)
        # rich replaces sys.stderr, but existing log handlers hold the old stream and would write
        # into the view.
        _move_handlers(stderr, sys.stderr)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Record the batch for the next redraw."""
        logged = trainer.callback_metrics
        for key, history in self._histories.items():
            if key in logged:
                history.append(float(logged[key]))
                del history[:-HISTORY]
        self._progress = self._progress_text(trainer, batch_idx + 1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the last state and leave it on the screen."""
        self._stop()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave the last state above the traceback, and restore the terminal."""
        self._close(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Enable the trainer's progress bar again."""
        self._close(trainer)

    def _stop(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            redirected = sys.stderr
            live.stop()
            _move_handlers(redirected, sys.stderr)

    def _close(self, trainer: Trainer) -> None:
        self._stop()
        if self._console is not None and trainer.progress_bar_callback is not None:
            trainer.progress_bar_callback.enable()
        self._console = None

    # --- drawing

    def render(self) -> RenderableType:
        """The current view.

        rich calls this from its own thread while training changes the state. It only reads, and
        copies each list in one operation.
        """
        from rich.console import Group
        from rich.text import Text

        elapsed = format_duration(monotonic() - self._started)
        parts: list[RenderableType] = [Text(f"{self._progress}, {elapsed} elapsed")]
        for detector in self._detectors:
            level, sentence, _ = detector.verdict
            word = (f"{level.word}: ", _STYLES[level])
            parts.append(Text.assemble(word, sentence))
        return Group(*parts, self._table())

    def _table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("signal", no_wrap=True)
        table.add_column("latest", justify="right", no_wrap=True)
        table.add_column("unit", style="dim", no_wrap=True)
        table.add_column("baseline", justify="right", no_wrap=True)
        table.add_column("history", justify="right")  # the only column that shrinks
        table.add_column("state", no_wrap=True)
        for name, unit, history, baseline, level in self._rows():
            table.add_row(
                Text(name),
                format_number(history[-1]) if history else "-",
                Text(unit),
                "" if level is None else "-" if baseline is None else format_number(baseline),
                _History(history, self.width),
                "" if level is None else Text(level.word, _STYLES[level]),
            )
        return table

    def _rows(self) -> Iterator[tuple[str, str, list[float], float | None, Level | None]]:
        for detector in self._detectors:
            for monitor in detector.monitors:
                history = list(monitor.history)
                yield monitor.name, monitor.unit, history, monitor.baseline, monitor.level
        for key, name in zip(self.metrics, shorten_keys(self.metrics), strict=True):
            yield name, "", list(self._histories[key]), None, None

    def _progress_text(self, trainer: Trainer, done: int) -> str:
        batches = trainer.num_training_batches
        epochs = trainer.max_epochs if trainer.max_epochs is not None else -1
        epoch = f"epoch {trainer.current_epoch + 1}" + (f"/{epochs}" if epochs > 0 else "")
        return f"{epoch}, batch {done}" + (f"/{batches}" if batches != float("inf") else "")


class _History:
    """A sparkline of as many of the newest values as fit."""

    def __init__(self, values: list[float], width: int) -> None:
        self.values = values
        self.width = width

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        return Measurement(1, max(1, min(self.width, len(self.values), options.max_width)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        line = sparkline(self.values, max(1, min(self.width, options.max_width)))
        yield Text(line, justify="right", no_wrap=True)


def _move_handlers(old: TextIO, new: TextIO) -> None:
    """Redirect all log handlers that write to `old` to `new`."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for logger in loggers:
        for handler in logger.handlers if isinstance(logger, logging.Logger) else []:
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.setStream(new)
