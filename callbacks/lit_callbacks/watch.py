"""Feeds monitors with the metrics of each step and keeps the verdict; for any training loop."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from lit_callbacks.calibration import (
    HealthyReading,
    ThresholdChange,
    Thresholds,
    apply_thresholds,
    is_calibrated,
    loosen,
    thresholds_of,
)
from lit_callbacks.monitors import Level, Monitor, StepMetrics, choose
from lit_callbacks.signals import RESPONSES_KEY, Preset, default_monitors
from lit_callbacks.verdict import DEFAULT_VOTES, Trouble, Verdict, judge, watches_several_signals

_NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four"}


class Watch:
    """Monitors and the verdict on a run, without any framework.

    ```python
    if watch.step(train_one_step()).level is Level.COLLAPSED:
        break
    ```

    When the prompts have changed, the monitors take new baselines, and until these are known a
    verdict that would be healthy is `data changed`.

    A level is left once all steps of a window are below it: of the latest `2 * patience - 1`, with
    the least patience of the monitors that spoke when it was last reached. So a signal at the edge
    of a threshold does not change the level at every step.

    Args:
        monitors: The monitors; by default one per signal, under `lit_rlhf`'s keys.
        votes: Number of different signals that must be beyond their thresholds for a collapse (or
            all, if there are fewer); at least 1. Default: two, and a `Monitor` of a metric of your
            own makes a collapse alone.
        names: Names of the loop's metrics by the monitors' keys, see `lit_callbacks.names`.
        responses: Number of responses of a step; 0 reads it from the metrics, if they have it.
        preset: Task that the default monitors are meant for: `chat`, `short answers` or `checkable
            reward`; see `Preset`.
        thresholds: Thresholds that differ from the monitors' own, by the key of the monitor and the
            name of its argument, such as `{"rollout/kl_per_token": {"high": 0.3}}`; see
            `calibrate`.
    """

    def __init__(
        self,
        monitors: Sequence[Monitor] | None = None,
        votes: int | None = None,
        names: Mapping[str, str] | None = None,
        responses: int = 0,
        preset: str = Preset.CHAT,
        *,
        thresholds: Thresholds | None = None,
    ) -> None:
        if votes is not None and votes < 1:
            raise ValueError(f"votes: expected at least 1, got {votes}")
        if responses < 0:
            raise ValueError(f"responses: expected at least 0, got {responses}")
        self.monitors = default_monitors(preset) if monitors is None else list(monitors)
        if not self.monitors:
            raise ValueError("monitors: expected at least one, got none")
        self.preset = Preset.parse(preset)
        apply_thresholds(self.monitors, thresholds or {})
        self._has_preset = monitors is None
        self.votes = votes
        self.names = dict(names or {})
        self.responses = responses
        self.verdict = Verdict()
        self.notes: list[str] = []
        """Texts about the last step besides the verdict: preset, thresholds and warnings."""
        self.warnings: list[str] = []
        """The texts among `notes` that ask for a change: thresholds that no value can cross."""
        self.single: Verdict | None = None
        """The first verdict that would have been a collapse with `votes=1`, and was none."""
        self.is_news = False
        """Whether the last verdict says what none before it said: another level, or at this level a
        graver kind of trouble."""
        self._gravest: Trouble | None = None  # the gravest kind since the level changed
        self._window = 1  # steps below the level after which it is left
        self._quiet = 0  # steps in a row below the level
        self._has_announced = False  # whether `notes` had the thresholds of these baselines
        self._data_change = ""  # why new baselines are being taken; empty once they are known
        self._finite: set[str] = set()  # keys that have been finite

    def step(
        self, metrics: Mapping[str, float], tensors: Mapping[str, list[float]] | None = None
    ) -> Verdict:
        """Judge a step. Monitors skip a step that lacks their metrics.

        Args:
            metrics: Numbers of the step by key.
            tensors: Numbers of each response by key, such as `scores`.

        Raises:
            ValueError: If no step so far has had a metric of any monitor.
        """
        scalars = self._rename(metrics)
        non_finite = tuple(key for key, value in scalars.items() if not math.isfinite(value))
        read = self.observe(StepMetrics(scalars, tensors or {}, non_finite))
        if not any(m.steps for m in self.monitors if m.keys) and not any(m.keys for m in read):
            watched_keys = dict.fromkeys(key for m in self.monitors for key in m.keys)
            raise ValueError(
                f"metrics: expected one of {', '.join(watched_keys)}, "
                f"got {', '.join(scalars) or 'none'}"
            )
        return self.judge()

    def reads(self, metrics: Mapping[str, float]) -> bool:
        """Whether any monitor reads one of these metrics."""
        step = StepMetrics(self._rename(metrics), {})
        return any(monitor.keys and monitor.can_read(step) for monitor in self.monitors)

    def _rename(self, metrics: Mapping[str, float]) -> dict[str, float]:
        scalars = {key: float(value) for key, value in metrics.items()}
        named = {key: scalars[name] for key, name in self.names.items() if name in scalars}
        return scalars | named

    def observe(self, metrics: StepMetrics) -> list[Monitor]:
        """Feed the monitors, and return those whose metrics are part of the step."""
        # A metric that was never finite may not be computed at all in this run. It counts as broken
        # only if a monitor watches it or it is a loss.
        counted = self._finite | {key for monitor in self.monitors for key in monitor.keys}
        broken = tuple(k for k in metrics.non_finite if k in counted or "loss" in k)
        self._finite |= metrics.scalars.keys() - set(metrics.non_finite)
        metrics = metrics._replace(non_finite=broken)
        count = metrics.scalars.get(RESPONSES_KEY, 0.0)
        # the count is NaN in an iteration that was skipped
        responses = self.responses or (int(count) if math.isfinite(count) else 0)
        read = [monitor for monitor in self.monitors if monitor.can_read(metrics)]
        for monitor in read:
            monitor.observe(monitor.read(metrics), responses)
        return read

    def judge(self) -> Verdict:
        """Combine the monitors' levels after a step."""
        verdict = judge(self.monitors, self.votes, self.verdict.step + 1)
        if verdict.level is Level.SUSPICIOUS and self.single is None:
            alone = judge(self.monitors, 1, verdict.step)
            self.single = alone if alone.level is Level.COLLAPSED else None
        self.notes = []
        self.warnings = []
        if verdict.step == 1 and self._has_preset:
            others = ", ".join(preset for preset in Preset if preset is not self.preset)
            self.notes = [f"preset: {self.preset} (others: {others})"]
        # thresholds that need no baseline are ready at once
        ready = all(m.has_baseline is not False for m in self.monitors if m.steps)
        if verdict.level is Level.DATA_CHANGED:
            self._data_change = verdict.sentence
            self._has_announced = False
            for monitor in self.monitors:
                monitor.relearn()
        elif self._data_change and not ready and verdict.level is Level.HEALTHY:
            sentence = f"{self._data_change}; new baselines are being taken"
            verdict = Verdict(Level.DATA_CHANGED, sentence, verdict.step, Trouble.DATA_CHANGED)
        elif ready and not self._has_announced:
            self._has_announced = True
            self._data_change = ""
            self._announce_thresholds()
        verdict = self._hold(verdict)
        self._update_news(verdict)
        self.verdict = verdict
        return verdict

    def _announce_thresholds(self) -> None:
        """Note the thresholds of all monitors that have read a step, and warn of dead ones."""
        read = [monitor for monitor in self.monitors if monitor.steps]
        ranges = [text for monitor in read if (text := monitor.allowed())]
        if ranges:
            self.notes.append(f"thresholds: {', '.join(ranges)}; {self.describe_votes()}")
        self.warnings = [warning for m in read if (warning := m.dead_threshold())]
        self.notes += self.warnings

    def _hold(self, verdict: Verdict) -> Verdict:
        """Hold the last verdict until its level is left, see the class; return what counts.

        Args:
            verdict: The verdict on this step alone.
        """
        is_below = Level.HEALTHY <= verdict.level < self.verdict.level
        self._quiet = self._quiet + 1 if is_below else 0
        if 0 < self._quiet < self._window:
            return self.verdict._replace(step=verdict.step)
        self._quiet = 0
        speaking = [m.patience for m in self.monitors if m.level is not Level.HEALTHY]
        self._window = 2 * min(speaking, default=1) - 1
        return verdict

    def _update_news(self, verdict: Verdict) -> None:
        """Set `is_news`: whether a verdict says more than the last one."""
        if self.verdict.level is not verdict.level:
            self.is_news = True
            self._gravest = verdict.trouble
            return
        order = list(Trouble)
        troubles = [trouble for trouble in (verdict.trouble, self._gravest) if trouble is not None]
        gravest = min(troubles, key=order.index, default=None)
        self.is_news = gravest is not self._gravest
        self._gravest = gravest

    def describe_votes(self) -> str:
        """How many of the signals that were read make a collapse, in words."""
        voting = [m for m in self.monitors if m.steps and m.signal != "data"]
        voting = [m for m in voting if not m.decisive and not m.advisory]
        own_names = [m.name for m in voting if not m.signal and self.votes is None]
        n_signals = len({m.vote for m in voting if m.signal or self.votes is not None})
        needed = min(choose(self.votes, DEFAULT_VOTES), n_signals)
        if not n_signals and not own_names:
            return "no signal makes a collapse"
        if not n_signals:
            subject = "it" if len(own_names) == 1 else "each of them"
            return f"{subject} makes a collapse alone"
        has_threshold = any(not m.signal for m in voting)
        is_all = has_threshold or not watches_several_signals(self.monitors)
        if n_signals == 1 and not own_names and self.votes != 1 and not is_all:
            return "one signal alone makes no collapse"
        if n_signals == 1 and not own_names:
            return "it makes a collapse alone (votes: 1)"
        together = (
            f"{_NUMBERS.get(needed, needed)} of these {n_signals} signals "
            f"{'makes' if needed == 1 else 'make'} a collapse (votes: {needed})"
        )
        return f"{together}, and {', '.join(own_names)} alone" if own_names else together

    def calibrate(
        self, healthy_runs: Sequence[Sequence[Mapping[str, float]]]
    ) -> list[ThresholdChange]:
        """Loosen thresholds by runs that a person calls healthy, so that none of them is flagged.

        A threshold that depends on the task (a multiple of the baseline, or KL) is moved to 1.25
        times what a healthy run reached in `patience` of `2 * patience - 1` steps, if it is nearer.
        No threshold becomes narrower. Bounds that mean the same in any run stay: the ones of
        shares, of metrics that are not finite, and of the signals of a broken run.

        Args:
            healthy_runs: Metrics by key of each step, for each run.

        Returns:
            The changes; `lit_callbacks.calibration.thresholds_of` makes the argument `thresholds`
            of them.

        Raises:
            ValueError: If there is no run, a run has no or too few steps with a watched metric, a
                run is collapsed by bounds that stay, or this watch has judged a step already.
        """
        if self.verdict.step:
            raise ValueError("calibrate: expected a watch that has judged no step yet")
        if not healthy_runs:
            raise ValueError("healthy_runs: expected at least one run, got none")
        monitors = deepcopy(self.monitors)
        runs = [self._read_healthy(number, run) for number, run in enumerate(healthy_runs, 1)]
        changes = loosen(monitors, runs)
        for number, run in enumerate(healthy_runs, 1):
            watch = self._with_monitors(deepcopy(monitors))
            for step in run:
                if watch.reads(step) and watch.step(step).level is Level.COLLAPSED:
                    raise ValueError(
                        f"healthy run {number}: expected a healthy run, got one that is collapsed "
                        f"at its step {watch.verdict.step} by bounds that calibration does not "
                        f"move: {watch.verdict.sentence}"
                    )
        apply_thresholds(self.monitors, thresholds_of(changes))
        return changes

    def _with_monitors(self, monitors: Sequence[Monitor]) -> Watch:
        """A watch with the same options and other monitors."""
        return Watch(monitors, self.votes, self.names, self.responses)

    def _read_healthy(
        self, number: int, run: Sequence[Mapping[str, float]]
    ) -> list[list[HealthyReading]]:
        """What each monitor reads in a healthy run.

        Args:
            number: Number of the run, for the error.
            run: Metrics by key, step by step.
        """
        watch = self._with_monitors(deepcopy(self.monitors))
        readings: list[list[HealthyReading]] = [[] for _ in watch.monitors]
        for step in run:
            if not watch.reads(step):
                continue
            steps_before = [monitor.steps for monitor in watch.monitors]
            watch.step(step)
            for index, monitor in enumerate(watch.monitors):
                if monitor.steps > steps_before[index] and monitor.history:
                    reading = HealthyReading(
                        value=monitor.reading,
                        baseline=monitor.baseline,
                        thresholds=monitor.thresholds(),
                    )
                    readings[index].append(reading)
        needed = 1 + max(monitor.baseline_steps for monitor in watch.monitors)
        if not any(map(is_calibrated, (m for m in watch.monitors if m.steps))):
            keys = dict.fromkeys(m.key for m in watch.monitors if is_calibrated(m))
            logged = sorted({key for step in run for key in step})
            raise ValueError(
                f"healthy run {number}: expected one of {', '.join(keys)}, "
                f"got {', '.join(logged) or 'no steps'}"
            )
        if watch.verdict.step < needed:
            raise ValueError(
                f"healthy run {number}: expected at least {needed} steps with a watched metric, "
                f"got {watch.verdict.step}"
            )
        return readings

    def clear(self) -> None:
        """Forget the latest readings, but not the baselines, for instance after a roll-back."""
        self._window = 1
        self._quiet = 0
        for monitor in self.monitors:
            monitor.clear()

    def state_dict(self) -> dict[str, Any]:
        """Verdict and monitors as plain values."""
        return {
            **_pack_verdict(self.verdict),
            "announced": self._has_announced,
            "changed": self._data_change,
            "told": None if self._gravest is None else self._gravest.value,
            "window": self._window,
            "quiet": self._quiet,
            "finite": sorted(self._finite),
            "single": None if self.single is None else _pack_verdict(self.single),
            "monitors": [monitor.state_dict() for monitor in self.monitors],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self.verdict = _unpack_verdict(state)
        self._has_announced = state["announced"]
        self._data_change = state["changed"]
        gravest = state.get("told")  # states of older versions have none
        self._gravest = None if gravest is None else Trouble(gravest)
        self._window = state.get("window", 1)
        self._quiet = state.get("quiet", 0)
        self._finite = set(state["finite"])
        single = state.get("single")  # states of older versions have none, or a list
        if isinstance(single, list):
            single = dict(zip(("level", "sentence", "step"), single, strict=True))
        self.single = None if single is None else _unpack_verdict(single)
        for monitor, saved in zip(self.monitors, state["monitors"], strict=True):
            monitor.load_state_dict(saved)


def _pack_verdict(verdict: Verdict) -> dict[str, Any]:
    """A verdict as plain values."""
    return {
        "level": int(verdict.level),
        "sentence": verdict.sentence,
        "step": verdict.step,
        "trouble": None if verdict.trouble is None else verdict.trouble.value,
    }


def _unpack_verdict(state: Mapping[str, Any]) -> Verdict:
    """A verdict from plain values; older versions knew no kinds of trouble."""
    trouble = state.get("trouble")
    return Verdict(
        level=Level(state["level"]),
        sentence=state["sentence"],
        step=state["step"],
        trouble=None if trouble is None else Trouble(trouble),
    )
