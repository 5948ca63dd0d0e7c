"""A callback for the Trainer of transformers, and so for the trainers of TRL."""

from __future__ import annotations

import logging
from collections.abc import Callable
from numbers import Real
from typing import Any

from lit_callbacks.calibration import Thresholds
from lit_callbacks.monitors import Level
from lit_callbacks.names import find_names
from lit_callbacks.signals import Preset
from lit_callbacks.verdict import GRAVE, Trouble, Verdict
from lit_callbacks.watch import Watch

logger = logging.getLogger(__name__)


class WatchCallback:
    """Judges what a Trainer logs, and stops it at a collapse.

    ```python
    trainer = GRPOTrainer(..., callbacks=[WatchCallback()])
    ```

    Metrics are judged whenever the Trainer logs them (`logging_steps`), so a step of the monitors
    is an interval of the log. The level is kept as `monitor/level` in the Trainer's `log_history`.

    Args:
        watch: Monitors and verdict; by default the ones of `preset` and `thresholds`.
        names: Names of the metrics by the monitors' keys; by default the names of the trainers in
            `lit_callbacks.names` are recognized.
        stop: Level at which training ends, `suspicious` or `collapsed`; `None` only reports.
        kinds: Kinds of trouble at which training ends, by default `broken` and `exploiting`; see
            `Trouble`.
        preset: Task that the thresholds are meant for: `chat`, `short answers` or `checkable
            reward`; see `Preset`. Not beside `watch`.
        thresholds: Thresholds that differ from the preset's, see `Watch`. Not beside `watch`.
    """

    def __init__(
        self,
        watch: Watch | None = None,
        names: dict[str, str] | None = None,
        stop: str | None = "collapsed",
        kinds: list[str] | None = None,
        *,
        preset: str = Preset.CHAT,
        thresholds: Thresholds | None = None,
    ) -> None:
        if watch is not None and (preset != Preset.CHAT or thresholds):
            raise ValueError("watch: expected either a watch, or preset and thresholds, got both")
        self.watch = watch or Watch(preset=preset, thresholds=thresholds)
        self.names = names
        self.stop = None if stop is None else Level.parse("stop", stop)
        self.kinds = GRAVE if kinds is None else Trouble.parse("kinds", kinds)
        self.stopped_by: Verdict | None = None
        """The verdict at which this callback ended training."""

    def __getattr__(self, name: str) -> Callable[..., None]:  # see the class
        if name.startswith("on_"):  # the Trainer's other events
            return lambda *arguments, **options: None
        raise AttributeError(name)

    def on_log(
        self,
        args: object,
        state: Any,  # noqa: ANN401  # transformers' TrainerState
        control: Any,  # noqa: ANN401  # and TrainerControl
        logs: dict[str, Any] | None = None,
        **_: object,
    ) -> object:
        """Judge the metrics, if the log has any that is watched.

        Args:
            args: The Trainer's arguments.
            state: The Trainer's state, a `TrainerState`.
            control: Its `TrainerControl`, which can stop training.
            logs: The logged metrics by name.
            **_: What else the Trainer passes.

        Returns:
            `control`.
        """
        metrics = {key: float(v) for key, v in (logs or {}).items() if isinstance(v, Real)}
        names = find_names(metrics) if self.names is None else self.names
        self.watch.names = names
        if not self.watch.reads(metrics):
            return control  # the metrics of an evaluation, or the summary at the end
        verdict = self.watch.step(metrics)
        if state.log_history:
            state.log_history[-1]["monitor/level"] = int(verdict.level)
        if state.is_world_process_zero:
            for note in self.watch.notes:
                logger.warning(note)
            if self.watch.is_news:
                logger.warning(
                    f"{verdict.level.word} at step {state.global_step}: {verdict.sentence}"
                )
        is_time = self.stop is not None and verdict.level >= self.stop
        if is_time and verdict.is_one_of(self.kinds) and self.stopped_by is None:
            self.stopped_by = verdict
            control.should_training_stop = True
        return control
