from __future__ import annotations

import math
import random
from dataclasses import asdict
from typing import Any

import pytest

from lit_callbacks.monitors import Level, Monitor, StepMetrics
from lit_callbacks.signals import (
    EntropyMonitor,
    ExplainedVarianceMonitor,
    FirstRatioMonitor,
    KLMonitor,
    KLPerTokenMonitor,
    LengthMonitor,
    NonFiniteMonitor,
    PerplexityMonitor,
    RepetitionMonitor,
    RewardDistributionMonitor,
    TruncationMonitor,
    default_monitors,
    distribution,
)
from lit_callbacks.verdict import judge

H, S, C = Level.HEALTHY, Level.SUSPICIOUS, Level.COLLAPSED

SETTINGS: dict[str, Any] = {
    "baseline_steps": 4,
    "warmup": 0,
    "patience": 2,
    "deviations": 4.0,
    "horizon": 0,
}

# class, its thresholds, four healthy readings and then ones that collapse, the side
COLLAPSES: list[tuple[type[Monitor], dict[str, float | None], list[float], list[float], str]] = [
    (KLMonitor, {"high": 10.0}, [1.0, 1.2, 0.9, 1.1], [6.0, 11.0, 19.0], "high"),
    (KLPerTokenMonitor, {"high": 0.2}, [0.01, 0.02, 0.01, 0.02], [0.1, 0.3, 0.9], "high"),
    (LengthMonitor, {"high_ratio": 2.0}, [20.0, 21.0, 19.0, 20.0], [30.0, 41.0, 48.0], "high"),
    (LengthMonitor, {"low_ratio": 0.5}, [20.0, 21.0, 19.0, 20.0], [15.0, 9.0, 2.0], "low"),
    (TruncationMonitor, {"high": 0.5}, [0.0, 0.1, 0.1, 0.0], [0.3, 0.6, 1.0], "high"),
    (PerplexityMonitor, {"low_ratio": 0.6}, [2.9, 3.0, 2.9, 2.8], [2.0, 1.6, 1.3], "low"),
    (PerplexityMonitor, {"high_ratio": 2.0}, [2.9, 3.0, 2.9, 2.8], [4.0, 6.1, 30.0], "high"),
    (EntropyMonitor, {"low_ratio": 0.5}, [1.0, 1.1, 0.9, 1.0], [0.8, 0.4, 0.1], "low"),
    (EntropyMonitor, {"high_ratio": 2.0}, [1.0, 1.1, 0.9, 1.0], [1.4, 2.5, 4.0], "high"),
    (RepetitionMonitor, {"low_ratio": 0.6}, [0.9, 0.92, 0.88, 0.9], [0.7, 0.5, 0.1], "low"),
    (ExplainedVarianceMonitor, {"low": 0.0}, [0.6, 0.5, 0.6, 0.5], [0.3, -0.2, -3.0], "low"),
    (FirstRatioMonitor, {"high": 1.05}, [1.0, 1.0, 1.0, 1.0], [1.0, 1.1, 1.1], "high"),
    (FirstRatioMonitor, {"low": 0.95}, [1.0, 1.0, 1.0, 1.0], [1.0, 0.9, 0.9], "low"),
]


@pytest.mark.parametrize(("kind", "thresholds", "healthy", "worse", "side"), COLLAPSES)
def test_a_signal_collapses_on_its_side_and_not_without_cause(
    kind: type[Monitor],
    thresholds: dict[str, float | None],
    healthy: list[float],
    worse: list[float],
    side: str,
) -> None:
    none = {"high": None, "high_ratio": None, "low": None, "low_ratio": None}
    # the thresholds of the class that are not under test are taken away
    taken = kind.__init__.__annotations__.keys() & none.keys()
    settings: dict[str, Any] = {**SETTINGS, **dict.fromkeys(taken), **thresholds}
    watcher = kind(**settings)
    seen = [watcher.observe(value) for value in (*healthy, *worse)]
    assert seen[-1] is C
    assert C not in seen[:-1]
    assert watcher.side == side

    calm = kind(**settings)
    assert {calm.observe(value) for value in healthy * 5} == {H}


