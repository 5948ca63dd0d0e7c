"""Levels, thresholds, trends, sentences and the state of a monitor."""

import json
import math
import random
from typing import Any

import pytest

from lit_callbacks.monitors import HISTORY, Level, Monitor, StepMetrics
from lit_callbacks.signals import KLMonitor
from tests.support.monitor_levels import INF, NAN, C, H, S, levels, monitor

ONES = [float(i) for i in range(10)]
RISE, FALL = [2.0 + 0.5 * i for i in range(10)], [2.0 - 0.5 * i for i in range(10)]
LATE: dict[str, Any] = {"patience": 99, "horizon": 50}  # trends show
STEEP = [2.0] * 4 + [2.0 + 4.0 * i for i in range(1, 7)]
RISING = [4.0] * 4 + [20.0, 22.0, 24.0, 26.0, 28.0]
FALLING = [4.0] * 4 + [80.0, 60.0, 50.0, 40.0, 30.0, 28.0]
WANDERING = [4.0] * 4 + [20.0, 28.0, 25.0, 21.0, 28.0]


def test_levels_have_words_and_an_order() -> None:
    assert [level.word for level in (H, S, C)] == ["healthy", "suspicious", "collapsed"]
    assert [str(level) for level in (H, S, C)] == ["healthy", "suspicious", "collapsed"]
    assert H < S < C
    assert [Level.parse("level", level.word) for level in (H, S, C)] == [H, S, C]
    assert Level.DATA_CHANGED.word == "data changed"
    assert Level.DATA_CHANGED < H  # no action answers to it


@pytest.mark.parametrize(
    ("options", "inside", "outside", "side"),
    [
        # the baseline is always 10; `inside` is before the middle, `outside` beyond the threshold
        ({"high": 20.0}, 14.9, 20.1, "high"),
        ({"high_ratio": 3.0}, 19.9, 30.1, "high"),
        ({"low": 4.0}, 7.1, 3.9, "low"),
        ({"low_ratio": 0.5}, 7.6, 4.9, "low"),
        # both must hold: the farther of the two is the threshold
        ({"high": 20.0, "high_ratio": 3.0}, 19.9, 30.1, "high"),
        ({"high": 40.0, "high_ratio": 3.0}, 24.9, 40.1, "high"),
        ({"low": 4.0, "low_ratio": 0.5}, 7.1, 3.9, "low"),
        ({"low": 6.0, "low_ratio": 0.5}, 7.6, 4.9, "low"),
    ],
)
def test_each_kind_of_line_is_crossed_on_its_side(
    options: dict[str, float], inside: float, outside: float, side: str
) -> None:
    watcher = monitor(**options)
    assert levels(watcher, [10.0] * 4 + [inside]) == [H] * 5
    assert watcher.observe(outside) is C
    assert watcher.side == side


def test_a_line_itself_is_not_beyond_it() -> None:
    watcher = monitor(high=20.0, low=2.0)
    assert levels(watcher, [10.0] * 4 + [20.0, 2.0]) == [H] * 4 + [S, S]
    assert levels(watcher, [math.nextafter(20, 21), math.nextafter(2, 1)]) == [C, C]


def test_a_ratio_waits_for_the_baseline_and_a_fixed_line_does_not() -> None:
    assert levels(monitor(high_ratio=2.0), [1.0, 50.0, 1.0]) == [H] * 3
    assert levels(monitor(high=20.0), [1.0, 50.0, 1.0]) == [H, C, H]
    assert levels(monitor(high=20.0, high_ratio=2.0), [1.0, 50.0, 1.0]) == [H] * 3


def test_a_noisy_baseline_gives_room() -> None:
    # median 8; differences 3, -3, 2, -2 with absolute deviations 3, 3, 2, 2 from their median 0:
    # the noise is 2.5 * 1.4826 / sqrt(2), and four times it 10.4838
    noisy = [8.0, 11.0, 8.0, 10.0, 8.0]
    options: dict[str, Any] = {"deviations": 4.0, "baseline_steps": 5}
    watcher = monitor(high_ratio=2.0, low_ratio=0.5, **options)
    assert levels(watcher, noisy) == [H] * 5
    # the baseline is 8: high is moved, low is stopped at a tenth of it
    assert watcher.thresholds() == pytest.approx((0.8, 8 + 10.4836), rel=1e-5)
    # at most to twice the distance
    watcher = monitor(high_ratio=1.5, low_ratio=0.8, **options)
    levels(watcher, noisy)
    assert watcher.thresholds() == pytest.approx((4.8, 16.0))
    # a calm one is held to the ratio
    watcher = monitor(high_ratio=1.5, low_ratio=0.5, deviations=4.0, baseline_steps=5)
    assert levels(watcher, [9.9, 10.0, 10.1, 10.0, 10.0, 15.1]) == [H] * 5 + [C]
    assert watcher.thresholds() == (5.0, 15.0)


