from __future__ import annotations

import json
import math

import pytest

from lit_callbacks.levels import Level
from lit_callbacks.monitors import HISTORY, Monitor, Record
from tests.callbacks.watching import NAN, C, H, S, levels, monitor


def test_clearing_keeps_the_baseline_only() -> None:
    watcher = monitor(high=20.0, high_ratio=1.5, warmup=1, patience=2, horizon=100)
    levels(watcher, [99.0] + [10.0] * 4 + [21.0, 22.0])
    assert (watcher.level, watcher.side) == (C, "high")
    watcher.clear()
    assert (watcher.level, watcher.side, watcher.crossing) == (H, "", None)
    assert (watcher.history, watcher.baseline, watcher.beyond) == ([], 10.0, False)
    assert levels(watcher, [21.0, 21.0]) == [H, C]  # no second warm-up, patience anew


def test_clearing_in_the_middle_of_the_baseline_goes_on_with_it() -> None:
    watcher = monitor(high_ratio=2.0)
    levels(watcher, [10.0, 10.0])
    watcher.clear()
    levels(watcher, [12.0, 12.0])
    assert watcher.baseline == 11.0


def test_a_monitor_remembers_the_latest_readings() -> None:
    watcher = monitor(high=1e9)
    levels(watcher, [float(i) for i in range(HISTORY + 5)])
    assert watcher.history == [float(i) for i in range(5, HISTORY + 5)]


SERIES = [
    *(500.0, 500.0),  # warm-up
    *(10.0, 11.0, NAN, 9.0, 10.0),  # baseline
    *(13.0, 16.0, 16.5, 17.0, 12.0),  # past the middle, back
    *(21.0, 30.0, 31.0, NAN, 32.0),  # past the line
    *(10.0, 10.5, 11.0, 11.5, 12.0, 12.5, 13.0),  # a trend
]


def stateful() -> Monitor:
    return Monitor(
        "x",
        high=20.0,
        high_ratio=1.5,
        deviations=1.0,
        baseline_records=4,
        warmup=2,
        smoothing=2,
        patience=2,
        horizon=40,
        trend_records=6,
    )


def watched(watcher: Monitor, values: list[float]) -> list[object]:
    seen: list[object] = []
    for value in values:
        watcher.observe(value)
        seen.append((watcher.level, watcher.side, watcher.crossing, watcher.sentence()))
    return seen


@pytest.mark.parametrize("split", range(len(SERIES) + 1))
def test_a_resumed_monitor_sees_what_one_that_never_stopped_sees(split: int) -> None:
    whole = watched(stateful(), SERIES)
    assert {seen[0] for seen in whole} == {H, S, C}  # type: ignore[index]
    before, after = stateful(), stateful()
    first = watched(before, SERIES[:split])
    state = json.loads(json.dumps(before.state_dict()))
    before.observe(1e9)  # must not reach into the state
    after.load_state_dict(state)
    assert json.dumps(after.state_dict()) == json.dumps(state)
    assert first + watched(after, SERIES[split:]) == whole
    assert type(after.level) is Level


def test_a_state_is_a_copy() -> None:
    watcher = monitor(high=20.0)
    levels(watcher, [10.0, 10.0])
    state = watcher.state_dict()
    before = json.dumps(state)
    levels(watcher, [30.0, 30.0, 30.0])
    assert json.dumps(state) == before
    watcher.load_state_dict(state)
    levels(watcher, [30.0, 30.0, 30.0])
    assert json.dumps(state) == before


# --- names and readings


def test_a_monitor_is_named_by_the_end_of_its_key() -> None:
    plain = Monitor("ppo/value_clip_fraction", high=0.5)
    assert (plain.name, plain.vote) == ("value clip fraction", "ppo/value_clip_fraction")
    assert plain.keys == ("ppo/value_clip_fraction",)
    assert Monitor("x/y", "clipping", high=0.5).name == "clipping"


def test_a_monitor_reads_a_metric_or_the_mean_of_a_tensor() -> None:
    record = Record({"x": 3.0}, {"y": [1.0, 2.0, 6.0], "empty": []})
    assert Monitor("x", high=1.0).read(record) == 3.0
    assert Monitor("y", high=1.0).read(record) == 3.0
    assert math.isnan(Monitor("empty", high=1.0).read(record))
