import math
import random
from typing import Any

import pytest

from lit_callbacks.monitors import Monitor, StepMetrics
from lit_callbacks.signals import (
    EntropyMonitor,
    ExplainedVarianceMonitor,
    FirstRatioMonitor,
    KLMonitor,
    KLPerTokenMonitor,
    LengthMonitor,
    NonFiniteMonitor,
    OpeningMonitor,
    PerplexityMonitor,
    PromptMonitor,
    RepetitionMonitor,
    RewardDistributionMonitor,
    TruncationMonitor,
    default_monitors,
    distribution,
)
from lit_callbacks.verdict import judge
from tests.support.monitor_levels import C, H, S

WITHOUT_THRESHOLDS = {"high": math.inf, "high_ratio": math.inf, "low": -math.inf, "low_ratio": 0.0}
SETTINGS: dict[str, Any] = dict(baseline_steps=4, warmup=0, patience=2, deviations=4.0, horizon=0)

# class, its thresholds, four healthy readings and then ones that collapse, the side
COLLAPSES: list[tuple[type[Monitor], dict[str, float | None], list[float], list[float], str]] = [
    (KLMonitor, {"high": 10.0}, [1.0, 1.2, 0.9, 1.1], [6.0, 11.0, 19.0], "high"),
    (KLPerTokenMonitor, {"high": 0.2}, [0.01, 0.02, 0.01, 0.02], [0.1, 0.3, 0.9], "high"),
    (LengthMonitor, {"high_ratio": 2.0}, [20.0, 21.0, 19.0, 20.0], [30.0, 41.0, 48.0], "high"),
    (LengthMonitor, {"low_ratio": 0.5}, [20.0, 21.0, 19.0, 20.0], [15.0, 9.0, 2.0], "low"),
    (TruncationMonitor, {"high": 0.5}, [0.0, 0.1, 0.1, 0.0], [0.3, 0.6, 1.0], "high"),
    (PerplexityMonitor, {"low_ratio": 0.6}, [2.9, 3.0, 2.9, 2.8], [2.0, 1.6, 1.3], "low"),
    (PerplexityMonitor, {"high_ratio": 2.0}, [2.9, 3.0, 2.9, 2.8], [6.0, 8.6, 30.0], "high"),
    (EntropyMonitor, {"low_ratio": 0.5}, [1.0, 1.1, 0.9, 1.0], [0.8, 0.3, 0.1], "low"),
    (EntropyMonitor, {"high_ratio": 2.0}, [1.0, 1.1, 0.9, 1.0], [1.4, 2.5, 4.0], "high"),
    (RepetitionMonitor, {"low_ratio": 0.6}, [0.9, 0.92, 0.88, 0.9], [0.7, 0.5, 0.1], "low"),
    (ExplainedVarianceMonitor, {"low": 0.0}, [0.6, 0.5, 0.6, 0.5], [0.3, -0.2, -3.0], "low"),
    (FirstRatioMonitor, {"high": 1.05}, [1.0, 1.0, 1.0, 1.0], [1.0, 1.1, 1.1], "high"),
    (FirstRatioMonitor, {"low": 0.95}, [1.0, 1.0, 1.0, 1.0], [1.0, 0.9, 0.9], "low"),
]


def fed(watcher: Any, *readings: float, responses: int = 0) -> Any:
    """A monitor after these readings."""
    for reading in readings:
        watcher.observe(reading, responses)
    return watcher


@pytest.mark.parametrize(("kind", "thresholds", "healthy", "worse", "side"), COLLAPSES)
def test_a_signal_collapses_on_its_side_and_not_without_cause(
    kind: type[Monitor],
    thresholds: dict[str, float | None],
    healthy: list[float],
    worse: list[float],
    side: str,
) -> None:
    # the thresholds of the class that are not under test are turned off
    settings: dict[str, Any] = {**SETTINGS, **WITHOUT_THRESHOLDS, **thresholds}
    watcher = kind(**settings)
    seen = [watcher.observe(reading) for reading in (*healthy, *worse)]
    assert seen[-1] is C
    assert C not in seen[:-1]
    assert watcher.side == side
    calm = kind(**settings)
    assert {calm.observe(reading) for reading in healthy * 5} == {H}


def test_metrics_that_are_not_finite_are_counted_and_named() -> None:
    watcher = NonFiniteMonitor(patience=2)
    fine = StepMetrics({"a": 1.0}, {})
    broken = StepMetrics({"a": math.nan, "b": math.inf}, {}, ("a", "b"))
    readings = [watcher.read(step) for step in (fine, broken)]
    assert readings == [0.0, 2.0]
    assert watcher.sentence() == "a, b not finite"
    seen = [watcher.observe(watcher.read(r)) for r in (fine, broken, fine, broken, broken, fine)]
    assert seen == [H, H, H, C, C, H]
    assert watcher.keys == ()