@pytest.mark.parametrize("center", [0.0, -10.0])
def test_a_ratio_of_a_baseline_that_is_not_positive_leaves_the_others(center: float) -> None:
    # differences 1, -1, 1, -1: the noise is 1.4826 / sqrt(2)
    values = [center, center + 1, center, center + 1, center]
    spreads = monitor(high_ratio=2.0, low_ratio=0.5, deviations=2.0, baseline_steps=1)
    levels(spreads, values)
    assert spreads.thresholds() == pytest.approx((center - 2.09671, center + 2.09671), rel=1e-5)
    fixed = monitor(high_ratio=2.0, high=30.0, deviations=2.0, baseline_steps=5)
    levels(fixed, values)
    assert fixed.thresholds() == (-INF, 30.0)
    flat = monitor(high_ratio=2.0, low_ratio=0.5, deviations=4.0)
    assert levels(flat, [center] * 4 + [center + 1e-9, center - 1e-9]) == [H] * 6
    assert flat.thresholds() == (-INF, INF)


def test_the_ways_to_two_lines_are_halved_on_their_own() -> None:
    watcher = monitor(low=8.0, high=20.0)
    levels(watcher, [10.0] * 4)
    seen = [(watcher.observe(v), watcher.side) for v in (9.1, 8.9, 14.9, 15.1)]
    assert seen == [(H, ""), (S, "low"), (H, ""), (S, "high")]


def test_threshold_passed_in_every_second_step_is_seen() -> None:
    watcher = monitor(high=20.0, patience=2)
    assert levels(watcher, [10.0] * 4) == [H] * 4
    assert levels(watcher, [21.0, 10.0, 21.0, 10.0, 21.0]) == [H, H, C, H, C]
    assert levels(watcher, [10.0, 10.0, 21.0, 10.0, 10.0, 21.0]) == [H] * 6


def test_state_of_a_version_that_counted_steps_in_a_row_is_taken() -> None:
    watcher = monitor(high=20.0, patience=3)
    levels(watcher, [10.0] * 4 + [21.0, 21.0])
    other = monitor(high=20.0, patience=3)
    other.load_state_dict({**watcher.state_dict(), "beyond": [2, 2]})
    assert other.observe(21.0) is watcher.observe(21.0) is C


def test_a_baseline_beyond_its_line_leaves_the_line_alone() -> None:
    watcher = monitor(low=0.0)
    assert levels(watcher, [-0.5] * 4) == [C] * 4
    assert levels(watcher, [-0.1, 0.1]) == [C, H]


def test_patience_counts_the_steps_of_a_window() -> None:
    watcher = monitor(high=20.0, patience=3)
    assert levels(watcher, [10.0] * 4) == [H] * 4
    # three of the latest five
    assert levels(watcher, [21.0, 21.0, 10.0, 21.0, 21.0, 21.0]) == [H, H, H, C, C, C]
    # back this side of the threshold, but past the middle: doubtful, as three of five were past it
    assert levels(watcher, [16.0, 21.0, 21.0, 21.0]) == [S, C, C, C]


def test_the_first_step_beyond_a_threshold_shows_before_patience_ends() -> None:
    watcher = monitor(high=20.0, patience=2)
    levels(watcher, [10.0] * 4)
    seen = [(watcher.observe(v), watcher.is_beyond) for v in (16.0, 21.0, 21.0, 10.0)]
    assert seen == [(H, False), (S, True), (C, True), (H, False)]


def test_a_warm_up_is_not_looked_at() -> None:
    watcher = monitor(high=20.0, high_ratio=2.0, warmup=3)
    assert levels(watcher, [900.0, NAN, 900.0, 10.0, 10.0, 10.0]) == [H] * 6
    assert watcher.baseline is None
    watcher.observe(10.0)
    assert watcher.baseline == 10.0
    assert levels(watcher, [21.0]) == [C]


