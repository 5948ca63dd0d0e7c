"""The callbacks that watch a run, judge it and act."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from lit_callbacks.actions import Action
from lit_callbacks.monitors import Level, Monitor
from lit_callbacks.output import log_histogram, log_note, metrics_step, say
from lit_callbacks.rollback import HealthyWeights, SavingAction, StopTraining
from lit_callbacks.step_reader import StepReader
from lit_callbacks.trainer_attributes import find_callbacks, log_interval
from lit_callbacks.verdict import Verdict
from lit_callbacks.watch import Watch
from lit_callbacks.words import shorten_sentence

When = Literal["train_batch", "train_epoch", "validation"]

MAX_WORDS = 25
"""Largest number of words of a line in the terminal, and of the first line of a note."""


class CollapseDetector(Callback):
    """Watches the signals of a collapse, combines them into one verdict and acts on it.

    The verdict's level (0, 1, 2) is logged as `monitor/level`, together with the metrics of the
    step that it judges. When the level changes, the trouble becomes graver, or an action did
    something, a line says so in the terminal, with as many reasons as 25 words hold, and the text
    `monitor/verdict` in every logger, with all reasons. At the end of the fit a line names the
    monitors that had too few steps to judge, and another says where one signal alone would have
    been a collapse. Metrics are averaged over ranks, so that all reach the same verdict.

    A second detector of a trainer logs under `monitor/2/` instead of `monitor/`, and so on.

    A metric is read at the steps at which it is logged. Metrics that the module logs in its own
    `on_train_batch_end` or `on_train_epoch_end` are logged after the callbacks have run, and count
    for the next step. Under gradient accumulation every batch is a step.

    Args:
        monitors: The monitors; by default one per signal, under `lit_rlhf`'s keys.
        actions: The actions, from mild to strong; by default none, so that the verdict is only
            reported.
        votes: Number of different signals that must be beyond their thresholds for a collapse (or
            all, if there are fewer); at least 1. Default: two, and a `Monitor` of a metric of your
            own makes a collapse alone.
        when: What makes a step: `train_batch`, `train_epoch` or `validation`. The module must log
            the watched metrics at that time.
        preset: Task that the default monitors are meant for: `chat`, `short answers` or `checkable
            reward`; see `Watch`.
        thresholds: Thresholds that differ from the monitors' own, for example of runs that a person
            calls healthy (`Watch.calibrate`), by the key of the monitor and the name of its
            argument: `{rollout/kl_per_token: {high: 0.3}}`.

    Raises:
        ValueError: If an argument is wrong, an action cannot work with the module, or a key is
            missing at the first step.
    """

    def __init__(
        self,
        monitors: list[Monitor] | None = None,
        actions: list[Action] | None = None,
        votes: int | None = None,
        when: When = "train_batch",
        *,
        preset: str = "chat",
        thresholds: dict[str, dict[str, float]] | None = None,
    ) -> None:
        self.watch = Watch(monitors, votes, preset=preset, thresholds=thresholds)
        if when not in ("train_batch", "train_epoch", "validation"):
            raise ValueError(f"when: expected train_batch, train_epoch or validation, got {when!r}")
        self.monitors = self.watch.monitors
        self.actions = list(actions or [])
        self._unit = {"train_batch": "step", "train_epoch": "epoch"}.get(when, when)
        for action in self.actions:
            action.monitors = self.monitors
            action.unit = self._unit
        self.votes = votes
        self.when = when
        self.stopped_by: Verdict | None = None
        """The verdict at which an action ended this fit; `None` if none did."""
        self._reader = StepReader()
        self._read_keys: set[str] = set()  # keys of the monitors that have read a step
        self._prefix = "monitor"

    @property
    def verdict(self) -> Verdict:
        """The verdict on the last step."""
        return self.watch.verdict

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Choose the keys: each detector of the Trainer has its own.

        Args:
            trainer: The Trainer.
            pl_module: Its module.
            stage: `fit`, `validate`, `test` or `predict`.
        """
        place = find_callbacks(trainer, CollapseDetector).index(self)
        self._prefix = f"monitor/{place + 1}" if place else "monitor"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the actions check the module."""
        self._reader = StepReader()
        self._read_keys = set()
        self.stopped_by = None
        for action in self.actions:
            action.on_train_start(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, *_: Any
    ) -> None:
        """Judge the batch.

        Args:
            trainer: The Trainer.
            pl_module: Its module.
            outputs: What the training step returned.
        """
        if self.when == "train_batch":
            self._run_step(trainer, pl_module, outputs)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Judge the epoch."""
        if self.when == "train_epoch":
            self._run_step(trainer, pl_module, None)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Judge a validation within fit."""
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if self.when == "validation" and fitting:
            self._run_step(trainer, pl_module, None)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Name the monitors that had too few steps to judge, and a collapse that votes left out."""
        if self.stopped_by is not None or self.verdict.level is Level.COLLAPSED:
            return  # the end needs no other explanation
        if (single := self.watch.single) is not None:
            step = single.step
            if self.when == "train_batch" and "step" not in trainer.callback_metrics:
                step -= 1  # Lightning counts batches from 0 where the module logs no `step`
            place = f"{self._unit} {step}"
            head = f"votes: 1 would have called it collapsed at {place}:"
            self._say(trainer, single.sentence, head=head)
            text = f"{head} {single.sentence}"
            log_note(trainer, f"{self._prefix}/note", text, metrics_step(trainer))
        # a run may never log an optional metric
        expected = [m for m in self.monitors if m.steps or not m.optional]
        silent = [monitor.name for monitor in expected if not monitor.has_judged]
        if silent:
            names = "any signal" if len(silent) == len(expected) else ", ".join(silent)
            text = f"{self.verdict.step} steps were too few for a baseline to judge {names}"
            self._say(trainer, text)
            log_note(trainer, f"{self._prefix}/note", text, metrics_step(trainer))

    def _run_step(self, trainer: Trainer, pl_module: LightningModule, outputs: object) -> None:
        """Observe a step, judge it, let the actions respond, and report."""
        monitors = self.observe(trainer, outputs)
        self.watch.judge()
        # All actions see the step before any of them acts: RollBack must save before another
        # action changes what it saves.
        for action in self.actions:
            action.on_step(trainer, pl_module, self.verdict)
        was_stopping = trainer.should_stop
        responses = [self._respond(action, trainer, pl_module) for action in self.actions]
        if trainer.should_stop and not was_stopping:
            self.stopped_by = self.verdict
        self._log_scalars(trainer, pl_module, monitors)
        self._report_notes(trainer)
        self._report_verdict(trainer, [text for text in responses if text])

    def observe(self, trainer: Trainer, outputs: object) -> list[Monitor]:
        """Feed the monitors with a step, on all ranks together.

        Args:
            trainer: The Trainer, whose logged metrics are read.
            outputs: What the training step returned.

        Returns:
            The monitors whose metrics are part of the step.
        """
        keys = {key for monitor in self.monitors for key in monitor.keys}
        metrics = self._reader.read(trainer, outputs, keys)
        monitors = self.watch.observe(metrics)
        self._read_keys |= {key for monitor in monitors for key in monitor.keys}
        required = {key for m in self.monitors if not m.optional for key in m.keys}
        if missing := required - self._read_keys - self._reader.seen:
            advice = ""
            if self.when != "validation" and any(key.startswith("val") for key in missing):
                advice = "; one that is logged in validation is there with when: validation"
            elif self.when == "train_batch":
                advice = "; one that is logged with on_epoch=True is there with when: train_epoch"
            raise ValueError(
                f"CollapseDetector: expected {', '.join(sorted(missing))} among the logged metrics "
                f"or the tensors that the training step returns, got "
                f"{', '.join(sorted(self._reader.seen)) or 'none'}{advice}"
            )
        return monitors

    def _respond(self, action: Action, trainer: Trainer, pl_module: LightningModule) -> str:
        """Let an action respond to the verdict; return what it says it did, empty if nothing."""
        text = action.respond(trainer, pl_module, self.verdict)
        if text is not None and action.clears_monitors:
            self.watch.clear()
        return text or ""

    def _log_scalars(
        self, trainer: Trainer, pl_module: LightningModule, monitors: Sequence[Monitor]
    ) -> None:
        """Log the level, and what monitors say of the step beside it.

        Args:
            trainer: The Trainer.
            pl_module: Its module.
            monitors: The monitors whose metrics are part of the step.
        """
        step = metrics_step(trainer)
        n_batches = trainer.fit_loop.total_batch_idx + 1
        has_histograms = self.when != "train_batch" or n_batches % log_interval(trainer) == 0
        scalars = {f"{self._prefix}/level": float(self.verdict.level)}
        for monitor in monitors:
            stem = f"{self._prefix}/{monitor.key}"
            scalars |= {f"{stem}_{name}": value for name, value in monitor.details().items()}
            if monitor.sample and has_histograms:
                log_histogram(trainer, stem, monitor.sample, step)
        if self.when == "train_batch":
            # with `log_dict`, Lightning logs them as often as the metrics of the batch, and at the
            # same x value
            pl_module.log_dict(scalars)
        else:
            # `log` is not allowed in `on_validation_end`, and epochs have no `step` of their own.
            for logger in trainer.loggers:
                logger.log_metrics(scalars, step=step)

    def _report_notes(self, trainer: Trainer) -> None:
        """Say and log the notes of the watch about the step."""
        for text in self.watch.notes:
            severity = logging.WARNING if text in self.watch.warnings else logging.INFO
            say(trainer, self._prefixed(text), severity)
            log_note(trainer, f"{self._prefix}/note", text, metrics_step(trainer))

    def _report_verdict(self, trainer: Trainer, responses: Sequence[str]) -> None:
        """Say and log the verdict if it is news, and what actions did.

        Args:
            trainer: The Trainer.
            responses: What the actions that did something say of it.
        """
        if not self.watch.is_news and not responses:
            return
        step = metrics_step(trainer)
        level = self.verdict.level
        sentence = self.verdict.sentence
        # the x axis counts batches, but epochs and validations are counted when they are judged
        place = f"{self._unit} {step if self.when == 'train_batch' else self.verdict.step}"
        severity = logging.WARNING if level is Level.COLLAPSED else logging.INFO
        if self.watch.is_news:
            self._say(trainer, sentence, severity, head=f"{level.word} at {place}:")
        for text in responses:
            self._say(trainer, text, severity, head=f"at {place}:")
        # `lit_callbacks.runs.parse_verdict` reads this form back
        head = f"**{level.word}** at {place}"
        short = shorten_sentence(sentence, MAX_WORDS - len(head.split()))
        quote = [] if short == sentence else [f"> {sentence}"]
        note = [head, short, *quote, *(f"- {text}" for text in responses)]
        log_note(trainer, f"{self._prefix}/verdict", "\n\n".join(note), step)

    def _say(
        self, trainer: Trainer, sentence: str, severity: int = logging.INFO, *, head: str = ""
    ) -> None:
        """Say a sentence in a line of about `MAX_WORDS` words.

        Args:
            trainer: The Trainer.
            sentence: The sentence, which is shortened if the line is too long.
            severity: Level of `logging`.
            head: What comes before the sentence and is not shortened, with its colon.
        """
        start = self._prefixed(head).strip()
        short = shorten_sentence(sentence, MAX_WORDS - len(start.split()))
        say(trainer, f"{start} {short}" if start else short, severity)

    def _prefixed(self, line: str) -> str:
        return line if self._prefix == "monitor" else f"{self._prefix}: {line}"

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Show the content of a checkpoint to the actions.

        Args:
            trainer: The Trainer.
            pl_module: Its module.
            checkpoint: Content of the checkpoint by key.
        """
        for action in self.actions:
            action.on_save_checkpoint(checkpoint)

    @property
    def state_key(self) -> str:
        """Key of the state in a checkpoint; it differs between detectors of different metrics."""
        keys = [key for monitor in self.monitors for key in (monitor.keys or (monitor.vote,))]
        return f"{type(self).__qualname__}({self.when}: {', '.join(keys)})"

    def state_dict(self) -> dict[str, Any]:
        """Verdict, monitors and actions as plain values."""
        return {
            **self.watch.state_dict(),
            "actions": [(type(a).__qualname__, a.state_dict()) for a in self.actions],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state. If the actions have changed since, they start anew, with a warning."""
        self.watch.load_state_dict(state_dict)
        saved_names = [name for name, _ in state_dict["actions"]]
        names = [type(action).__qualname__ for action in self.actions]
        if names != saved_names:
            rank_zero_warn(
                "CollapseDetector: the checkpoint has the actions "
                f"{', '.join(saved_names) or 'none'}, the run has {', '.join(names) or 'none'}: "
                "these start anew"
            )
            return
        for action, (_, saved) in zip(self.actions, state_dict["actions"], strict=True):
            action.load_state_dict(saved)


