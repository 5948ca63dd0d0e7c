"""Where the time of a fit went: its phases in a table, and what would make it faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_callbacks.loggers import markdown_text, write_text, x_axis
from lit_callbacks.records import RecordReader
from lit_callbacks.terminal import stderr_console
from lit_callbacks.text import duration_text, number_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

VALIDATION, OTHER = "validation", "other"  # the rows that the callback measures itself
COLUMNS = ("phase", "total", "share", "mean, s", "slowest, s", "peak, GiB")


@dataclass
class Phase:
    """What one phase has taken.

    Attributes:
        seconds: in all steps together.
        slowest: seconds in its slowest step.
        steps: how many steps it took part in; 0 where that is not known.
        peak: most memory in any step, GiB; None where it is not logged.
    """

    seconds: float = 0.0
    slowest: float = 0.0
    steps: int = 0
    peak: float | None = None

    def add(self, seconds: float) -> None:
        """Take in a step."""
        self.seconds += seconds
        self.slowest = max(self.slowest, seconds)
        self.steps += 1


@dataclass
class PhaseReport:
    """What a fit has taken, as far as this process has run it.

    Attributes:
        seconds: from the start of training to its end.
        batches: training batches.
        phases: by name, in the order in which they were first logged; last the validation within
            fit, if there was one, and `other`: all that lies outside the phases and the validation.
        rates: what was logged of throughput by name, in the mean over the time of the steps.
    """

    seconds: float = 0.0
    batches: int = 0
    phases: dict[str, Phase] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)

    def share(self, phase: str) -> float:
        """Share of a phase in the time of the fit; 0 where there is no such phase."""
        if phase not in self.phases or self.seconds <= 0:
            return 0.0
        return self.phases[phase].seconds / self.seconds

    @property
    def peak(self) -> float | None:
        """The most memory of any phase, GiB; None where none is logged."""
        return max((p.peak for p in self.phases.values() if p.peak is not None), default=None)

    def rows(self) -> list[tuple[str, ...]]:
        """The table's cells, see `COLUMNS`."""
        return [
            (
                name,
                duration_text(phase.seconds),
                f"{self.share(name):.0%}",
                number_text(phase.seconds / phase.steps) if phase.steps else "",
                number_text(phase.slowest) if phase.steps else "",
                "" if phase.peak is None else number_text(phase.peak),
            )
            for name, phase in self.phases.items()
        ]

    def headline(self) -> str:
        """Time, batches and throughput on one line."""
        rates = [
            f"{name.replace('_', ' ')} {number_text(rate)}" for name, rate in self.rates.items()
        ]
        batches = f"{self.batches} batch{'es' * (self.batches != 1)}"
        return ", ".join([f"{duration_text(self.seconds)} for {batches}", *rates])


Hint = Callable[[PhaseReport, Trainer, LightningModule], str | None]


class PhaseSummary(Callback):
    """Prints at the end of fit which phase took how long, and what would make the fit faster.

    It reads what the module logs at each training batch: seconds of a phase under `time`, its peak
    memory in GiB under `memory`, any rate under `throughput`, each followed by a name. Validation
    within fit it measures itself, and so what is left: data, logging, checkpoints, callbacks.

    The table goes to standard error and to the text `phases` of TensorBoard loggers, in the process
    of rank 0. A fit that goes on from a checkpoint is counted from there.

    Args:
        time: prefix of the keys of seconds, for example ``time/rollout``.
        memory: prefix of the keys of memory.
        throughput: prefix of the keys of rates.
        total: key of a step's time in all its phases, which is no phase itself.
        hints: functions that are given the report, the trainer and the module at the end of fit,
            and return a sentence on what would make it faster, or None.

    Raises:
        ModuleNotFoundError: when a fit is set up, without rich.
    """

    def __init__(
        self,
        time: str = "time/",
        memory: str = "memory/",
        throughput: str = "throughput/",
        total: str = "time/iteration",
        hints: list[Hint] | None = None,
    ) -> None:
        self.time, self.memory, self.throughput, self.total = time, memory, throughput, total
        self.hints = list(hints or [])
        self.report = PhaseReport()
        self._reader = RecordReader()
        self._rates: dict[str, tuple[float, float]] = {}  # sums of rate x weight, and of weights
        self._started: float | None = None
        self._validation = Phase()
        self._validation_started: float | None = None
        self._console: Console | None = None  # None where nothing is shown

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find out whether this process writes."""
        if stage == "fit" and trainer.is_global_zero:
            self._console = stderr_console("PhaseSummary")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self.report, self._validation, self._rates = PhaseReport(), Phase(), {}
        self._reader = RecordReader()
        self._reader.new_scalars(trainer)  # of an earlier fit
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
        """Take in what the batch has logged."""
        self.report.batches += 1
        if trainer.is_global_zero:
            self._read(self._reader.new_scalars(trainer))

    def _read(self, scalars: Mapping[str, float]) -> None:
        weight = scalars.get(self.total, 1.0)  # so that a rate is all that was done over all time
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
        """Stop the clock and add up."""
        if self._started is None:
            return
        report = self.report
        report.seconds, self._started = monotonic() - self._started, None
        report.rates = {k: done / weights for k, (done, weights) in self._rates.items() if weights}
        if self._validation.steps:
            report.phases[VALIDATION] = self._validation
        known = sum(phase.seconds for phase in report.phases.values())
        report.phases[OTHER] = Phase(max(0.0, report.seconds - known))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the table and the hints, below everything else that is shown at the end."""
        if self._console is None or not self.report.batches:
            return
        told = (hint(self.report, trainer, pl_module) for hint in self.hints)
        sentences = [sentence for sentence in told if sentence]
        headline = f"fit took {self.report.headline()}"
        self._console.print(headline, markup=False, highlight=False)
        self._console.print(phase_table(self.report))
        for sentence in sentences:
            self._console.print(f"- {sentence}", markup=False, highlight=False)
        write_text(trainer, "phases", phase_markdown(self.report, sentences), x_axis(trainer))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let go of the console, which holds the stream that standard error is now."""
        self._console = self._started = None


def phase_table(report: PhaseReport) -> Table:
    """A report for the terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for name, *cells in report.rows():
        table.add_row(Text(name), *cells)
    return table


def phase_markdown(report: PhaseReport, sentences: list[str]) -> str:
    """A report and its hints for TensorBoard."""
    lines = [f"Fit took {markdown_text(report.headline())}", ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
    lines += [f"| {' | '.join(map(markdown_text, row))} |" for row in report.rows()]
    return "\n".join([*lines, "", *(f"- {markdown_text(sentence)}" for sentence in sentences)])
