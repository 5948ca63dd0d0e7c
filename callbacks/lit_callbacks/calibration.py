"""Thresholds of a task: set by hand, or loosened by runs that a person calls healthy.

Only thresholds that depend on the task are loosened: multiples of the baseline, and KL. What a
value means in any run stays: bounds of shares (truncation, repeated bigrams, openings), metrics
that are not finite, the signals of a broken run, and the monitors of a metric of your own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from lit_callbacks.monitors import Monitor, Range
from lit_callbacks.words import format_number

Thresholds = Mapping[str, Mapping[str, float]]
"""Values of thresholds by the key of a monitor and the name of its argument."""
ARGUMENTS = ("high", "high_ratio", "low", "low_ratio")
"""Arguments of a monitor that are thresholds."""
MARGIN = 1.25
"""A calibrated threshold is this many times as far out as what the healthy runs reached."""


class ThresholdChange(NamedTuple):
    """A threshold that was loosened.

    Attributes:
        key: Key of the monitor.
        name: Name of its signal in sentences.
        argument: Its argument, `high`, `high_ratio` or `low_ratio`.
        shipped: The threshold before.
        calibrated: The threshold now.
    """

    key: str
    name: str
    argument: str
    shipped: float
    calibrated: float

    def __str__(self) -> str:
        word = "at least" if self.argument == "low_ratio" else "at most"
        unit = "x its baseline" if self.argument.endswith("ratio") else ""
        shipped = format_number(self.shipped)
        return f"{self.name} {word} {shipped} -> {format_number(self.calibrated)}{unit}"


class HealthyReading(NamedTuple):
    """What a monitor read in a step of a healthy run.

    Attributes:
        value: The reading, in units of the signal.
        baseline: Its baseline; `None` until it is known.
        thresholds: The thresholds that held at that step.
    """

    value: float
    baseline: float | None
    thresholds: Range


def is_calibrated(monitor: Monitor) -> bool:
    """Whether healthy runs may loosen the thresholds of a monitor."""
    is_defect = monitor.decisive or monitor.at_any_distance
    return bool(monitor.signal) and not (is_defect or monitor.advisory or monitor.signal == "data")


def apply_thresholds(monitors: Iterable[Monitor], thresholds: Thresholds) -> None:
    """Set thresholds of monitors.

    Args:
        monitors: The monitors, which are changed.
        thresholds: Values by the key of a monitor and the name of its argument, for example
            `{"rollout/kl_per_token": {"high": 0.3}}`. The monitor must have that threshold.

    Raises:
        ValueError: If no monitor has the key or the threshold, or a value is out of its range.
    """
    known = {
        (monitor.key, argument): monitor
        for monitor in monitors
        for argument in ARGUMENTS
        if getattr(monitor, argument) is not None
    }
    for key, values in thresholds.items():
        for argument, value in values.items():
            if (key, argument) not in known:
                names = ", ".join(f"{{{key}: {name}}}" for key, name in known)
                raise ValueError(f"thresholds: expected some of {names}, got {{{key}: {argument}}}")
            known[key, argument].set_threshold(argument, float(value))


def loosen(
    monitors: Sequence[Monitor], runs: Sequence[Sequence[Sequence[HealthyReading]]]
) -> list[ThresholdChange]:
    """Loosen the thresholds that healthy runs come near to.

    Args:
        monitors: The monitors, which are changed.
        runs: What each of the monitors read in each healthy run.

    Returns:
        The changes.
    """
    changes = []
    for monitor, *readings in zip(monitors, *runs, strict=True):
        if not is_calibrated(monitor):
            continue
        for argument in ("high", "high_ratio", "low_ratio"):
            shipped = getattr(monitor, argument)
            # where both are given, the multiple of the baseline is what depends on the task
            if shipped is None or (argument == "high" and monitor.high_ratio is not None):
                continue
            needed = [_needed(monitor, argument, run) for run in readings]
            farther = max if argument.startswith("high") else min
            loosened = farther([shipped, *(n for n in needed if n is not None)])
            if loosened != shipped:
                loosened = float(f"{loosened:.3g}")
                monitor.set_threshold(argument, loosened)
                changes.append(
                    ThresholdChange(
                        key=monitor.key,
                        name=monitor.name,
                        argument=argument,
                        shipped=shipped,
                        calibrated=loosened,
                    )
                )
    return changes


def _needed(monitor: Monitor, argument: str, run: Sequence[HealthyReading]) -> float | None:
    """The value of a threshold that a healthy run calls for, with its margin.

    Args:
        monitor: The monitor, with its thresholds as they were in the run.
        argument: One of its thresholds.
        run: What it read.

    Returns:
        The value; `None` if the effective threshold is far enough already.
    """
    sign = 1 if argument.startswith("high") else -1
    finite = [reading for reading in run if math.isfinite(reading.value)]
    if argument == "high":
        values = [reading.value for reading in finite]
    else:
        finite = [reading for reading in finite if reading.baseline is not None]
        ratios = (
            monitor.ratio_of(baseline=reading.baseline or 0.0, value=reading.value)
            for reading in finite
        )
        values = [ratio for ratio in ratios if math.isfinite(ratio)]
    reached = reach(values, monitor.patience, sign)
    if reached is None:
        return None
    needed = reached * MARGIN**sign
    if sign < 0:
        needed = max(needed, monitor.decisive_low_ratio or 0.0)
    last = finite[-1]
    if argument == "high":
        bound = needed
    else:
        bound = monitor.ratio_bound(baseline=last.baseline or 0.0, ratio=needed)
    effective = last.thresholds.high if sign > 0 else last.thresholds.low
    return needed if sign * (bound - effective) > 0 else None


def reach(values: Sequence[float], patience: int, sign: int) -> float | None:
    """The farthest value beyond which a monitor would be collapsed at any threshold nearer by.

    Args:
        values: Readings in order.
        patience: Number of readings that make a level, among the latest `2 * patience - 1`.
        sign: 1 for the largest value, -1 for the smallest.

    Returns:
        The value; `None` for fewer than `patience` readings.

    Examples:
        >>> reach([1.0, 5.0, 2.0, 4.0, 1.0], patience=2, sign=1)
        4.0
    """
    window = 2 * patience - 1
    ends = range(patience, len(values) + 1)
    latest = [sorted(sign * v for v in values[max(0, end - window) : end]) for end in ends]
    return max(
        (sign * ordered[-patience] for ordered in latest), key=lambda v: sign * v, default=None
    )


def thresholds_of(changes: Iterable[ThresholdChange]) -> dict[str, dict[str, float]]:
    """Changed thresholds, as the argument `thresholds` of a `Watch` or a detector takes them."""
    thresholds: dict[str, dict[str, float]] = {}
    for change in changes:
        thresholds.setdefault(change.key, {})[change.argument] = change.calibrated
    return thresholds


def describe_changes(changes: Sequence[ThresholdChange], n_runs: int) -> list[str]:
    """Say what healthy runs changed, and how to write it into a configuration.

    Args:
        changes: The changed thresholds.
        n_runs: Number of healthy runs.

    Returns:
        One line, or two if anything changed.
    """
    head = f"calibrated by {n_runs} healthy run{'s' if n_runs > 1 else ''}"
    if not changes:
        return [f"{head}: the thresholds stay as they are"]
    return [
        f"{head}: {', '.join(map(str, changes))}",
        f"in a configuration: thresholds: {json.dumps(thresholds_of(changes))}",
    ]