class CollapseEarlyStopping(CollapseDetector):
    """A detector that ends training at a collapse.

    Args:
        monitors: The monitors; by default one per signal, under `lit_rlhf`'s keys.
        votes: Number of different signals that must be beyond their thresholds for a collapse (or
            all, if there are fewer); at least 1. Default: two, and a `Monitor` of a metric of your
            own makes a collapse alone.
        when: What makes a step: `train_batch`, `train_epoch` or `validation`.
        kinds: Kinds of trouble at which training ends, see `Action`. Default: `broken` and
            `exploiting`; a policy that has become monotonous is told and not stopped.
        preset: Task that the default monitors are meant for; see `CollapseDetector`.
        thresholds: Thresholds that differ from the monitors' own; see `CollapseDetector`.
    """

    def __init__(
        self,
        monitors: list[Monitor] | None = None,
        votes: int | None = None,
        when: When = "train_batch",
        kinds: list[str] | None = None,
        *,
        preset: str = "chat",
        thresholds: dict[str, dict[str, float]] | None = None,
    ) -> None:
        actions: list[Action] = [StopTraining(kinds=kinds)]
        super().__init__(
            monitors, actions, votes=votes, when=when, preset=preset, thresholds=thresholds
        )


class Collapse(NamedTuple):
    """The collapse at which a detector ended a fit.

    Attributes:
        verdict: The verdict at which an action ended it.
        healthy_step: Step of the newest healthy checkpoint; `None` without one.
        checkpoint: Path of that checkpoint, which may hold nothing but weights; `None` without one.
    """

    verdict: Verdict
    healthy_step: int | None = None
    checkpoint: Path | None = None


def find_collapse(trainer: Trainer) -> Collapse | None:
    """Find out how a detector ended the Trainer's last fit; `None` if none did."""
    for detector in find_callbacks(trainer, CollapseDetector):
        if detector.stopped_by is None:
            continue
        saving = [action for action in detector.actions if isinstance(action, SavingAction)]
        weights = [newest for action in saving if (newest := action.newest(trainer))]
        if not weights:
            return Collapse(verdict=detector.stopped_by)
        newest_of_all: HealthyWeights = max(weights)
        return Collapse(
            verdict=detector.stopped_by,
            healthy_step=newest_of_all.step,
            checkpoint=newest_of_all.path,
        )
    return None