def test_a_warm_up_does_not_enter_a_smoothed_reading() -> None:
    watcher = monitor(high=20.0, warmup=2, smoothing=3)
    assert levels(watcher, [900.0, 900.0, 10.0]) == [H, H, H]


def test_a_warm_up_makes_no_trend() -> None:
    options: dict[str, Any] = {"high": 100.0, "horizon": 1000, "trend_steps": 10}
    assert levels(monitor(**options), ONES)[-1] is S
    assert levels(monitor(**options, warmup=2), ONES)[-1] is H
    assert levels(monitor(**options, warmup=2), [*ONES, 10.0, 11.0])[-2:] == [H, S]


def test_smoothing_takes_the_median_of_the_latest() -> None:
    watcher = monitor(high=20.0, smoothing=3)
    assert levels(watcher, [10.0] * 4 + [99.0, 10.0, 99.0, 99.0]) == [H] * 6 + [C, C]
    assert levels(watcher, [10.0, 10.0]) == [C, H]
    assert watcher.history[-4:] == [99.0, 99.0, 10.0, 10.0]  # raw


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_is_beyond_every_line(bad: float) -> None:
    watcher = monitor(high=20.0, patience=2)
    assert levels(watcher, [10.0] * 4 + [bad, bad]) == [H] * 5 + [C]
    assert watcher.side == "not finite"
    assert watcher.sentence() == f"x is {bad}"
    assert watcher.observe(10.0) is H
    assert levels(monitor(low=0.0, patience=3), [bad] * 4) == [H, H, C, C]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_does_not_enter_the_baseline(bad: float) -> None:
    watcher = monitor(high_ratio=2.0, patience=2)
    levels(watcher, [10.0, bad, 10.0, bad, 12.0])
    assert watcher.baseline is None
    watcher.observe(8.0)
    assert (watcher.baseline, watcher.thresholds()[1]) == (10.0, 20.0)


def test_smoothing_hides_no_nan_and_suffers_from_none() -> None:
    watcher = monitor(high=20.0, smoothing=3)
    assert levels(watcher, [10.0, 10.0, 10.0, NAN, 10.0, NAN, 25.0]) == [H, H, H, C, H, C, S]
    # the last reading is the median of 10 and 25: past 15, the middle of 10 and 20
    watcher = monitor(high=20.0, smoothing=3)
    assert levels(watcher, [NAN, NAN, NAN]) == [C, C, C]


def test_a_nan_among_the_latest_stops_the_search_for_a_trend() -> None:
    watcher = monitor(high=1000.0, horizon=1000)
    assert levels(watcher, ONES)[-1] is S
    assert levels(watcher, [NAN, 11.0]) == [C, H]
    assert levels(watcher, [float(i) for i in range(12, 20)]) == [H] * 8
    assert watcher.observe(20.0) is S


def test_a_slow_rise_is_seen_before_it_reaches_the_threshold() -> None:
    # 4 up to step 7, then 0.25 more in each: past the middle (7) from 20 on, past 10 from 32 on
    series = [4.0] * 8 + [4.0 + 0.25 * i for i in range(1, 30)]
    options: dict[str, Any] = {"high": 10.0, "baseline_steps": 8, "patience": 2, "suspicion": 0.5}
    blind = levels(Monitor("x", **options, horizon=0), series)
    assert (blind.index(S), blind.index(C)) == (21, 33)
    # step 15 reads 6, 16 steps of 0.25 away from 10: 17 before the first reading beyond it
    seen = levels(Monitor("x", **options, horizon=16, trend_steps=10), series)
    assert (seen.index(S), seen.index(C)) == (15, 33)
    assert set(seen[15:33]) == {S}  # without a gap


def test_a_trend_says_in_how_many_steps_it_reaches_the_threshold() -> None:
    watcher = monitor(high=20.0, patience=9, horizon=50)
    levels(watcher, RISE)
    assert (watcher.side, watcher.crossing) == ("high", (20.0 - 6.5) / 0.5)
    falling = monitor(low=-20.0, patience=9, horizon=50)
    levels(falling, FALL)
    assert (falling.side, falling.crossing) == ("low", (20.0 - 2.5) / 0.5)
    beyond = monitor(high=20.0, **LATE)
    levels(beyond, STEEP)
    assert (beyond.level, beyond.crossing) == (S, 0.0)


