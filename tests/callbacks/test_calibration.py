"""Thresholds that are set by hand, or loosened by runs that a person calls healthy."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lit_callbacks import Level, Monitor, Watch, WatchCallback
from lit_callbacks.__main__ import main
from lit_callbacks.calibration import describe_changes, reach, thresholds_of
from lit_callbacks.logs import watch_logs
from lit_callbacks.signals import (
    KLPerTokenMonitor,
    LengthMonitor,
    PerplexityMonitor,
    RepeatedBigramsMonitor,
    TruncationMonitor,
)

KL = "rollout/kl_per_token"
LENGTH = "rollout/response_length"
ENTROPY = "rollout/entropy"
REPEATED = "rollout/repeated_2"
TRUNCATION = "rollout/truncation_rate"
CALM = {KL: 0.01, LENGTH: 100.0, ENTROPY: 2.0}
FAR = {KL: 0.2, LENGTH: 240.0, ENTROPY: 0.8}
"""What a run that learns mathematics reaches."""


def run(last: dict[str, float], calm: int = 10, steps: int = 5) -> list[dict[str, float]]:
    return [CALM] * calm + [CALM | last] * steps


@pytest.mark.parametrize(
    ("values", "patience", "sign", "expected"),
    [
        # the second largest of 3 in a row: 5 and 4 lie within three, 9 is alone
        ([9.0, 1.0, 1.0, 5.0, 2.0, 4.0], 2, 1, 4.0),
        ([3.0, 1.0, 2.0, 0.5], 2, -1, 1.0),
        ([1.0, 7.0], 1, 1, 7.0),
        ([1.0], 2, 1, None),
    ],
)
def test_reach_is_what_patience_of_a_window_pass(
    values: list[float], patience: int, sign: int, expected: float | None
) -> None:
    assert reach(values, patience, sign) == expected


def test_thresholds_are_a_quarter_beyond_what_healthy_runs_reach() -> None:
    watch = Watch()
    changes = watch.calibrate([run({}), run(FAR), run({KL: 0.1})])
    # 0.2 nats times 1.25; 240 of 100 tokens times 1.25; 0.8 of 2.0 nats divided by 1.25
    assert thresholds_of(changes) == {
        KL: {"high": 0.25},
        LENGTH: {"high_ratio": 3.0},
        ENTROPY: {"low_ratio": 0.32},
    }
    assert {change.shipped for change in changes} == {0.07, 2.0, 0.55}
    for step in run(FAR, steps=30):
        assert watch.step(step).level < Level.COLLAPSED
    assert watch.step(CALM | {KL: 0.6, LENGTH: 400.0}).level < Level.COLLAPSED
    assert watch.step(CALM | {KL: 0.6, LENGTH: 400.0}).level is Level.COLLAPSED


def test_calibration_keeps_what_the_healthy_runs_stay_clear_of() -> None:
    watch = Watch()
    assert watch.calibrate([run({LENGTH: 150.0})]) == []  # 1.5 times 1.25 is below 2
    (change,) = Watch().calibrate([run({LENGTH: 170.0})])
    assert (change.argument, change.calibrated) == ("high_ratio", 2.12)  # 2.125, to three digits
    # one step of a window makes no level
    assert Watch().calibrate([[*run({}), CALM | FAR, *run({})]]) == []
    assert describe_changes([], 2) == [
        "calibrated by 2 healthy runs: the thresholds stay as they are"
    ]


def test_kl_decides_alone_no_nearer_than_before_and_never_within_its_threshold() -> None:
    monitor = KLPerTokenMonitor()
    for high, factor in ((0.07, 3.0), (0.14, 1.5), (0.5, 1.0)):
        monitor.set_threshold("high", high)
        assert monitor.decisive_factor == pytest.approx(factor)


def test_perplexity_is_calibrated_by_its_logarithm() -> None:
    monitor = PerplexityMonitor()
    assert monitor.ratio_of(baseline=math.e**2, value=math.e) == pytest.approx(0.5)
    assert monitor.ratio_bound(baseline=math.e**2, ratio=0.5) == pytest.approx(math.e)
    assert math.isnan(monitor.ratio_of(baseline=1.0, value=2.0))
    assert math.isnan(LengthMonitor().ratio_of(baseline=0.0, value=2.0))


@pytest.mark.parametrize(("reached", "expected"), [(1.3, {}), (2.4, {"high_ratio": 3.0})])
def test_perplexity_keeps_a_threshold_that_its_power_stays_below(
    reached: float, expected: dict[str, float]
) -> None:
    key = "rollout/perplexity"
    steps = [{key: math.exp(3)}] * 10 + [{key: math.exp(3 * reached)}] * 5
    # 1.3 times 1.25 is below 1.8
    changes = Watch([PerplexityMonitor()]).calibrate([steps])
    assert thresholds_of(changes) == ({key: expected} if expected else {})


def test_bounds_that_mean_the_same_in_any_run_stay() -> None:
    custom = Monitor("mine", high=1.0)
    watch = Watch([KLPerTokenMonitor(), TruncationMonitor(), RepeatedBigramsMonitor(), custom])
    steps = [{KL: 0.0, TRUNCATION: 0.3, REPEATED: 0.02, "mine": 0.9}] * 10
    steps += [{KL: 0.0, TRUNCATION: 0.64, REPEATED: 0.1, "mine": 0.9}] * 5
    (change,) = watch.calibrate([steps])
    # 0.64 of 0.3 times 1.25; its bound stays half of the way from 0.3 to 1
    assert (change.argument, change.calibrated) == ("high_ratio", 2.67)
    for step in steps:
        watch.step(step)
    _, truncation, repeated, _ = watch.monitors
    assert truncation.thresholds().high == pytest.approx(0.65)
    assert (truncation.high, repeated.high, custom.high) == (0.3, 0.15, 1.0)


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([], "healthy_runs: expected at least one run, got none"),
        ([run({}), []], f"healthy run 2: expected one of rollout/kl, {KL}, .* got no steps"),
        ([[{"loss": 1.0}] * 20], "healthy run 1: expected one of .* got loss"),
        ([run({}, 3, 2)], "healthy run 1: expected at least 9 steps with a watched metric, got 5"),
        (
            [run({}), [CALM | {REPEATED: 0.02}] * 10 + [CALM | {REPEATED: 0.6}] * 2],
            "healthy run 2: expected a healthy run, got one that is collapsed at its step 12 by "
            "bounds that calibration does not move: .*repeated bigrams",
        ),
        ([run({"loss": math.nan}, 10, 5)], "healthy run 1: .* loss not finite"),
    ],
)
def test_runs_that_tell_nothing_or_are_broken_are_refused(runs: Any, message: str) -> None:
    watch = Watch()
    before = [dict(vars(monitor)) for monitor in watch.monitors]
    with pytest.raises(ValueError, match=message):
        watch.calibrate(runs)
    assert [vars(monitor) for monitor in watch.monitors] == before


def test_calibration_comes_before_the_first_step() -> None:
    watch = Watch()
    watch.step(CALM)
    with pytest.raises(ValueError, match="expected a watch that has judged no step yet"):
        watch.calibrate([run({})])


def test_thresholds_are_set_by_key_and_argument() -> None:
    watch = Watch(
        thresholds={KL: {"high": 0.3}, LENGTH: {"low_ratio": 0.2}, "rollout/kl": {"high": 50}}
    )
    kl, per_token, length, *_ = watch.monitors
    assert (kl.high, per_token.high, length.high_ratio, length.low_ratio) == (50.0, 0.3, 2.0, 0.2)
    with pytest.raises(
        ValueError, match=r"thresholds: expected some of .*, got \{rollout/kl: low_r"
    ):
        Watch(thresholds={"rollout/kl": {"low_ratio": 0.1}})
    with pytest.raises(ValueError, match=r"high_ratio: expected a number above 1, got 0\.5"):
        Watch(thresholds={LENGTH: {"high_ratio": 0.5}})


def test_trainer_callback_takes_preset_and_thresholds_or_a_watch() -> None:
    callback = WatchCallback(preset="short answers", thresholds={KL: {"high": 2.0}})
    assert (callback.watch.preset, callback.watch.monitors[1].high) == ("short answers", 2.0)
    with pytest.raises(
        ValueError, match="watch: expected either a watch, or preset and thresholds"
    ):
        WatchCallback(Watch(), preset="short answers")


def write(path: Path, steps: list[dict[str, float]]) -> str:
    path.write_text("".join(json.dumps({"step": i, **row}) + "\n" for i, row in enumerate(steps)))
    return str(path)


def test_healthy_logs_loosen_the_thresholds_of_a_watch(tmp_path: Path, capsys: Any) -> None:
    log = write(tmp_path / "log.jsonl", run(FAR, steps=6))
    assert watch_logs([log]) == {log: Level.COLLAPSED}
    capsys.readouterr()
    trl = [{"kl": s[KL], "completions/mean_length": s[LENGTH]} for s in run(FAR)]
    healthy = write(tmp_path / "healthy.jsonl", trl)
    main(["watch", log, "--healthy", healthy])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == (
        "calibrated by 1 healthy run: KL per token at most 0.07 -> 0.25, length at most 2 -> 3x "
        "its baseline"
    )
    thresholds = printed[1].removeprefix("in a configuration: thresholds: ")
    assert json.loads(thresholds) == {KL: {"high": 0.25}, LENGTH: {"high_ratio": 3.0}}
    assert printed[-1].partition(": ")[2].startswith("suspicious after 16 steps")


def test_healthy_logs_without_a_common_signal_are_refused(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", [{ENTROPY: 2.0}] * 12)
    healthy = write(tmp_path / "healthy.jsonl", [{KL: 0.01}] * 12)
    with pytest.raises(
        ValueError, match=r"a signal that .*log.jsonl has, too \(it has entropy\), got kl"
    ):
        watch_logs([log], healthy=[healthy])
    empty = write(tmp_path / "other.jsonl", [{"loss": 0.01}] * 12)
    with pytest.raises(
        ValueError, match=r"--healthy .*other.jsonl: healthy run 1: expected one of"
    ):
        watch_logs([log], healthy=[empty])
