"""Replays runs under many settings of the thresholds, each monitor once per setting of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from experiments.detector.families import Trajectory
from lit_callbacks import Level, Monitor, StepMetrics, Watch, default_monitors
from lit_callbacks.signals import (
    RESPONSES_KEY,
    EntropyMonitor,
    KLPerTokenMonitor,
    LengthMonitor,
)
from lit_callbacks.verdict import judge

Settings = Mapping[str, float]
VOTES = 2


class Snapshot(NamedTuple):
    """What `judge` reads of a monitor after a step."""

    vote: str
    signal: str
    level: Level
    steps: int
    stands_in: bool
    advisory: bool
    decisive: bool
    decides: bool
    is_beyond: bool
    side: str

    def sentence(self) -> str:
        """Empty: only levels are compared."""
        return ""


def apply_settings(monitor: Monitor, settings: Settings) -> Monitor:
    """Set the thresholds that may be chosen; trends are only suspicious, and take the time."""
    monitor.horizon = 0
    if isinstance(monitor, KLPerTokenMonitor):
        monitor.decisive_factor *= (monitor.high or 1.0) / settings["kl_per_token"]
        monitor.high = settings["kl_per_token"]
    elif isinstance(monitor, LengthMonitor):
        monitor.high_ratio = settings["length_high"]
        monitor.low_ratio = settings["length_low"]
    elif isinstance(monitor, EntropyMonitor):
        monitor.low_ratio = settings["entropy_low"]
    return monitor


def watch_run(run: Trajectory, settings: Settings) -> tuple[int | None, str]:
    """Replay one run as `Watch` does: place of the flag, and the last sentence."""
    watch = Watch([apply_settings(monitor, settings) for monitor in default_monitors()], VOTES)
    for place, step in enumerate(run.steps):
        if watch.step(step).level is Level.COLLAPSED:
            return place, watch.verdict.sentence
    return None, watch.verdict.sentence


def find_suspicion(run: Trajectory) -> int | None:
    """Place of the first step that is at least suspicious, by the shipped thresholds."""
    watch = Watch(votes=VOTES)
    levels = (watch.step(step).level for step in run.steps)
    return next((i for i, level in enumerate(levels) if level >= Level.SUSPICIOUS), None)


def find_flags(run: Trajectory, grid: Sequence[Settings]) -> list[int | None]:
    """Place of the flag under each of the settings."""
    count = len(default_monitors())
    changed = find_changes(run)
    kept: dict[tuple[object, ...], list[Snapshot]] = {}

    def course(place: int, settings: Settings) -> list[Snapshot]:
        monitor = apply_settings(default_monitors()[place], settings)
        key = (place, monitor.high, monitor.high_ratio, monitor.low_ratio)
        if key not in kept:
            kept[key] = record(run, monitor, changed)
        return kept[key]

    flags = []
    for settings in grid:
        courses = [course(place, settings) for place in range(count)]
        flags.append(
            next(
                (
                    place
                    for place, seen in enumerate(zip(*courses, strict=True))
                    if judge(cast(Sequence[Monitor], seen), VOTES, 1).level is Level.COLLAPSED
                ),
                None,
            )
        )
    return flags


def find_changes(run: Trajectory) -> frozenset[int]:
    """Places at which the prompts have changed, unless the run has collapsed there."""
    watch = Watch([monitor for monitor in default_monitors() if monitor.signal == "data"])
    places = set()
    for place, step in enumerate(run.steps):
        watch.observe(StepMetrics(step, {}))
        before = [monitor.level for monitor in watch.monitors]
        if Level.COLLAPSED in before:
            places.add(place)
            for monitor in watch.monitors:
                monitor.relearn()
    return frozenset(places)


def record(run: Trajectory, monitor: Monitor, changed: frozenset[int]) -> list[Snapshot]:
    """The states of one monitor over a run."""
    seen = []
    for place, step in enumerate(run.steps):
        metrics = StepMetrics(step, {})
        if monitor.can_read(metrics):
            monitor.observe(monitor.read(metrics), int(step.get(RESPONSES_KEY, 0)))
        seen.append(
            Snapshot(
                vote=monitor.vote,
                signal=monitor.signal,
                level=monitor.level,
                steps=monitor.steps,
                stands_in=monitor.stands_in,
                advisory=monitor.advisory,
                decisive=monitor.decisive,
                decides=monitor.decides,
                is_beyond=monitor.is_beyond,
                side=monitor.side,
            )
        )
        if place in changed:
            monitor.relearn()
    return seen
