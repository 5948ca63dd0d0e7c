"""The core that any training loop can call."""

from collections.abc import Iterable
from typing import Any

import pytest

from lit_callbacks import Level, Monitor, NonFiniteMonitor, PromptMonitor, Watch
from lit_callbacks.signals import KLMonitor, KLPerTokenMonitor, LengthMonitor

H, S, C, D = Level.HEALTHY, Level.SUSPICIOUS, Level.COLLAPSED, Level.DATA_CHANGED
NORMAL = {"rollout/kl_per_token": 0.01, "rollout/response_length": 100.0, "rollout/entropy": 2.0}


def fed(watch: Watch, steps: Iterable[dict[str, float]]) -> list[Level]:
    return [watch.step(step).level for step in steps]


def test_collapse_needs_distance_and_a_second_signal_for_two_steps() -> None:
    watch = Watch()
    assert set(fed(watch, [NORMAL] * 10)) == {H}
    long = NORMAL | {"rollout/response_length": 300.0}
    assert fed(watch, [long] * 3) == [H, S, S]
    far = long | {"rollout/kl_per_token": 0.14}
    assert fed(watch, [far] * 2) == [S, C]
    assert watch.verdict.sentence.endswith("the policy is exploiting its reward")


def test_names_and_tensors_of_another_loop_are_watched() -> None:
    names = {"rollout/response_length": "completions/mean_length"}
    watch = Watch([LengthMonitor(low_ratio=0.0), Monitor("scores", high=3.0)], 1, names)
    for _ in range(8):
        watch.step({"completions/mean_length": 50}, {"scores": [1.0, 2.0]})
    assert [m.steps for m in watch.monitors] == [8, 8]
    assert watch.monitors[1].history[-1] == 1.5


def test_loop_without_any_watched_metric_is_refused() -> None:
    with pytest.raises(ValueError, match=r"metrics: expected one of rollout/kl, .* got loss"):
        Watch().step({"loss": 1.0})


def test_loop_may_skip_a_step_and_log_what_is_not_finite() -> None:
    watch = Watch()
    fed(watch, [NORMAL] * 8)
    assert fed(watch, [{"loss": 1.0}] * 2) == [H, H]
    assert fed(watch, [NORMAL | {"loss": float("nan")}] * 2) == [H, C]
    # what was never finite and is not watched was not computed
    never = NORMAL | {"val/other": float("nan")}
    assert fed(Watch(), [never] * 3) == [H] * 3
    assert fed(Watch(), [NORMAL | {"val/other": 1.0}, never, never]) == [H, H, C]
    assert fed(Watch(), [NORMAL | {"rollout/entropy": float("nan")}] * 2) == [H, C]


def test_thresholds_are_said_once_when_the_baseline_is_known() -> None:
    watch = Watch([KLPerTokenMonitor(), LengthMonitor(), NonFiniteMonitor()])
    notes = []
    for _ in range(20):
        watch.step(NORMAL)
        notes.append(watch.notes)
    expected = (
        "thresholds: KL per token at most 0.07 nats, length 60 to 200 tokens; two of these 2 "
        "signals make a collapse (votes: 2)"
    )
    assert notes == [[]] * 7 + [[expected]] + [[]] * 12


@pytest.mark.parametrize(
    ("monitor", "values", "warning"),
    [
        (Monitor("x", low=-5.0, high_ratio=2.0), [1.0], "x is never below -5: its monitor is dead"),
        (Monitor("x", low=-5.0, high_ratio=2.0), [-1.0, 9.0, 9.0], ""),
        (Monitor("x", high_ratio=2.0), [0.0], "x has no threshold, because its baseline is 0"),
        (LengthMonitor("x", low=0.0), [9.0], "length is never below 0: its monitor is dead"),
    ],
)
def test_threshold_out_of_reach_warns(monitor: Monitor, values: list[float], warning: str) -> None:
    watch = Watch([monitor])
    notes = []
    for i in range(12):
        watch.step({"x": values[i % len(values)]})
        notes += watch.notes
    assert [text for text in notes if not text.startswith("thresholds")] == [warning] * bool(
        warning
    )