@pytest.mark.parametrize("kind", [LengthMonitor, PerplexityMonitor, EntropyMonitor])
def test_lengths_perplexity_and_entropy_are_watched_on_both_sides(kind: type[Monitor]) -> None:
    watcher = kind(high_ratio=2.0, low_ratio=0.5, **SETTINGS)  # type: ignore[arg-type]
    for value in (10.0, 10.0, 10.0, 10.0):
        watcher.observe(value)
    assert watcher.thresholds() == (5.0, 20.0)


def test_the_first_ratio_is_watched_on_both_sides() -> None:
    assert FirstRatioMonitor(high=1.1, low=0.8).thresholds() == (0.8, 1.1)


# --- not finite


def test_metrics_that_are_not_finite_are_counted_and_named() -> None:
    watcher = NonFiniteMonitor(patience=2)
    fine = StepMetrics({"a": 1.0}, {})
    broken = StepMetrics({"a": math.nan, "b": math.inf}, {}, ("a", "b"))
    readings = [watcher.read(step) for step in (fine, broken)]
    assert readings == [0.0, 2.0]
    assert watcher.sentence() == "a, b not finite"
    seen = [watcher.observe(watcher.read(r)) for r in (fine, broken, fine, broken, broken, fine)]
    assert seen == [H, H, H, H, C, H]
    assert watcher.keys == ()


def test_metrics_that_are_not_finite_need_no_second_signal() -> None:
    assert [m.vote for m in default_monitors() if m.decisive] == ["non-finite"]


def test_a_policy_far_from_its_reference_needs_no_second_signal() -> None:
    watcher = KLPerTokenMonitor(high=0.1, decisive_factor=3.0, patience=2)
    decided = []
    for reading in (0.5, 0.31, 0.29, 0.31, math.nan, 0.31, 0.32):
        watcher.observe(reading)
        decided.append(watcher.decides)
    assert decided == [False, True, False, False, False, False, True]
    others = [LengthMonitor(), EntropyMonitor()]
    for other in others:
        other.observe(1.0)
    assert judge([watcher, *others], 2, step=1).level is C
    watcher.observe(0.2)
    assert judge([watcher, *others], 2, step=2).level is S
    watcher.clear()  # as after a roll-back
    watcher.observe(0.5)
    assert not watcher.decides


def test_the_decisive_value_follows_the_threshold() -> None:
    watcher = KLPerTokenMonitor(high=0.2, warmup=1)
    seen = []
    for reading in (0.9, 0.9, 0.79, 0.81, 0.81):
        watcher.observe(reading)
        seen.append(watcher.decides)
    assert seen == [False, False, False, False, True]
    low_only = KLPerTokenMonitor(high=None, low=0.0)
    low_only.observe(9.0)
    low_only.observe(9.0)
    assert not low_only.decides
    with pytest.raises(ValueError, match=r"decisive_factor: expected .* at least 1, got 0\.5"):
        KLPerTokenMonitor(decisive_factor=0.5)


def test_a_limit_that_was_short_from_the_start_is_no_collapse() -> None:
    watcher = TruncationMonitor(high=0.3, high_ratio=2.0, **SETTINGS)
    seen = [watcher.observe(x) for x in [0.36, 0.35, 0.37, 0.36] * 2 + [0.5, 0.55, 0.58, 0.57]]
    assert C not in seen
    assert [watcher.observe(x) for x in (0.8, 0.8, 0.8)][-1] is C


# --- rewards


def rewards(numbers: list[float]) -> StepMetrics:
    return StepMetrics({}, {"scores": numbers})


def test_a_long_upper_tail_of_rewards_is_a_collapse() -> None:
    rng = random.Random(0)
    healthy = [rewards([rng.gauss(0, 1) for _ in range(200)]) for _ in range(8)]
    cheating = rewards([rng.gauss(0, 1) for _ in range(160)] + [12.0] * 40)
    watcher = RewardDistributionMonitor(high=2.0, high_ratio=2.5, **SETTINGS)
    assert {watcher.observe(watcher.read(step)) for step in healthy} == {H}
    seen = [watcher.observe(watcher.read(cheating)) for _ in range(2)]
    assert (seen[-1], watcher.side) == (C, "high")


