"""The callbacks that watch a run, judge it and act."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from lit_callbacks.actions import Action, StopTraining, WarnOfVerdict
from lit_callbacks.levels import Level
from lit_callbacks.loggers import write_histogram, write_text, x_axis
from lit_callbacks.monitors import Monitor
from lit_callbacks.records import RecordReader
from lit_callbacks.signals import default_monitors
from lit_callbacks.verdict import Verdict, verdict

When = Literal["train_batch", "train_epoch", "validation"]


class CollapseDetector(Callback):
    """Watches the signals of a collapse, combines them into one verdict and acts on it.

    After every record the verdict's level (0, 1, 2) is logged as `monitor/level`; when it changes,
    or an action did something, the sentence is written to TensorBoard as `monitor/verdict`.
    Metrics are averaged over ranks, so that every rank comes to the same verdict. Nothing happens
    in sanity checks, and the state is part of checkpoints.

    A metric is read at the records at which it was logged anew; an old value is no reading. What
    the module logs in its own `on_train_batch_end` or `on_train_epoch_end` comes after the
    callbacks, and so counts for the next record. A batch is a record under gradient accumulation
    too.

    Args:
        monitors: what to watch; by default one monitor per signal, under `lit_rlhf`'s keys.
        actions: what to do, from mild to strong; by default a warning of a collapse.
        votes: different signals that must be beyond their lines for a collapse, or all where there
            are fewer.
        when: what makes a record: `train_batch`, `train_epoch` or `validation`. It must be the time
            at which the module logs what is watched.

    Raises:
        ValueError: for an argument out of range; at the first record if a watched key is missing
            that is not optional (the error lists those there are); when training starts, if an
            action cannot work.
    """

    def __init__(
        self,
        monitors: list[Monitor] | None = None,
        actions: list[Action] | None = None,
        votes: int = 2,
        when: When = "train_batch",
    ) -> None:
        if votes < 1:
            raise ValueError(f"votes: expected at least 1, got {votes}")
        if when not in ("train_batch", "train_epoch", "validation"):
            raise ValueError(f"when: expected train_batch, train_epoch or validation, got {when!r}")
        self.monitors = default_monitors() if monitors is None else list(monitors)
        if not self.monitors:
            raise ValueError("monitors: expected at least one")
        self.actions = [WarnOfVerdict()] if actions is None else list(actions)
        self.votes = votes
        self.when = when
        self.verdict = Verdict()
        self._reader = RecordReader()

    # --- when Lightning calls

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the actions against the module."""
        self._reader = RecordReader()
        for action in self.actions:
            action.check(trainer, pl_module)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Judge the batch."""
        if self.when == "train_batch":
            self._record(trainer, pl_module, outputs)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Judge the epoch."""
        if self.when == "train_epoch":
            self._record(trainer, pl_module, None)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Judge the validation, if it is one within a fit."""
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if self.when == "validation" and fitting:
            self._record(trainer, pl_module, None)

    # --- one record

    def _record(self, trainer: Trainer, pl_module: LightningModule, outputs: object) -> None:
        read = self.observe(trainer, outputs)
        before = self.verdict.level
        self.verdict = verdict(self.monitors, self.votes, self.verdict.record + 1)
        for action in self.actions:
            action.on_record(trainer, pl_module, self.verdict)
        done = [self._act(action, trainer, pl_module) for action in self.actions]
        self._report(trainer, before, read, [text for text in done if text])

    def observe(self, trainer: Trainer, outputs: object) -> list[Monitor]:
        """Feed the monitors with their readings of this record.

        Returns:
            Those whose metric is part of the record.

        Raises:
            ValueError: if a key that is not optional was in no record so far.
        """
        wanted = {key for monitor in self.monitors for key in monitor.keys}
        record = self._reader.read(trainer, outputs, wanted)
        needed = {key for monitor in self.monitors if not monitor.optional for key in monitor.keys}
        if missing := needed - self._reader.seen:
            raise ValueError(
                f"CollapseDetector: expected {', '.join(sorted(missing))} among the logged metrics "
                f"or the tensors that the training step returns, got "
                f"{', '.join(sorted(self._reader.seen)) or 'none'}"
            )
        new = record.scalars.keys() | record.tensors.keys()
        read = [monitor for monitor in self.monitors if new.issuperset(monitor.keys)]
        for monitor in read:
            monitor.observe(monitor.read(record))
        return read

    def _act(self, action: Action, trainer: Trainer, pl_module: LightningModule) -> str:
        if not action.due(self.verdict):
            return ""
        text = action.act(trainer, pl_module, self.verdict)
        if action.starts_over:
            for monitor in self.monitors:
                monitor.clear()
        return text

    def _report(
        self, trainer: Trainer, before: Level, read: list[Monitor], done: list[str]
    ) -> None:
        step, (level, sentence, _) = x_axis(trainer), self.verdict
        scalars = {"monitor/level": float(level)}
        for monitor in read:
            stem = f"monitor/{monitor.key}"
            scalars |= {f"{stem}_{name}": value for name, value in monitor.details().items()}
            if monitor.sample:
                write_histogram(trainer, stem, torch.tensor(monitor.sample), step)
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=step)
        if level is not before or done:
            head = f"**{level.word}** at {step}"
            lines = [head, sentence, *(f"- {text}" for text in done)]
            write_text(trainer, "monitor/verdict", "\n\n".join(lines), step)

    # --- state

    @property
    def state_key(self) -> str:
        """Tells detectors of one run apart by what they watch."""
        keys = [key for monitor in self.monitors for key in (monitor.keys or (monitor.vote,))]
        return f"{type(self).__qualname__}({self.when}: {', '.join(keys)})"

    def state_dict(self) -> dict[str, Any]:
        """Verdict, monitors and actions as plain values."""
        return {
            "level": int(self.verdict.level),
            "sentence": self.verdict.sentence,
            "record": self.verdict.record,
            "monitors": [monitor.state_dict() for monitor in self.monitors],
            "actions": [(type(a).__qualname__, a.state_dict()) for a in self.actions],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state. Other actions than it was saved with start anew, with a warning."""
        self.verdict = Verdict(
            Level(state_dict["level"]), state_dict["sentence"], state_dict["record"]
        )
        for monitor, saved in zip(self.monitors, state_dict["monitors"], strict=True):
            monitor.load_state_dict(saved)
        before = [name for name, _ in state_dict["actions"]]
        now = [type(action).__qualname__ for action in self.actions]
        if now != before:
            rank_zero_warn(
                f"CollapseDetector: the checkpoint has the actions {', '.join(before) or 'none'}, "
                f"the run has {', '.join(now) or 'none'}: these start anew"
            )
            return
        for action, (_, saved) in zip(self.actions, state_dict["actions"], strict=True):
            action.load_state_dict(saved)


class CollapseEarlyStopping(CollapseDetector):
    """A detector that ends training at a collapse, with a warning that says why.

    Args:
        monitors: what to watch; by default one monitor per signal, under `lit_rlhf`'s keys.
        votes: different signals that must be beyond their lines for a collapse.
        when: what makes a record: `train_batch`, `train_epoch` or `validation`.
    """

    def __init__(
        self,
        monitors: list[Monitor] | None = None,
        votes: int = 2,
        when: When = "train_batch",
    ) -> None:
        super().__init__(monitors, [WarnOfVerdict(), StopTraining()], votes, when)