def test_wide_beginning_leaves_a_threshold_within_reach() -> None:
    # a return that is learned from 10 to 80, and lost
    watch = Watch([Monitor("return", low_ratio=0.5)])
    learning = [10.0, 35.0, 30.0, 60.0, 40.0, 70.0, 55.0, 80.0]
    assert C not in fed(watch, [{"return": value} for value in learning])
    (monitor,) = watch.monitors
    assert monitor.thresholds()[0] >= 0.1 * (monitor.baseline or 0.0) > 0
    assert fed(watch, [{"return": 3.0}] * 3)[-1] is C


def test_collapse_within_the_baselines_steps_is_seen() -> None:
    # SmolLM2 at 20 times the learning rate: 30 tokens to 2 by iteration 7
    lengths, kl = [30.0, 29.0, 28.0, 20.0, 5.0, 2.0, 2.0], [0.0, 0.0, 0.02, 0.1, 1.5, 3.0, 3.0]
    keys, watch = ("rollout/response_length", "rollout/kl_per_token"), Watch()
    steps = [dict(zip(keys, row, strict=True)) for row in zip(lengths, kl, strict=True)]
    assert fed(watch, steps)[-2:] == [C, C]
    assert watch.monitors[2].normal == [30.0, 29.0, 28.0, 20.0]  # what was lost is not normal


PROMPTS = {"rollout/prompt_length": 80.0}
OTHER = {"rollout/prompt_length": 200.0, "rollout/response_length": 300.0, "rollout/entropy": 0.7}


def test_other_prompts_are_no_collapse_and_baselines_are_taken_anew() -> None:
    watch = Watch()
    fed(watch, [NORMAL | PROMPTS] * 12)
    seen = fed(watch, [NORMAL | OTHER] * 12)
    assert seen == [H] + [D] * 8 + [H] * 3
    assert [m.baseline for m in watch.monitors if m.key == "rollout/response_length"] == [300.0]
    far = NORMAL | OTHER | {"rollout/kl_per_token": 0.2, "rollout/response_length": 700.0}
    assert fed(watch, [far] * 2)[-1] is C


def test_collapse_is_seen_while_baselines_are_taken_anew() -> None:
    watch = Watch([KLPerTokenMonitor(), LengthMonitor(), PromptMonitor()])
    fed(watch, [NORMAL | PROMPTS] * 12 + [NORMAL | OTHER] * 6)
    far = NORMAL | OTHER | {"rollout/kl_per_token": 0.3, "rollout/response_length": 900.0}
    assert fed(watch, [far] * 3)[-1] is C


@pytest.mark.parametrize("responses", [4, 16])
def test_number_of_responses_is_taken_from_the_metrics_or_the_argument(responses: int) -> None:
    from_metrics, given = Watch(), Watch(responses=responses)
    for _ in range(9):
        from_metrics.step(NORMAL | {"rollout/responses": float(responses)})
        given.step(NORMAL)
    ranges = [[m.thresholds() for m in watch.monitors] for watch in (from_metrics, given)]
    assert ranges[0] == ranges[1]
    assert from_metrics.monitors[2].thresholds()[1] == {4: 220.0, 16: 200.0}[responses]


def test_state_continues_in_the_middle() -> None:
    steps: list[dict[str, Any]] = [NORMAL | PROMPTS] * 12 + [NORMAL | OTHER] * 9
    whole = Watch()
    expected = fed(whole, steps)
    for cut in (5, 12, 13, 15):
        first, second = Watch(), Watch()
        before = fed(first, steps[:cut])
        second.load_state_dict(first.state_dict())
        assert before + fed(second, steps[cut:]) == expected
        assert second.state_dict() == whole.state_dict()


