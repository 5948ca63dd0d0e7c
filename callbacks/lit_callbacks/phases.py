"""A table of the phases of a fit with their time and memory."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_callbacks.output import log_text, logger_step
from lit_callbacks.step_reader import StepReader
from lit_callbacks.words import align_columns, format_duration, format_number

COLUMNS = ("phase", "total", "share", "mean, s", "slowest, s", "peak, GiB")


@dataclass
class Phase:
    """Time and memory of a phase.

    Attributes:
        seconds: Time of all of its steps.
        slowest: Seconds of its slowest step.
        steps: Number of its steps.
        peak: Peak memory in GiB; `None` if not known.
    """

    seconds: float = 0.0
    slowest: float = 0.0
    steps: int = 0
    peak: float | None = None

    def add(self, seconds: float) -> None:
        """Add a step that took some seconds."""
        self.seconds += seconds
        self.slowest = max(self.slowest, seconds)
        self.steps += 1


class Throughput(NamedTuple):
    """Work of one kind over a fit, and the time that it took.

    Attributes:
        amount: Units of work, for instance tokens.
        seconds: Time in which they were done.
    """

    amount: float
    seconds: float


class PhaseSummary(Callback):
    """Prints the time and memory of each phase at the end of fit.

    It reads the metrics that the module logs at each training batch. The name of a phase or rate
    follows the prefix of its key. The callback itself measures the validation within fit, and the
    remaining time: data loading, logging, checkpoints.

    The table goes to standard error and to every logger as the text `phases`, on rank 0. A resumed
    fit is measured from its resumption.

    Args:
        time: Prefix of the seconds of a phase.
        memory: Prefix of its peak memory, GiB.
        throughput: Prefix of a rate, units per second.
        total: Key of the seconds of a step in all of its phases.
    """

    def __init__(
        self,
        time: str = "time/",
        memory: str = "memory/",
        throughput: str = "throughput/",
        total: str = "time/iteration",
    ) -> None:
        self.time = time
        self.memory = memory
        self.throughput = throughput
        self.total = total
        self.phases: dict[str, Phase] = {}
        """Phases by name, in the order in which they were first logged."""
        self.seconds = 0.0
        self.batches = 0
        self._reader = StepReader()
        self._throughput: dict[str, Throughput] = {}  # by name of the rate
        self._started: float | None = None
        self._validation = Phase()
        self._validation_started: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self.phases = {}
        self._throughput = {}
        self._validation = Phase()
        self.batches = 0
        self._reader = StepReader()
        self._reader.read_new_scalars(trainer)  # skips the metrics of an earlier fit
        self._started = monotonic()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the validation's clock."""
        if self._started is not None:
            self._validation_started = monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the validation."""
        if self._validation_started is not None:
            self._validation.add(monotonic() - self._validation_started)
            self._validation_started = None

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Read the metrics that the batch has logged."""
        self.batches += 1
        if trainer.is_global_zero:
            self._add_metrics(self._reader.read_new_scalars(trainer))

    def _add_metrics(self, scalars: Mapping[str, float]) -> None:
        # the mean rate is the total work over the total time
        seconds = scalars.get(self.total, 1.0)
        for key, value in scalars.items():
            if key.startswith(self.time) and key != self.total:
                self.phases.setdefault(key.removeprefix(self.time), Phase()).add(value)
            elif key.startswith(self.memory):
                phase = self.phases.setdefault(key.removeprefix(self.memory), Phase())
                phase.peak = max(phase.peak or 0.0, value)
            elif key.startswith(self.throughput) and seconds > 0:
                name = key.removeprefix(self.throughput)
                so_far = self._throughput.get(name, Throughput(amount=0.0, seconds=0.0))
                self._throughput[name] = Throughput(
                    amount=so_far.amount + value * seconds, seconds=so_far.seconds + seconds
                )

    @property
    def rates(self) -> dict[str, float]:
        """Throughput by name, averaged over the time of the steps."""
        return {name: work.amount / work.seconds for name, work in self._throughput.items()}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock and sum up."""
        if self._started is None:
            return
        self.seconds = monotonic() - self._started
        self._started = None
        if self._validation.steps:
            self.phases["validation"] = self._validation
        measured_seconds = sum(phase.seconds for phase in self.phases.values())
        self.phases["other"] = Phase(max(0.0, self.seconds - measured_seconds))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the table below everything else that is printed at the end of fit."""
        if not trainer.is_global_zero or not self.batches:
            return
        rates = [f"{k.replace('_', ' ')} {format_number(rate)}" for k, rate in self.rates.items()]
        batches = f"{self.batches} batch{'es' * (self.batches != 1)}"
        headline = ", ".join([f"fit took {format_duration(self.seconds)} for {batches}", *rates])
        table = align_columns([COLUMNS, *self._rows()])
        print(f"{headline}\n{table}", file=sys.stderr)
        log_text(trainer, "phases", f"{headline}\n\n```\n{table}\n```", logger_step(trainer))

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                name,
                format_duration(phase.seconds),
                f"{phase.seconds / self.seconds if self.seconds else 0:.0%}",
                format_number(phase.seconds / phase.steps) if phase.steps else "",
                format_number(phase.slowest) if phase.steps else "",
                "" if phase.peak is None else format_number(phase.peak),
            )
            for name, phase in self.phases.items()
        ]
