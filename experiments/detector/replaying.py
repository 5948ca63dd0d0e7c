"""Replays runs as `Watch` judges them, under each setting of the thresholds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from experiments.detector.criterion import GRID
from experiments.detector.families import Trajectory
from lit_callbacks import Level, Monitor, Verdict, Watch, default_monitors
from lit_callbacks.signals import KLPerTokenMonitor, LengthMonitor, Preset
from lit_callbacks.verdict import judge

Settings = Mapping[str, float]
Flags = dict[str, int]
"""Place of the first verdict of each kind; `UNNAMED` for one that names none."""
VOTES = 2
UNNAMED = "unnamed"

ALSO = "; also "
"""What a sentence has before each kind of trouble besides the gravest."""


def name_troubles(verdict: Verdict) -> list[str]:
    """The kinds of trouble that a verdict names, the gravest first.

    Args:
        verdict: A verdict that is collapsed, or says that the data changed.

    Returns:
        The kinds; only `UNNAMED` if there is none.
    """
    others = verdict.sentence.rpartition(": ")[2].split(ALSO)[1:]
    return [str(verdict.trouble or UNNAMED), *others]


def apply_settings(monitor: Monitor, settings: Settings) -> Monitor:
    """Set the thresholds that may be chosen; trends are only suspicious, and take the time.

    Args:
        monitor: A monitor, which is changed.
        settings: A setting of `criterion.GRID`.
    """
    monitor.horizon = 0
    # relative to what ships, so that a preset's own thresholds move alike
    if isinstance(monitor, KLPerTokenMonitor):
        factor = settings["kl_per_token"] / GRID[0]["kl_per_token"]
        monitor.decisive_factor /= factor
        monitor.high = (monitor.high or 1.0) * factor
    elif isinstance(monitor, LengthMonitor):
        factor = settings["length_high"] / GRID[0]["length_high"]
        monitor.high_ratio = (monitor.high_ratio or 1.0) * factor
    return monitor


def monitors_of(run: Trajectory) -> list[Monitor]:
    """The default monitors, or the preset's for rewards that can be checked."""
    checkable = run.task == Preset.CHECKABLE_REWARD
    return default_monitors(Preset.CHECKABLE_REWARD if checkable else Preset.CHAT)


def find_flags(run: Trajectory, settings: Settings) -> Flags:
    """Place of the first collapse of each kind, and of the first change of the data.

    Args:
        run: The run.
        settings: A setting of `criterion.GRID`.
    """
    return flags_by([apply_settings(monitor, settings) for monitor in monitors_of(run)], run)


def flags_by(monitors: Sequence[Monitor], run: Trajectory) -> Flags:
    """Place of the first collapse of each kind, and of the first change of the data.

    Args:
        monitors: The monitors, which have read nothing yet.
        run: The run.
    """
    watch = Watch(monitors, VOTES)
    flags: Flags = {}
    for place, step in enumerate(run.steps):
        if not watch.reads(step):
            continue
        verdict = watch.step(step)
        if verdict.level in (Level.COLLAPSED, Level.DATA_CHANGED):
            for trouble in name_troubles(verdict):
                flags.setdefault(trouble, place)
    return flags


class ShippedLevels(NamedTuple):
    """The levels of a run by the thresholds that ship, with trends.

    Attributes:
        suspicious: Place of the first step that is at least suspicious; `None` without one.
        changes: Number of changes of the level.
        changes_at_once: The same if a level were left at the first step below it.
    """

    suspicious: int | None
    changes: int
    changes_at_once: int


def find_levels(run: Trajectory) -> ShippedLevels:
    """The levels of a run by the thresholds that ship."""
    watch = Watch(monitors_of(run), VOTES)
    levels = []
    at_once = []
    for step in run.steps:
        if not watch.reads(step):
            continue
        level = watch.step(step).level
        levels.append(level)
        # a change of the data clears the monitors
        is_changed = level is Level.DATA_CHANGED
        at_once.append(level if is_changed else judge(watch.monitors, VOTES, 1).level)
    return ShippedLevels(
        suspicious=next((i for i, level in enumerate(levels) if level >= Level.SUSPICIOUS), None),
        changes=sum(before is not after for before, after in pairwise(levels)),
        changes_at_once=sum(before is not after for before, after in pairwise(at_once)),
    )


def find_all_flags(run: Trajectory, grid: Sequence[Settings]) -> list[Flags]:
    """The flags of a run under each of the settings."""
    return [find_flags(run, settings) for settings in grid]