def test_metrics_that_are_not_finite_need_no_second_signal() -> None:
    assert [m.vote for m in default_monitors() if m.decisive] == ["negative-kl", "non-finite"]


def test_a_policy_far_from_its_reference_needs_no_second_signal() -> None:
    watcher = KLPerTokenMonitor(high=0.1, decisive_factor=3.0, patience=2)
    decided = []
    for reading in (0.0, 0.5, 0.31, 0.29, 0.31, math.nan, 0.31, 0.32):
        watcher.observe(reading)
        decided.append(watcher.decides)
    assert decided == [False, False, True, False, False, False, False, True]
    others = [fed(LengthMonitor(), 1.0), fed(EntropyMonitor(), 1.0)]
    assert judge([watcher, *others], 2, step=1).level is C
    watcher.observe(0.2)
    assert judge([watcher, *others], 2, step=2).level is S
    watcher.clear()  # as after a roll-back
    watcher.observe(0.5)
    assert not watcher.decides


def test_a_policy_that_starts_far_from_its_reference_is_judged_from_there() -> None:
    watcher = fed(KLPerTokenMonitor(high=0.1, patience=2), 0.4, *[0.48] * 4)
    # 0.04 at the start is not far
    near = fed(KLPerTokenMonitor(high=0.1, patience=2), 0.04, *[0.12] * 4)
    assert watcher.thresholds()[1] == pytest.approx(0.4 + 0.1)
    assert near.thresholds()[1] == 0.1
    assert (watcher.level, near.level) == (H, C)
    resumed = KLPerTokenMonitor(high=0.1, patience=2)
    resumed.load_state_dict(watcher.state_dict())
    assert fed(resumed, 0.69, 0.72, 0.72).level is C
    assert resumed.decides  # above 0.4 + 3 x 0.1, twice


def test_the_decisive_value_follows_the_threshold() -> None:
    watcher = KLPerTokenMonitor(high=0.2, decisive_factor=4.0, warmup=1)
    seen = []
    for reading in (0.9, 0.0, 0.79, 0.81, 0.81):
        watcher.observe(reading)
        seen.append(watcher.decides)
    assert seen == [False, False, False, False, True]
    assert not fed(KLPerTokenMonitor(high=math.inf, low=0.0), 9.0, 9.0).decides


def test_a_limit_that_was_short_from_the_start_is_no_collapse() -> None:
    watcher = TruncationMonitor(high=0.3, high_ratio=2.0, **SETTINGS)
    seen = [watcher.observe(x) for x in [0.36, 0.35, 0.37, 0.36] * 2 + [0.5, 0.55, 0.58, 0.57]]
    assert C not in seen
    assert [watcher.observe(x) for x in (0.8, 0.8, 0.8)][-1] is C


def test_share_that_starts_high_has_its_threshold_half_of_the_way_to_one() -> None:
    watcher = TruncationMonitor(**{**SETTINGS, "deviations": 0.0})
    assert fed(watcher, *[0.6] * 4).thresholds()[1] == pytest.approx(0.8)


def test_ratio_of_perplexity_is_one_of_its_logarithm() -> None:
    entropy = fed(EntropyMonitor(**SETTINGS), *[2.0] * 4)
    perplexity = fed(PerplexityMonitor(**SETTINGS), *[math.exp(2.0)] * 4)
    assert [math.log(end) for end in perplexity.thresholds()] == pytest.approx(entropy.thresholds())
    assert entropy.vote == perplexity.vote


def test_kl_per_token_follows_from_kl_and_length() -> None:
    watcher = KLPerTokenMonitor()
    assert watcher.read(StepMetrics({"rollout/kl_per_token": 0.5}, {})) == 0.5
    metrics = StepMetrics({"rollout/kl": 12.0, "rollout/response_length": 48.0}, {})
    assert watcher.can_read(metrics)
    assert watcher.read(metrics) == 0.25
    assert not watcher.can_read(StepMetrics({"rollout/kl": 12.0}, {}))


@pytest.mark.parametrize(("tokens", "decided"), [(8.0, False), (20.0, True)])
def test_distance_in_a_few_tokens_is_not_decisive(tokens: float, decided: bool) -> None:
    watcher = KLPerTokenMonitor()
    watcher.observe(0.0)
    metrics = {"rollout/kl_per_token": 1.0, "rollout/response_length": tokens}
    for _ in range(2):  # 8 or 20 nats per response
        watcher.observe(watcher.read(StepMetrics(metrics, {})))
    assert watcher.decides == decided


