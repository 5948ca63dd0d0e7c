"""A table of the phases of a fit with their time and memory, and hints that make it faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_callbacks.output import (
    escape_markdown,
    format_duration,
    format_number,
    logger_step,
    stderr_console,
    write_text,
)
from lit_callbacks.step_reader import StepReader

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

VALIDATION_PHASE, OTHER_PHASE = "validation", "other"  # phases that the callback measures itself
COLUMNS = ("phase", "total", "share", "mean, s", "slowest, s", "peak, GiB")


@dataclass
class Phase:
    """Time and memory of one phase.

    Attributes:
        seconds: Time of all steps together.
        slowest: Seconds of the slowest step.
        steps: Number of steps that had this phase; 0 if not known.
        peak: Peak memory of any step in GiB; `None` if it is not logged.
    """

    seconds: float = 0.0
    slowest: float = 0.0
    steps: int = 0
    peak: float | None = None

    def add(self, seconds: float) -> None:
        """Add a step."""
        self.seconds += seconds
        self.slowest = max(self.slowest, seconds)
        self.steps += 1


@dataclass
class PhaseReport:
    """Time and memory of a fit, as far as this process has run it.

    Attributes:
        seconds: Time from the start of training to its end.
        batches: Number of training batches.
        phases: Phases by name, in the order in which they were first logged. The last ones are the
            validation within fit, if there was one, and `other`, the time outside of all phases.
        rates: Logged throughput by name, averaged over the time of the steps.
    """

    seconds: float = 0.0
    batches: int = 0
    phases: dict[str, Phase] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)

    def share(self, phase: str) -> float:
        """Share of a phase in the time of the fit; 0 if there is no such phase."""
        if phase not in self.phases or self.seconds <= 0:
            return 0.0
        return self.phases[phase].seconds / self.seconds

    @property
    def peak(self) -> float | None:
        """Peak memory of any phase in GiB; `None` if none is logged."""
        return max((p.peak for p in self.phases.values() if p.peak is not None), default=None)

    def rows(self) -> list[tuple[str, ...]]:
        """Cells of the table by row; the columns are `COLUMNS`."""
        return [
            (
                name,
                format_duration(phase.seconds),
                f"{self.share(name):.0%}",
                format_number(phase.seconds / phase.steps) if phase.steps else "",
                format_number(phase.slowest) if phase.steps else "",
                "" if phase.peak is None else format_number(phase.peak),
            )
            for name, phase in self.phases.items()
        ]

    def headline(self) -> str:
        """Time, batches and throughput on one line."""
        rates = [
            f"{name.replace('_', ' ')} {format_number(rate)}" for name, rate in self.rates.items()
        ]
        batches = f"{self.batches} batch{'es' * (self.batches != 1)}"
        return ", ".join([f"{format_duration(self.seconds)} for {batches}", *rates])


PhaseHint = Callable[[PhaseReport, Trainer, LightningModule], str | None]


class PhaseSummary(Callback):
    """Prints the time of each phase at the end of fit, and hints that would make the fit faster.

    It reads the metrics that the module logs at each training batch: the seconds of a phase under
    the prefix `time`, its peak memory in GiB under `memory`, and any rate under `throughput`, each
    followed by a name. It measures the validation within fit itself, and the remaining time: data
    loading, logging, checkpoints, callbacks.

    The table goes to standard error and to every logger as the text `phases`, on rank 0. A resumed
    fit is measured from its resumption.

    Args:
        time: Prefix of the keys of seconds, for example of `time/rollout`.
        memory: Prefix of the keys of memory.
        throughput: Prefix of the keys of rates.
        total: Key of a step's time in all its phases, which is not a phase itself.
        hints: Functions of the report, the trainer and the module, called at the end of fit. Each
            returns a sentence that says what would make the fit faster, or `None`.

    Raises:
        ModuleNotFoundError: When a fit is set up, if rich is not installed.
    """

    def __init__(
        self,
        time: str = "time/",
        memory: str = "memory/",
        throughput: str = "throughput/",
        total: str = "time/iteration",
        hints: list[PhaseHint] | None = None,
    ) -> None:
        self.time, self.memory, self.throughput, self.total = time, memory, throughput, total
        self.hints = list(hints or [])
        self.report = PhaseReport()
        self._reader = StepReader()
        self._rates: dict[str, tuple[float, float]] = {}  # sum of rate x weight, sum of weights
        self._started: float | None = None
        self._validation = Phase()
        self._validation_started: float | None = None
        self._console: Console | None = None  # None if nothing is shown

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Open the console on rank 0."""
        if stage == "fit" and trainer.is_global_zero:
            self._console = stderr_console("PhaseSummary")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self.report, self._validation, self._rates = PhaseReport(), Phase(), {}
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

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Read the metrics that the batch has logged."""
        self.report.batches += 1
        if trainer.is_global_zero:
            self._add_metrics(self._reader.read_new_scalars(trainer))

    def _add_metrics(self, scalars: Mapping[str, float]) -> None:
        # Weighted by the steps' times, the mean of a rate is the total work over the total time.
        weight = scalars.get(self.total, 1.0)
        for key, value in scalars.items():
            if key.startswith(self.time) and key != self.total:
                self._phase(key.removeprefix(self.time)).add(value)
            elif key.startswith(self.memory):
                phase = self._phase(key.removeprefix(self.memory))
                phase.peak = max(phase.peak or 0.0, value)
            elif key.startswith(self.throughput):
                name = key.removeprefix(self.throughput)
                done, weights = self._rates.get(name, (0.0, 0.0))
                self._rates[name] = (done + value * weight, weights + weight)

    def _phase(self, name: str) -> Phase:
        return self.report.phases.setdefault(name, Phase())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock and sum up."""
        if self._started is None:
            return
        report = self.report
        report.seconds, self._started = monotonic() - self._started, None
        report.rates = {k: done / weights for k, (done, weights) in self._rates.items() if weights}
        if self._validation.steps:
            report.phases[VALIDATION_PHASE] = self._validation
        known = sum(phase.seconds for phase in report.phases.values())
        report.phases[OTHER_PHASE] = Phase(max(0.0, report.seconds - known))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the table and the hints, below everything else that is printed at the end of fit."""
        if self._console is None or not self.report.batches:
            return
        hints = (hint(self.report, trainer, pl_module) for hint in self.hints)
        sentences = [sentence for sentence in hints if sentence]
        headline = f"fit took {self.report.headline()}"
        self._console.print(headline, markup=False, highlight=False)
        self._console.print(phase_table(self.report))
        for sentence in sentences:
            self._console.print(f"- {sentence}", markup=False, highlight=False)
        write_text(trainer, "phases", phase_markdown(self.report, sentences), logger_step(trainer))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Drop the console: it holds the current standard error, which may be replaced."""
        self._console = self._started = None


def phase_table(report: PhaseReport) -> Table:
    """The report as a table for the terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for name, *cells in report.rows():
        table.add_row(Text(name), *cells)
    return table


def phase_markdown(report: PhaseReport, sentences: list[str]) -> str:
    """The report and its hints as Markdown."""
    lines = [f"Fit took {escape_markdown(report.headline())}", ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
    lines += [f"| {' | '.join(map(escape_markdown, row))} |" for row in report.rows()]
    return "\n".join([*lines, "", *(f"- {escape_markdown(sentence)}" for sentence in sentences)])