def test_state_continues_while_a_level_is_left() -> None:
    def watch() -> Watch:
        return Watch([Monitor("x", high=1.0, patience=2)])

    steps = [{"x": value} for value in (0.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0)]
    expected = [H, H, C, C, C, H, H]
    assert fed(watch(), steps) == expected
    for cut in (3, 4, 5):
        first, second = watch(), watch()
        fed(first, steps[:cut])
        second.load_state_dict(first.state_dict())
        assert fed(second, steps[cut:]) == expected[cut:]


@pytest.mark.parametrize(
    ("votes", "text"),
    [
        (None, "two of these 2 signals make a collapse (votes: 2), and mine alone"),
        (1, "one of these 3 signals makes a collapse (votes: 1)"),
        (3, "three of these 3 signals make a collapse (votes: 3)"),
        (9, "three of these 3 signals make a collapse (votes: 3)"),
    ],
)
def test_votes_are_said_in_words(votes: int | None, text: str) -> None:
    # KL per response and per token are one signal
    monitors = [KLMonitor(), KLPerTokenMonitor(), LengthMonitor(), NonFiniteMonitor()]
    watch = Watch([*monitors, Monitor("mine", high=5.0)], votes)
    watch.step(NORMAL | {"mine": 1.0, "rollout/kl": 1.0})
    assert watch.describe_votes() == text


def test_an_own_monitor_makes_a_collapse_alone_unless_votes_are_given() -> None:
    def last(votes: int | None) -> Level:
        watch = Watch([KLPerTokenMonitor(), LengthMonitor(), Monitor("mine", high=5.0)], votes)
        for _ in range(10):
            watch.step(NORMAL | {"mine": 1.0})
        return [watch.step(NORMAL | {"mine": 9.0}).level for _ in range(2)][-1]

    assert [last(None), last(2)] == [Level.COLLAPSED, Level.SUSPICIOUS]


@pytest.mark.parametrize(
    ("preset", "level"),
    [("chat", Level.COLLAPSED), ("short answers", Level.SUSPICIOUS), ("checkable reward", None)],
)
def test_preset_sets_the_thresholds_of_its_task_and_is_told(
    preset: str, level: Level | None
) -> None:
    watch = Watch(preset=preset)
    first_notes = []
    normal = {"rollout/kl_per_token": 0.01, "rollout/response_length": 100.0}
    longer = {"rollout/kl_per_token": 0.1, "rollout/response_length": 300.0}
    surer = {"rollout/entropy": 0.5}
    for step in [normal | {"rollout/entropy": 1.9}] * 10 + [longer | surer] * 4:
        watch.step(step)
        first_notes += watch.notes[:1] if watch.verdict.step == 1 else []
    assert watch.verdict.level is (level or Level.HEALTHY)
    others = ", ".join(p for p in ("chat", "short answers", "checkable reward") if p != preset)
    assert first_notes == [f"preset: {preset} (others: {others})"]


def test_level_is_left_once_a_whole_window_is_below_it() -> None:
    def judged(values: str, patience: int) -> str:
        watch = Watch([Monitor("x", high=1.0, patience=patience, suspicion=1.0)])
        return "".join(str(int(watch.step({"x": float(v)}).level)) for v in values)

    assert judged("0022020200022", patience=2) == "0002222222002"
    assert judged("00220", patience=1) == "00220"
    # with a patience of 3, five steps
    assert judged("22200000222", patience=3) == "00222220002"


def test_lower_level_is_told_after_a_window_and_clearing_ends_it() -> None:
    watch = Watch([Monitor("x", high=4.0, low_ratio=0.0, patience=2, suspicion=0.5)])
    news = []
    for value in (0.0, 5.0, 5.0, 0.0, 0.0, 0.0):
        level = watch.step({"x": value}).level
        news.append((level, watch.is_news))
    assert news == [(H, False), (H, False), (C, True), (C, False), (C, False), (H, True)]
    for value in (5.0, 5.0):
        watch.step({"x": value})
    watch.clear()
    assert watch.step({"x": 0.0}).level is H


def test_preset_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="preset: expected one of chat, short answers, checkable"):
        Watch(preset="poems")