@pytest.mark.parametrize(("horizon", "level"), [(26, H), (27, S)])
def test_a_line_beyond_the_horizon_is_no_matter(horizon: int, level: Level) -> None:
    watcher = monitor(high=20.0, patience=99, horizon=horizon)  # 27 steps away
    assert levels(watcher, RISE)[-1] is level


def test_a_trend_away_from_the_only_threshold_is_no_matter() -> None:
    assert set(levels(monitor(high=20.0, horizon=99), [10.0 - i for i in range(20)])) == {H}
    assert set(levels(monitor(low=0.0, horizon=99), [10.0 + i for i in range(20)])) == {H}


def test_a_step_is_no_trend() -> None:
    # up to 14, this side of the middle (15)
    watcher = Monitor("x", high=20.0, baseline_steps=8, horizon=100, trend_steps=10)
    assert set(levels(watcher, [10.0] * 15 + [14.0] * 15)) == {H}


def test_a_trend_needs_a_baseline_and_all_its_readings() -> None:
    rise = [float(i) for i in range(12)]
    watcher = monitor(high=1000.0, horizon=1000, baseline_steps=11)
    assert levels(watcher, rise) == [H] * 10 + [S, S]
    watcher = monitor(high=1000.0, horizon=1000, trend_steps=7)
    assert levels(watcher, rise) == [H] * 6 + [S] * 6


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("memory", [0.0, 0.7])
def test_a_noisy_healthy_series_is_never_a_collapse(seed: int, memory: float) -> None:
    rng, wander, series = random.Random(seed), 0.0, []
    for _ in range(1000):
        wander = memory * wander + math.sqrt(1 - memory**2) * rng.gauss(0, 1)
        series.append(50.0 + 5.0 * wander)  # 10 % noise, with and without memory
    seen = levels(Monitor("x", high_ratio=1.6, low_ratio=0.5), series)
    assert C not in seen
    assert seen.count(S) <= 30


@pytest.mark.parametrize(
    ("options", "values", "expected"),
    [
        ({"high": 10.0}, [3.4] * 4 + [41.0], "41 is 12.1x its baseline"),
        ({"high": 10.0}, [4.0] * 4 + [48.0], "48 is 12x its baseline"),
        ({"high": 10.0}, [0.05] * 4 + [41.0], "41 is 4.1x its limit of 10"),  # 820x its baseline
        ({"high": 50.0}, [0.05] * 4 + [41.0], "41 is 82 % of its limit of 50"),
        ({"high": 10.0}, [2.0] * 4 + [48.0], "48 is 24x its baseline"),
        ({"high": 10.0}, [0.5] * 4 + [11.5], "rose to 11.5 (baseline 0.5)"),  # 23x of almost 0
        ({"high": 4.9}, [0.5] * 4 + [11.5], "11.5 is 23x its baseline"),
        ({"high": 10.0}, [0.0] * 4 + [41.0], "rose to 41 (baseline 0)"),
        ({"high": 10.0}, [-2.0] * 4 + [41.0], "rose to 41 (baseline -2)"),
        ({"high": 1.01}, [1.0] * 4 + [1.02], "rose to 1.02 (baseline 1)"),
        ({"low_ratio": 0.6}, [2.9] * 4 + [1.3], "fell to 1.3 (baseline 2.9)"),
        ({"low": 0.0}, [0.5] * 4 + [-0.25], "fell to -0.25 (baseline 0.5)"),
        ({"low": -3.0}, [-1.0] * 4 + [-4.0], "fell to -4 (baseline -1)"),
        ({"high": 10.0}, [41.0], "41 is above 10"),  # no baseline yet
        ({"low": 5.0}, [4.0], "4 is below 5"),
        ({"low": 0.0}, [-0.5] * 4 + [-0.25], "-0.25 is below 0"),  # not "fell"
        ({"high": 10.0}, [50.0] * 4 + [20.0], "20 is above 10"),
        ({"high": 10.0}, [5.0] * 4 + [NAN], "is nan"),
        ({"high": 10.0}, [5.0] * 4 + [5.0], "is 5"),
        ({"high": 10.0, "smoothing": 3}, [4.0] * 4 + [20.0, 20.0, 4.0], "20 is 5x its baseline"),
        # where the signal goes
        ({"high": 10.0, "trend_steps": 5}, RISING, "28 is 7x its baseline and rising"),
        ({"high": 10.0, "trend_steps": 6}, FALLING, "28 is 7x its baseline and falling"),
        ({"high": 10.0, "trend_steps": 5}, WANDERING, "28 is 7x its baseline"),
        # and when: (20 - 6.5) / 0.5 is 27, and (-20 - -2.5) / -0.5 is 35
        (
            {"high": 20.0, **LATE},
            RISE,
            "6.5 is 2.4x its baseline and at this pace beyond 20 in 27 steps",
        ),
        (
            {"low": -20.0, **LATE},
            FALL,
            "fell to -2.5 (baseline 1.25) and at this pace beyond -20 in 35 steps",
        ),
        # a fall back to normal, after which it rises: the baseline is still above
        ({"high": 20.0, **LATE}, [10.0] * 4 + ONES, "is 9 and at this pace beyond 20 in 11 steps"),
        ({"high": 9.5, **LATE}, ONES, "9 is 6x its baseline and at this pace beyond 9.5 in 1 step"),
        ({"high": 9.0, **LATE}, ONES, "9 is 6x its baseline and rising"),  # at the threshold
        ({"high": 20.0, **LATE}, STEEP, "26 is 13x its baseline and rising"),  # beyond it
    ],
)
def test_sentence_tells_what_a_monitor_saw(
    options: dict[str, Any], values: list[float], expected: str
) -> None:
    watcher = monitor(**options)
    levels(watcher, values)
    assert watcher.sentence() == f"x {expected}"