def test_the_shape_of_the_rewards_is_shown() -> None:
    watcher = RewardDistributionMonitor()
    reading = watcher.read(rewards([1.0, 2.0, 4.0]))
    assert watcher.sample == [1.0, 2.0, 4.0]
    assert watcher.details() == asdict(distribution([1.0, 2.0, 4.0]))
    # what is logged is what was read, so that a finished run can be judged from its logs
    assert watcher.details()["tail"] == reading
    assert watcher.logged_key == "monitor/scores_tail"


@pytest.mark.parametrize(
    "numbers", [[3.0] * 8, [3.0], [0.0] * 6 + [1.0] * 4]
)  # the last: right or wrong, most of them wrong
def test_rewards_without_a_lower_half_to_compare_with_are_in_order(numbers: list[float]) -> None:
    watcher = RewardDistributionMonitor(high=2.0, high_ratio=None, **SETTINGS)
    assert [watcher.observe(watcher.read(rewards(numbers))) for _ in range(5)] == [H] * 5


def test_rewards_that_are_not_finite_are_a_collapse() -> None:
    watcher = RewardDistributionMonitor(high=2.0, high_ratio=None, **SETTINGS)
    broken = rewards([1.0, 2.0, math.nan, 3.0])
    assert [watcher.observe(watcher.read(broken)) for _ in range(2)] == [H, C]
    assert watcher.side == "not finite"


def test_a_metric_instead_of_a_tensor_of_rewards_is_refused() -> None:
    watcher = RewardDistributionMonitor("rollout/score")
    with pytest.raises(
        ValueError, match="key: expected a tensor of the step's outputs, got 'rollout/score'"
    ):
        watcher.read(StepMetrics({"rollout/score": 1.0}, {}))


# --- the defaults

COVERED = {
    # vote, key: the sides that are watched
    ("kl", "rollout/kl"): {"high"},
    ("kl", "rollout/kl_per_token"): {"high"},
    ("length", "rollout/response_length"): {"low", "high"},
    ("length", "rollout/truncation_rate"): {"high"},
    ("perplexity", "rollout/perplexity"): {"low", "high"},
    ("entropy", "rollout/entropy"): {"low", "high"},
    ("repetition", "rollout/distinct_2"): {"low"},
    ("reward", "scores"): {"high"},
    ("critic", "ppo/explained_variance"): {"low"},
    ("ratio", "ppo/ratio_first"): {"low", "high"},
    ("non-finite", "non-finite"): {"high"},
}


def sides(watcher: Monitor) -> set[str]:
    low = watcher.low is not None or watcher.low_ratio is not None
    high = watcher.high is not None or watcher.high_ratio is not None
    return ({"low"} if low else set()) | ({"high"} if high else set())


def test_the_defaults_cover_every_signal_on_its_sides() -> None:
    assert {(m.vote, m.key): sides(m) for m in default_monitors()} == COVERED


def test_the_defaults_have_names_and_units() -> None:
    assert {m.name: m.unit for m in default_monitors()} == {
        "KL": "nats",
        "KL per token": "nats",
        "length": "tokens",
        "truncation rate": "",
        "perplexity": "",
        "entropy": "nats",
        "distinct bigrams": "",
        "upper reward tail": "",
        "explained variance": "",
        "first ratio": "",
        "non-finite metrics": "",
    }


def test_the_defaults_are_new_each_time() -> None:
    first = default_monitors()
    first[0].observe(1.0)
    assert default_monitors()[0].steps == 0


def test_only_the_first_ratio_may_be_missing() -> None:
    assert [m.key for m in default_monitors() if m.optional] == ["ppo/ratio_first"]


def test_options_reach_the_monitor() -> None:
    watcher = KLMonitor("a/kl", high=3.0, high_ratio=2.0, name="divergence", patience=7)
    assert (watcher.key, watcher.high, watcher.high_ratio) == ("a/kl", 3.0, 2.0)
    assert (watcher.name, watcher.patience) == ("divergence", 7)
    with pytest.raises(TypeError, match="unexpected keyword argument 'height'"):
        KLMonitor(height=3.0)