def test_length_is_a_multiple_of_the_references_where_that_is_logged() -> None:
    watcher = LengthMonitor()
    assert watcher.read(StepMetrics({"rollout/response_length": 90.0}, {})) == 90.0
    lengths = {"rollout/response_length": 90.0, "rollout/ref_response_length": 60.0}
    assert watcher.read(StepMetrics(lengths, {})) == 1.5


def test_standard_error_of_the_responses_moves_a_threshold() -> None:
    lengths = [fed(LengthMonitor(**SETTINGS), *[100.0] * 4, responses=b) for b in (0, 64, 4, 1)]
    # 4 deviations of 0.6 x 100 / sqrt(B), at least the ratio's 100 and at most twice that
    expected = pytest.approx([200.0, 200.0, 220.0, 300.0])
    assert [watcher.thresholds()[1] for watcher in lengths] == expected
    share = OpeningMonitor(high=math.inf, high_ratio=1.5, **SETTINGS)
    fed(share, *[0.2] * 4, responses=100)
    assert share.thresholds()[1] == pytest.approx(0.2 + 4 * math.sqrt(0.2 * 0.8 / 100))
    nats = fed(KLMonitor(high=10.0), 1.0, responses=4)
    assert nats.thresholds()[1] == 15.0  # a fixed one moves by one deviation, 10 / sqrt(4)


def test_prompts_have_changed_when_two_readings_leave_those_before() -> None:
    watcher = PromptMonitor()
    steady = [80.0, 82.0, 79.0, 81.0, 80.0, 83.0, 78.0, 80.0]
    assert {watcher.observe(reading) for reading in steady} == {H}
    assert [watcher.observe(reading) for reading in (150.0, 80.0, 150.0, 149.0)] == [H, H, H, C]
    assert watcher.side == "high"
    assert watcher.sentence() == "prompt length 149 tokens is above 112"


def test_noisy_prompts_and_slow_changes_are_no_change() -> None:
    rng, watcher = random.Random(0), PromptMonitor()
    noisy = [rng.gauss(80, 20) for _ in range(500)]
    assert C not in {watcher.observe(reading, 4) for reading in noisy}
    slow = PromptMonitor()
    assert C not in {slow.observe(80.0 * 1.01**i) for i in range(200)}


def rewards(numbers: list[float]) -> StepMetrics:
    return StepMetrics({}, {"scores": numbers})


@pytest.mark.parametrize(
    ("share", "best", "side"), [(0.2, 12.0, "high"), (1.0, 0.0, "low"), (0.02, 5.0, "")]
)
def test_rewards_are_watched_for_their_width(share: float, best: float, side: str) -> None:
    rng = random.Random(0)
    healthy = [rewards([rng.gauss(0, 1) for _ in range(200)]) for _ in range(8)]
    cheats = round(200 * share)
    later = rewards([rng.gauss(0, 1) for _ in range(200 - cheats)] + [best] * cheats)
    watcher = RewardDistributionMonitor(**SETTINGS)
    assert {watcher.observe(watcher.read(step), 200) for step in healthy} == {H}
    seen = [watcher.observe(watcher.read(later), 200) for _ in range(2)]
    assert (seen[-1], watcher.side) == (C if side else H, side)


def test_the_shape_of_the_rewards_is_shown() -> None:
    watcher = RewardDistributionMonitor()
    reading = watcher.read(rewards([1.0, 2.0, 4.0]))
    assert watcher.sample == [1.0, 2.0, 4.0]
    assert watcher.details() == distribution([1.0, 2.0, 4.0])
    # what is logged is what was read, so that a finished run can be judged from its logs
    assert watcher.details()["std"] == reading
    logged = StepMetrics({"monitor/scores_std": reading}, {})
    assert RewardDistributionMonitor().can_read(logged)
    assert RewardDistributionMonitor().read(logged) == reading


def test_a_metric_instead_of_a_tensor_of_rewards_is_refused() -> None:
    watcher = RewardDistributionMonitor("rollout/score")
    message = "key: expected a tensor of the step's outputs, got 'rollout/score'"
    with pytest.raises(ValueError, match=message):
        watcher.read(StepMetrics({"rollout/score": 1.0}, {}))


def test_the_defaults_are_new_each_time() -> None:
    first = default_monitors()
    first[0].observe(1.0)
    assert default_monitors()[0].steps == 0