def test_a_sentence_has_the_unit() -> None:
    watcher = KLMonitor("x", high=10.0, baseline_steps=4, patience=1)
    levels(watcher, [2.0] * 4 + [30.0])
    assert watcher.sentence() == "KL 30 nats is 15x its baseline"
    levels(watcher, [250.0])
    assert watcher.sentence() == "KL 250 nats is 25x its limit of 10"


def test_clearing_keeps_the_baseline_only() -> None:
    watcher = monitor(high=20.0, high_ratio=1.5, warmup=1, patience=2, horizon=100)
    levels(watcher, [99.0] + [10.0] * 4 + [21.0, 22.0])
    assert (watcher.level, watcher.side) == (C, "high")
    watcher.clear()
    assert (watcher.level, watcher.side, watcher.crossing) == (H, "", None)
    assert (watcher.history, watcher.baseline, watcher.is_beyond) == ([], 10.0, False)
    assert levels(watcher, [21.0, 21.0]) == [H, C]  # no second warm-up, patience anew


def test_a_monitor_remembers_the_latest_readings() -> None:
    watcher = monitor(high=1e9)
    levels(watcher, [float(i) for i in range(HISTORY + 5)])
    assert watcher.history == [float(i) for i in range(5, HISTORY + 5)]


SERIES = [
    *(500.0, 500.0),  # warm-up
    *(10.0, 11.0, NAN, 9.0, 10.0),  # baseline
    *(13.0, 16.0, 16.5, 17.0, 12.0),  # past the middle, back
    *(21.0, 30.0, 31.0, NAN, 32.0),  # past the threshold
    *(10.0, 10.5, 11.0, 11.5, 12.0, 12.5, 13.0),  # a trend
]


def stateful() -> Monitor:
    counts = {"baseline_steps": 4, "warmup": 2, "smoothing": 2, "horizon": 40, "trend_steps": 6}
    return Monitor("x", high=20.0, high_ratio=1.5, deviations=1.0, **counts)


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
    state = before.state_dict()
    saved = json.dumps(state)
    before.observe(1e9)  # must not reach into the state
    after.load_state_dict(state)
    assert json.dumps(after.state_dict()) == saved
    assert first + watched(after, SERIES[split:]) == whole
    assert json.dumps(state) == saved
    assert type(after.level) is Level


def test_a_monitor_is_named_by_the_end_of_its_key() -> None:
    plain = Monitor("ppo/value_clip_fraction", high=0.5)
    assert (plain.name, plain.vote) == ("value clip fraction", "ppo/value_clip_fraction")
    assert plain.keys == ("ppo/value_clip_fraction",)
    assert Monitor("x/y", "clipping", high=0.5).name == "clipping"


def test_a_monitor_reads_a_metric_or_the_mean_of_a_tensor() -> None:
    step = StepMetrics({"x": 3.0}, {"y": [1.0, 2.0, 6.0], "empty": []})
    assert Monitor("x", high=1.0).read(step) == 3.0
    assert Monitor("y", high=1.0).read(step) == 3.0
    assert math.isnan(Monitor("empty", high=1.0).read(step))
