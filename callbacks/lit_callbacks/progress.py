"""A progress bar for one stage of training as a whole, from its first batch to its last."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, TextIO

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar

from lit_callbacks.words import format_duration, format_number, shorten_keys

MAX_BAR = 22
"""Largest width of the bar in characters: the numbers matter more than the bar."""
MIN_BAR = 8
"""Smallest width of the bar in characters."""


@dataclass
class Progress:
    """Progress of a loop.

    Attributes:
        label: Name of the loop on the line.
        started: Time at which this process began it, in seconds of the monotonic clock.
        first: Number of batches that were done before.
        done: Number of batches that are done.
        total: Number of all batches; `None` if unknown.
    """

    label: str
    started: float
    first: int = 0
    done: int = 0
    total: int | None = None

    def is_complete(self) -> bool:
        """Whether all batches of a known total are done."""
        return self.total is not None and self.done >= self.total

    def is_milestone(self) -> bool:
        """Whether a log file gets a line for this batch, see `StageProgressBar`."""
        if self.done == self.first + 1:
            return True
        if self.total is not None:
            return self.done * 10 // self.total > (self.done - 1) * 10 // self.total
        return self.done > 0 and str(self.done).rstrip("0") in ("1", "2", "5")


class StageProgressBar(ProgressBar):
    """One line for a whole stage: name, batches over all epochs, time, time left, chosen metrics.

    In a terminal the line is redrawn in place. In a log file or a notebook a line is printed at
    the first batch and at every tenth of the stage (at 1, 2, 5, 10, 20, 50... batches if the total
    is unknown). The line goes to standard error, on rank 0 only.

    The total is `max_epochs` times the batches of an epoch, or less if `max_steps` ends the fit
    earlier. Under manual optimization `max_steps` counts optimizer steps, and the total is unknown.

    Args:
        stage: Name of the stage, the first word of the line.
        metrics: Keys of logged metrics, for example `["rollout/kl", "rollout/reward"]`. The line
            shows the latest value of each; during fit `-` stands for one not logged yet.
        refresh_rate: Number of batches between two redraws in a terminal, at least 0; 0 shows
            nothing at all.
    """

    def __init__(
        self, stage: str = "fit", metrics: list[str] | None = None, refresh_rate: int = 1
    ) -> None:
        super().__init__()
        if refresh_rate < 0:
            raise ValueError(f"refresh_rate: expected a number of at least 0, got {refresh_rate}")
        if isinstance(metrics, str):
            raise ValueError(f"metrics: expected a list of keys, got the string {metrics!r}")
        self.stage = stage
        self.metrics = list(metrics or [])
        self.refresh_rate = refresh_rate
        self._enabled = True
        self._on_rank_zero = True
        self._fit: Progress | None = None
        self._evaluation: Progress | None = None
        self._line = ""  # content of the terminal's current line
        self._printed = ""  # last line printed to a log file
        self._guarded: list[TextIO] = []  # streams whose writes clear the line first

    @property
    def is_enabled(self) -> bool:
        """Whether this process shows anything."""
        return self._enabled and self.refresh_rate > 0 and self._on_rank_zero

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note whether this process is rank 0, which writes.

        Args:
            trainer: The Trainer.
            pl_module: Its module.
            stage: `fit`, `validate`, `test` or `predict`.
        """
        super().setup(trainer, pl_module, stage)
        self._on_rank_zero = trainer.is_global_zero

    def enable(self) -> None:
        """Show the line again after `disable`."""
        self._enabled = True

    def disable(self) -> None:
        """Show nothing until `enable`."""
        self._end_line("\r\x1b[K")
        self._enabled = False

    def print(self, *args: object, **kwargs: object) -> None:
        """Print above the line, with the arguments of the built-in `print`."""
        line = self._line
        self._end_line("\r\x1b[K")
        super().print(*args, **kwargs)
        if line:
            self._draw(line)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock; a resumed fit starts at the batches already done."""
        done = trainer.fit_loop.total_batch_idx + 1
        self._fit = Progress(self.stage, started=monotonic(), first=done, done=done)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Count the batch and show it."""
        if self._fit is not None:
            self._fit.done = trainer.fit_loop.total_batch_idx + 1
            total = _total_batches(trainer, pl_module)
            self._fit.total = max(int(total), self._fit.done) if math.isfinite(total) else None
            self._show(self._fit)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Clear the line after the last batch: Lightning then says why the fit ends."""
        if self._fit is not None and self._fit.is_complete():
            self._end_line("\r\x1b[K")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the last state of the line, without a time left."""
        if self._fit is not None:
            self._finish(self._fit)
        self._fit = None

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Move below the line, so that the traceback starts on its own line.

        Args:
            trainer: The Trainer.
            pl_module: Its module.
            exception: The exception that ends the run.
        """
        self._end_line("\n")
        self._fit = self._evaluation = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count validation batches, on the line of the fit if there is one."""
        if trainer.sanity_checking:
            self._start_evaluation("sanity check", trainer.num_sanity_val_batches)
        else:
            self._start_evaluation("validation", trainer.num_val_batches)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count test batches."""
        self._start_evaluation("test", trainer.num_test_batches)

    def _start_evaluation(self, loop: str, batches: float | Sequence[float]) -> None:
        total = sum(batches) if isinstance(batches, Sequence) else batches
        label = f"{self.stage} {loop}" if self._fit is None else loop
        n_batches = int(total) if math.isfinite(total) else None
        self._evaluation = Progress(label, started=monotonic(), total=n_batches)

    def _count_evaluation(self, *_: object) -> None:
        if self._evaluation is not None:
            self._evaluation.done += 1
            self._show(self._evaluation)

    def _end_evaluation(self, *_: object) -> None:
        evaluation, self._evaluation = self._evaluation, None
        if evaluation is not None and self._fit is None:
            if self.trainer.sanity_checking:
                self._end_line("\r\x1b[K")
            else:
                self._finish(evaluation)

    on_validation_batch_end = on_test_batch_end = _count_evaluation  # type: ignore[assignment]
    on_validation_end = on_test_end = _end_evaluation  # type: ignore[assignment]

    def _show(self, progress: Progress) -> None:
        if not self.is_enabled:
            return
        if sys.stderr.isatty():
            if progress.done % self.refresh_rate == 0 or progress.done == progress.total:
                self._draw(self._text(self._fit or progress))
            return
        is_quiet = progress is not self._fit and (self._fit or self.trainer.sanity_checking)
        # `_finish` prints the last line
        if progress.is_milestone() and not progress.is_complete() and not is_quiet:
            self._print_line(self._text(progress))

    def _finish(self, progress: Progress) -> None:
        if not self.is_enabled:
            return
        text = self._text(progress, finished=True)
        if sys.stderr.isatty():
            self._draw(text)
            self._end_line("\n")
        elif text != self._printed:  # the last batch may have been a milestone already printed
            self._print_line(text)

    def _text(self, progress: Progress, finished: bool = False) -> str:
        head = f"{progress.label} {progress.done}"
        fraction = None
        if progress.total is not None:
            fraction = progress.done / max(1, progress.total)
            head += f"/{progress.total} {fraction:.0%}"
        passed = monotonic() - progress.started
        new = progress.done - progress.first
        parts = [f"{format_duration(passed)} elapsed"]
        if progress.total is not None and new and not finished:
            # at the mean speed so far
            parts.append(f"{format_duration(passed / new * (progress.total - progress.done))} left")
        if progress is self._fit and self._evaluation is not None:
            inner = self._evaluation
            total = "" if inner.total is None else f"/{inner.total}"
            parts.append(f"{inner.label} {inner.done}{total}")
        logged = self.trainer.callback_metrics
        for key, name in zip(self.metrics, shorten_keys(self.metrics), strict=True):
            if key in logged or self._fit is not None:
                parts.append(
                    f"{name} {format_number(float(logged[key])) if key in logged else '-'}"
                )
        if not sys.stderr.isatty():
            return f"{head} {', '.join(parts)}"
        columns = shutil.get_terminal_size().columns
        width = min(columns - len(head) - len(", ".join(parts)) - 3, MAX_BAR)
        if fraction is not None and width >= MIN_BAR:
            head += f" [{'#' * int(fraction * (width - 2)):.<{width - 2}}]"
        while len(parts) > 1 and len(f"{head} {', '.join(parts)}") > columns - 1:
            parts.pop()  # a whole part, so that no word or number is cut
        return f"{head} {', '.join(parts)}"

    def _print_line(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        self._printed = text

    def _draw(self, line: str) -> None:
        line = line[: shutil.get_terminal_size().columns - 1]  # a wrapped line cannot be redrawn
        self._release_streams()
        sys.stderr.write(f"\r{line}\x1b[K")
        sys.stderr.flush()
        self._line = line
        self._guarded = [sys.stderr, *([sys.stdout] if sys.stdout.isatty() else [])]
        for stream in self._guarded:
            # An attribute of the stream hides the method of its class. Replacing `sys.stderr` would
            # miss logging handlers that already hold the stream.
            vars(stream)["write"] = partial(self._write_above, stream)

    def _write_above(self, stream: TextIO, text: str) -> int:
        """Clear the line before anything else is written, such as a warning."""
        self._end_line("\r\x1b[K")
        return stream.write(text)

    def _release_streams(self) -> None:
        for stream in self._guarded:
            vars(stream).pop("write", None)
        self._guarded = []

    def _end_line(self, end: str) -> None:
        """Clear the terminal's line, or leave it."""
        self._release_streams()
        if self._line:
            sys.stderr.write(end)
            sys.stderr.flush()
            self._line = ""


def _total_batches(trainer: Trainer, pl_module: LightningModule) -> float:
    """Number of batches of the fit, infinite if unknown."""
    per_epoch = trainer.num_training_batches
    total = math.inf
    if trainer.max_steps >= 0 and not pl_module.automatic_optimization:
        return math.inf  # a batch may make any number of optimizer steps
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        # count from this epoch's start: epochs of dynamic batches differ in length
        n_before_epoch = trainer.fit_loop.total_batch_idx - trainer.fit_loop.batch_idx
        total = n_before_epoch + (trainer.max_epochs - trainer.current_epoch) * per_epoch
    if trainer.max_steps >= 0:
        # an epoch's last step may have fewer batches
        steps = math.ceil(min(per_epoch, 1e12) / trainer.accumulate_grad_batches)
        epochs, steps_of_last_epoch = divmod(trainer.max_steps, max(1, steps))
        batches = epochs * per_epoch if epochs else 0
        total = min(total, batches + steps_of_last_epoch * trainer.accumulate_grad_batches)
    return total
