"""Helpers of the tests of monitors."""

import math
from typing import Any

from lit_callbacks.monitors import Level, Monitor

H, S, C = Level.HEALTHY, Level.SUSPICIOUS, Level.COLLAPSED
NAN, INF = math.nan, math.inf


def monitor(**options: Any) -> Monitor:
    """A monitor of `x` that judges single readings against a baseline of four, without trends."""
    few: dict[str, Any] = {"baseline_steps": 4, "patience": 1, "horizon": 0, "deviations": 0.0}
    return Monitor("x", **(few | {"suspicion": 0.5} | options))


def levels(watcher: Monitor, values: list[float]) -> list[Level]:
    return [watcher.observe(value) for value in values]
