"""Judges a finished run from its logs: the way to choose thresholds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lit_callbacks.monitors import Monitor, StepMetrics
from lit_callbacks.runs import read_run
from lit_callbacks.verdict import Verdict
from lit_callbacks.watch import Watch


class LoggedStep(NamedTuple):
    """The metrics that a run logged at one step.

    Attributes:
        step: Place on the x axis.
        scalars: Metrics by key.
    """

    step: int
    scalars: dict[str, float]


class ReplayedStep(NamedTuple):
    """The verdict on one step of a finished run.

    Attributes:
        step: Place on the x axis.
        verdict: The verdict that a detector would have given there.
    """

    step: int
    verdict: Verdict


def read_logged_steps(folder: str) -> list[LoggedStep]:
    """Read the scalars of a run, step by step.

    Args:
        folder: Folder of the run, see `read_run`.

    Raises:
        ModuleNotFoundError: If there are event files and tensorboard is not installed.
        ValueError: If there is no run in the folder, or there are several.
    """
    by_step: dict[int, dict[str, float]] = {}
    for key, curve in read_run("run", folder).curves.items():
        for point in curve.points:
            by_step.setdefault(point.step, {})[key] = point.value
    return [LoggedStep(step, by_step[step]) for step in sorted(by_step)]


def replay_steps(
    steps: Sequence[LoggedStep], monitors: Sequence[Monitor] | None = None, votes: int = 2
) -> list[ReplayedStep]:
    """Judge logged steps as `CollapseDetector` judges them during the run.

    Args:
        steps: The steps in order. Those without any watched metric are skipped.
        monitors: New monitors, which are fed; by default one per signal, of which those whose
            metric was not logged are left out. A monitor of a tensor needs the metrics that a
            detector logged about it.
        votes: Number of different signals that must be beyond their thresholds for a collapse.

    Raises:
        ValueError: If a metric that is not optional is in no step, and `monitors` are given, or if
            none is in any.
    """
    watch = Watch(monitors, votes)
    replayed = []
    for step, scalars in steps:
        non_finite = tuple(key for key, value in scalars.items() if not math.isfinite(value))
        metrics = StepMetrics(scalars, {}, non_finite)
        if any(m.keys and not m.optional and m.can_read(metrics) for m in watch.monitors):
            watch.observe(metrics)
            replayed.append(ReplayedStep(step, watch.judge()))
    unread = {m.key for m in watch.monitors if m.keys and not m.optional and not m.steps}
    if unread and (monitors is not None or not replayed):
        logged = {key for step in steps for key in step.scalars}
        raise ValueError(
            f"monitors: expected {', '.join(sorted(unread))} among the logged metrics, got "
            f"{', '.join(sorted(logged)) or 'none'}"
        )
    return replayed


def replay_run(
    folder: str, monitors: Sequence[Monitor] | None = None, votes: int = 2
) -> list[ReplayedStep]:
    """Judge the run in `folder`, as `read_logged_steps` and `replay_steps` do."""
    return replay_steps(read_logged_steps(folder), monitors, votes)
