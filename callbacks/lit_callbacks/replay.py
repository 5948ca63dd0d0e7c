"""What a detector would have said of a run that is over: the way to choose thresholds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lit_callbacks.monitors import Monitor, Record
from lit_callbacks.report.runs import read_run
from lit_callbacks.signals import default_monitors
from lit_callbacks.verdict import Verdict, verdict


class LoggedRecord(NamedTuple):
    """What a run logged at one step.

    Attributes:
        step: place on the x axis.
        scalars: metrics by key.
    """

    step: int
    scalars: dict[str, float]


def logged_records(folder: str) -> list[LoggedRecord]:
    """Read what a run logged, step by step.

    Args:
        folder: folder with TensorBoard event files, or one with a single such folder below it.

    Raises:
        ModuleNotFoundError: without tensorboard.
        ValueError: if there is no run in the folder, or several.
    """
    by_step: dict[int, dict[str, float]] = {}
    for key, curve in read_run("run", folder).curves.items():
        for reading in curve.readings:
            by_step.setdefault(reading.step, {})[key] = reading.value
    return [LoggedRecord(step, by_step[step]) for step in sorted(by_step)]


def judged(
    records: Sequence[LoggedRecord], monitors: Sequence[Monitor] | None = None, votes: int = 2
) -> list[tuple[int, Verdict]]:
    """Judge records as `CollapseDetector` judges them while a run goes on.

    Args:
        records: in order of steps; those without every watched metric are passed over.
        monitors: what to watch, without any reading yet; by default one monitor per signal. A
            monitor of a tensor needs the metrics that a detector logged about it.
        votes: different signals that must be beyond their lines for a collapse.

    Returns:
        The step and the verdict of every record.

    Raises:
        ValueError: if no record has what is watched.
    """
    monitors = default_monitors() if monitors is None else monitors
    wanted = {m.logged_key for m in monitors if m.keys and not m.optional}
    there = {key for record in records for key in record.scalars}
    if wanted - there:
        raise ValueError(
            f"monitors: expected {', '.join(sorted(wanted - there))} among the logged metrics, got "
            f"{', '.join(sorted(there)) or 'none'}"
        )
    verdicts: list[tuple[int, Verdict]] = []
    for step, scalars in records:
        if not wanted <= scalars.keys():
            continue
        broken = tuple(key for key, value in scalars.items() if not math.isfinite(value))
        for monitor in monitors:
            if not monitor.keys:
                monitor.observe(monitor.read(Record(scalars, {}, broken)))
            elif monitor.logged_key in scalars:
                monitor.observe(scalars[monitor.logged_key])
        verdicts.append((step, verdict(monitors, votes, len(verdicts) + 1)))
    return verdicts


def replay(
    folder: str, monitors: Sequence[Monitor] | None = None, votes: int = 2
) -> list[tuple[int, Verdict]]:
    """What a detector would have said of the run in `folder`.

    Arguments, result and errors are those of `logged_records` and `judged`.
    """
    return judged(logged_records(folder), monitors, votes)
