"""Levels of monitors combined into one verdict, and what it says."""

from typing import Any

import pytest

from lit_callbacks.monitors import Level, Monitor, StepMetrics
from lit_callbacks.names import find_names
from lit_callbacks.signals import (
    KLMonitor,
    KLPerTokenMonitor,
    LengthMonitor,
    NonFiniteMonitor,
    default_monitors,
)
from lit_callbacks.verdict import Trouble, Verdict, advise, conclude, judge
from lit_callbacks.watch import Watch
from tests.support.monitor_levels import C, H, S

PATIENCE = 2


class Signal(Monitor):
    """A signal in a given state: 1 healthy, 8 suspicious, 20 beyond its threshold."""

    def __init__(self, name: str, level: Level, *, decisive: bool = False, vote: str = "") -> None:
        options = {"baseline_steps": 1, "patience": PATIENCE, "horizon": 0, "deviations": 0.0}
        super().__init__(name, high=10.0, **options)
        self.decisive = decisive  # type: ignore[misc]
        self.signal = vote  # type: ignore[misc]
        for value in [1.0] + [{H: 1.0, S: 8.0, C: 20.0}[level]] * PATIENCE:
            self.observe(value)
        assert self.level is level


def once_beyond(name: str) -> Monitor:
    """A signal that is beyond its threshold for the first time."""
    signal = Signal(name, H)
    signal.observe(20.0)
    assert (signal.level, signal.is_beyond) == (H, True)
    return signal


def level_of(*monitors: Monitor, votes: int = 2) -> Level:
    return judge(monitors, votes, step=1).level


CALM = [Signal(name, H) for name in ("v", "w", "x", "y", "z")]


def test_verdict_is_healthy_where_all_signals_are() -> None:
    assert judge(CALM, 2, step=7) == (H, "all signals are healthy", 7, None)
    assert Verdict() == (H, "all signals are healthy", 0, None)


@pytest.mark.parametrize(
    ("beyond", "votes", "level"), [(1, 1, C), (1, 2, S), (2, 2, C), (2, 3, S), (3, 3, C), (4, 3, C)]
)
def test_as_many_signals_beyond_as_votes_are_a_collapse(
    beyond: int, votes: int, level: Level
) -> None:
    bad = [Signal(str(i), C) for i in range(beyond)]
    assert level_of(*bad, *CALM, votes=votes) is level


def test_monitors_of_one_signal_have_one_vote() -> None:
    twice = [Signal("a", C, vote="kl"), Signal("b", C, vote="kl")]
    assert level_of(*twice, *CALM) is S
    assert level_of(*twice, Signal("c", C), *CALM) is C
    doubtful = [Signal("a", S, vote="kl"), Signal("b", S, vote="kl")]
    assert level_of(*doubtful, *CALM) is H
    assert level_of(*doubtful, Signal("c", S), *CALM) is S
    # nor do they count twice among those beyond their thresholds at once
    first, second, other = map(once_beyond, ("a", "b", "c"))
    first.signal = second.signal = "kl"  # type: ignore[misc]
    assert level_of(first, second, other, *CALM, votes=2) is H


def test_jump_needs_patience_in_however_many_signals_it_shows() -> None:
    assert level_of(*map(once_beyond, "abcd"), *CALM, votes=2) is H
    assert level_of(Signal("d", C), *map(once_beyond, "abc"), *CALM, votes=2) is S


def test_responses_that_change_near_the_reference_are_no_collapse() -> None:
    changed = [Signal("a", C), Signal("b", C), Signal("c", C)]
    assert level_of(*changed, Signal("k", H, vote="kl"), *CALM) is S
    assert level_of(*changed, once_beyond("x"), Signal("k", S, vote="kl"), *CALM) is S
    assert level_of(changed[0], Signal("k", C, vote="kl"), *CALM) is C
    # far away alone is one signal
    assert level_of(Signal("k", C, vote="kl"), *CALM) is S


def test_longer_and_surer_responses_are_one_signal_where_kl_is_not_watched() -> None:
    longer, surer = Signal("l", C, vote="length"), Signal("e", C, vote="entropy")
    longer.side, surer.side = "high", "low"
    assert level_of(longer, surer, *CALM) is S
    assert level_of(longer, surer, Signal("a", C), *CALM) is C
    assert level_of(longer, surer, Signal("k", C, vote="kl"), *CALM) is C
    surer.side = "high"
    assert level_of(longer, surer, *CALM) is C


def test_a_monitor_that_stands_in_has_no_vote_beside_another_of_its_signal() -> None:
    per_response, per_token = KLMonitor(), KLPerTokenMonitor()
    fed(per_response, *[40.0] * 3)
    beyond = Signal("a", C)
    assert level_of(per_response, per_token, beyond, *CALM) is C
    fed(per_token, *[0.02] * 3)  # times 2,000 tokens
    assert level_of(per_response, per_token, beyond) is S


def test_prompts_that_changed_vote_for_no_collapse_and_explain_the_rest() -> None:
    prompts = Signal("prompt length", C, vote="data")
    far, long = Signal("k", C, vote="kl"), Signal("a", C)
    verdict = judge([prompts, long, Signal("k", H, vote="kl"), *CALM], 2, step=4)
    sentence = "prompt length 20 is 20x its baseline"
    assert verdict == (Level.DATA_CHANGED, sentence, 4, Trouble.DATA_CHANGED)
    assert level_of(prompts, *CALM) is Level.DATA_CHANGED
    assert level_of(prompts, *CALM, votes=1) is Level.DATA_CHANGED
    assert level_of(prompts, far, long, *CALM) is C


def test_a_decisive_monitor_needs_no_second() -> None:
    assert level_of(Signal("a", C, decisive=True), *CALM, votes=5) is C
    assert level_of(Signal("a", S, decisive=True), *CALM, votes=1) is H


def test_fewer_signals_than_votes_must_all_be_beyond() -> None:
    assert level_of(Signal("a", C), votes=2) is C
    assert level_of(Signal("a", C), Signal("b", C), votes=3) is C
    assert level_of(Signal("a", C), Signal("b", H), votes=3) is S
    # a decisive one is not among those that are needed
    assert level_of(Signal("a", C), Signal("b", H, decisive=True), votes=2) is C
    assert level_of(Signal("b", H, decisive=True), votes=2) is H
    assert level_of(Signal("b", C, decisive=True), votes=2) is C


def test_two_suspicious_signals_make_a_suspicion_and_one_does_not() -> None:
    assert level_of(Signal("a", S), *CALM) is H
    assert level_of(Signal("a", S), Signal("b", S), *CALM) is S
    assert level_of(*(Signal(name, S) for name in "abcdef"), votes=1) is S


def test_the_only_signal_makes_a_suspicion_alone() -> None:
    assert level_of(Signal("a", S)) is S
    assert level_of(Signal("a", S), NonFiniteMonitor()) is S


def test_a_single_doubt_is_told_without_an_alarm() -> None:
    verdict = judge([Signal("a", S), *CALM], 2, step=3)
    assert verdict == (H, "not enough for a suspicion: a 8 is 8x its baseline", 3, None)


def fed(monitor: Monitor, *values: float) -> None:
    for value in values:
        monitor.observe(value)


def test_the_worst_come_first_and_else_the_order_given() -> None:
    monitors = [Signal("a", S), Signal("b", C), Signal("c", H), Signal("d", S), Signal("e", C)]
    verdict = judge([once_beyond("f"), *monitors], 2, step=1)
    assert [reason.split()[0] for reason in verdict.sentence.split(", ")] == [
        "b",
        "e",
        "f",
        "a",
        "d",
    ]


def test_a_suspicion_without_a_meaning_is_its_signals() -> None:
    verdict = judge([Signal("b", S), Signal("a", C), *CALM], 2, step=1)
    assert verdict == (S, "a 20 is 20x its baseline, b 8 is 8x its baseline", 1, None)


def test_a_suspicion_says_what_it_perhaps_means() -> None:
    length = LengthMonitor(low_ratio=0.5, baseline_steps=4, patience=2, horizon=0)
    fed(length, *[20.0] * 4, 5.0, 5.0)
    level, sentence, _, trouble = judge([length, *CALM], 2, step=1)
    assert trouble is Trouble.EXPLOITING
    assert (level, sentence.partition(": ")[2]) == (S, "perhaps the policy cuts its answers short")


def test_metrics_that_are_not_finite_are_a_broken_computation() -> None:
    broken = NonFiniteMonitor(patience=1)
    broken.observe(broken.read(StepMetrics({}, {}, ("ppo/policy_loss",))))
    verdict = judge([broken, *CALM], 2, step=4)
    sentence = "ppo/policy_loss not finite: the computation is broken"
    assert verdict == (C, sentence, 4, Trouble.BROKEN)


BROKEN, EXPLOITING, MONOTONOUS = Trouble.BROKEN, Trouble.EXPLOITING, Trouble.MONOTONOUS
EXPLOITS = "the policy is exploiting its reward"
REPEATS = "the policy repeats itself"
LANGUAGE = "the policy loses its language"
SHORT = "the policy cuts its answers short"
ONE_ANSWER = "the policy gives one answer to everything"
VARIETY = "the policy has lost its variety"
LOGPROBS = "rollouts and updates compute log-probs differently"
CRITIC = "the critic does not follow the returns"

CONCLUSIONS = [  # signals, the meaning, and the kinds of trouble from the gravest on
    ("non-finite+", "the computation is broken", [BROKEN]),
    ("non-finite+ kl+ length+", "the computation is broken", [BROKEN, EXPLOITING]),
    ("kl+ length+", EXPLOITS, [EXPLOITING]),
    ("kl+ entropy-", VARIETY, [MONOTONOUS]),
    ("kl+ kl++ entropy-", EXPLOITS, [EXPLOITING, MONOTONOUS]),
    ("kl+ entropy- length+", EXPLOITS, [EXPLOITING, MONOTONOUS]),
    ("kl+ reward-", EXPLOITS, [EXPLOITING, MONOTONOUS]),
    ("kl+ ensemble+", EXPLOITS, [EXPLOITING]),
    ("kl+ kl++ opening+ length+", ONE_ANSWER, [EXPLOITING, MONOTONOUS]),
    ("kl+ opening+", VARIETY, [MONOTONOUS]),
    ("kl+ repetition-", VARIETY, [MONOTONOUS]),
    ("kl+ reward+", EXPLOITS, [EXPLOITING]),
    ("kl+ reward+ entropy- ratio+", EXPLOITS, [EXPLOITING, BROKEN, MONOTONOUS]),
    ("kl+ length- entropy-", SHORT, [EXPLOITING, MONOTONOUS]),
    ("length-", SHORT, [EXPLOITING]),
    ("repetition- length+", REPEATS, [EXPLOITING, MONOTONOUS]),
    ("entropy+", LANGUAGE, [EXPLOITING]),
    ("entropy+ kl+", LANGUAGE, [EXPLOITING]),
    ("kl+", EXPLOITS, [EXPLOITING]),
    ("length+", EXPLOITS, [EXPLOITING]),
    ("reward+ length+", EXPLOITS, [EXPLOITING]),
    ("repetition- entropy-", VARIETY, [MONOTONOUS]),
    ("entropy-", VARIETY, [MONOTONOUS]),
    ("opening+", VARIETY, [MONOTONOUS]),
    ("repetition-", VARIETY, [MONOTONOUS]),
    ("entropy- critic-", VARIETY, [MONOTONOUS, BROKEN]),
    ("ratio+", LOGPROBS, [BROKEN]),
    ("ratio- critic-", LOGPROBS, [BROKEN]),
    ("sampler+", LOGPROBS, [BROKEN]),
    ("critic-", CRITIC, [BROKEN]),
    ("negative-kl- kl+", "the samples are not the policy's", [BROKEN, EXPLOITING]),
    ("score- entropy-", "the run unlearns what its reward asks for", [BROKEN, MONOTONOUS]),
    ("truncation+ length+", EXPLOITS, [EXPLOITING]),
]


@pytest.mark.parametrize(("seen", "meaning", "troubles"), CONCLUSIONS)
def test_conclusion_follows_from_the_signals_seen(
    seen: str, meaning: str, troubles: list[Trouble]
) -> None:
    conclusions = conclude({*seen.split()})
    assert conclusions[0].meaning == meaning
    assert [conclusion.trouble for conclusion in conclusions] == troubles


@pytest.mark.parametrize("seen", ["", "length?", "critic+ kl- groups+", "x+ y-"])
def test_signals_without_a_known_meaning_have_no_conclusion(seen: str) -> None:
    assert conclude({*seen.split()}) == []


@pytest.mark.parametrize("meaning", sorted({meaning for _, meaning, _ in CONCLUSIONS}))
def test_every_conclusion_says_what_to_do_next(meaning: str) -> None:
    assert advise(f"a 20 is 2x its baseline, b 8 is 2x its baseline: perhaps {meaning}")
    assert advise(f"a: {meaning}") == advise(f"b: perhaps {meaning}; also monotonous")
    assert advise("a 20 is 2x its baseline") == ""


def test_every_conclusion_speaks_of_signals_that_the_defaults_watch() -> None:
    sides = set()
    for monitor in default_monitors():
        if monitor.high is not None or monitor.high_ratio is not None:
            sides.add(f"{monitor.vote}+")
        if monitor.low is not None or monitor.low_ratio is not None:
            sides.add(f"{monitor.vote}-")
    sides |= {"kl++"}  # a KL that decides alone
    conclusions = {c.meaning for one in sides for other in sides for c in conclude({one, other})}
    assert conclusions == {meaning for _, meaning, _ in CONCLUSIONS}


def test_verdict_names_the_gravest_trouble_and_mentions_the_others() -> None:
    far, sure = Signal("a", C, vote="kl"), Signal("b", C, vote="entropy")
    sure.side = "low"
    verdict = judge([far, sure, *CALM], 2, step=1)
    assert verdict.trouble is Trouble.MONOTONOUS
    assert verdict.sentence.endswith(f": {VARIETY}")
    longer = Signal("c", C, vote="length")
    verdict = judge([far, sure, longer, *CALM], 2, step=1)
    assert verdict.trouble is Trouble.EXPLOITING
    assert verdict.sentence.endswith(f": {EXPLOITS}; also monotonous")
    # what is only doubtful does not name a collapse
    doubtful = Signal("c", S, vote="length")
    assert judge([far, sure, doubtful, *CALM], 2, step=1).trouble is Trouble.MONOTONOUS
    alone = judge([sure, *CALM], 2, step=1)
    assert alone.trouble is Trouble.MONOTONOUS
    assert alone.sentence.endswith(f": perhaps {VARIETY}")


def test_kl_that_decides_alone_is_no_mere_loss_of_variety() -> None:
    def run(far: float) -> Verdict:
        normal = {"rollout/kl_per_token": 0.01, "rollout/response_length": 200.0}
        normal |= {"rollout/entropy": 2.0}
        surer = {"rollout/kl_per_token": far, "rollout/entropy": 0.8}
        return judged([normal] * 10 + [normal | surer] * 4)

    assert (run(0.1).level, run(0.1).trouble) == (C, Trouble.MONOTONOUS)
    assert (run(0.3).level, run(0.3).trouble) == (C, Trouble.EXPLOITING)


def test_kinds_count_a_trouble_that_is_not_known_as_each() -> None:
    assert Verdict(C, "a 20", 1, Trouble.MONOTONOUS).is_one_of([Trouble.MONOTONOUS])
    assert not Verdict(C, "a 20", 1, Trouble.MONOTONOUS).is_one_of([Trouble.BROKEN])
    assert Verdict(C, "a 20", 1).is_one_of([Trouble.BROKEN])


def test_an_optional_monitor_votes_once_it_has_observed_a_step() -> None:
    silent = Monitor("gold", low=0.0, optional=True)
    # where only one signal votes, its threshold alone decides
    assert level_of(Signal("v", C), silent) is C
    silent.observe(1.0)
    assert level_of(Signal("v", C), silent) is S


def judged(steps: list[dict[str, float]], **options: Any) -> Verdict:
    """The verdict after the steps, by the default monitors."""
    watch = Watch(**options)
    for step in steps:
        watch.step(step)
    return watch.verdict


def test_negative_kl_is_broken() -> None:
    normal = {"rollout/kl": 0.1, "rollout/response_length": 50.0}
    verdict = judged([normal] * 10 + [normal | {"rollout/kl": -20.0}] * 6)
    assert (verdict.level, verdict.trouble) == (C, Trouble.BROKEN)
    assert verdict.sentence.endswith("the samples are not the policy's")
    assert judged([normal] * 10 + [normal | {"rollout/kl": -0.9}] * 6).level is H
    per_token = {"rollout/kl_per_token": -0.03, "rollout/response_length": 50.0}  # 1.5 nats
    assert judged([per_token] * 6).trouble is Trouble.BROKEN


def test_score_that_falls_by_its_spread_is_broken_and_not_exploiting() -> None:
    def run(last: float) -> Verdict:
        normal = {"rollout/kl_per_token": 0.01, "rollout/score": 3.0, "monitor/scores_std": 1.0}
        return judged([normal] * 10 + [normal | {"rollout/score": last}] * 10)

    assert run(2.1).level is H
    assert (run(1.9).level, run(1.9).trouble) == (S, Trouble.BROKEN)
    assert (run(0.9).level, run(0.9).trouble) == (C, Trouble.BROKEN)  # twice its spread
    assert run(9.0).level is H


def test_score_without_a_logged_spread_is_compared_with_its_noise() -> None:
    # differences of 0.1 or 0: a noise of 0.05 to 0.1, and 8 times that is at least 0.4
    scores = [0.0, 0.1, 0.1, 0.0] * 3

    def run(fall: float) -> Verdict:
        return judged([{"rollout/score": s} for s in [*scores, *(s - fall for s in scores)]])

    assert run(0.2).level is H
    fallen = run(2.0)
    assert (fallen.level, fallen.trouble) == (C, Trouble.BROKEN)


def test_samples_of_another_policy_are_broken_near_the_reference_too() -> None:
    step = {"rollout/kl_per_token": 0.01, "ppo/ratio_first": 1.0, "rollout/sampler_kl": 0.001}
    other = step | {"ppo/ratio_first": 1.3, "rollout/sampler_kl": 0.2}
    verdict = judged([step] * 10 + [other] * 3)
    assert (verdict.level, verdict.trouble) == (C, Trouble.BROKEN)
    assert judged([step] * 10 + [step | {"ppo/ratio_first": 1.1}] * 3).level is S


def test_truncation_is_a_signal_beside_length() -> None:
    normal = {"rollout/response_length": 100.0, "rollout/truncation_rate": 0.05}
    normal |= {"rollout/entropy": 1.9}
    looping = {"rollout/response_length": 240.0, "rollout/truncation_rate": 0.9}
    looping |= {"rollout/entropy": 0.3}
    verdict = judged([normal] * 10 + [looping] * 4)
    assert (verdict.level, verdict.trouble) == (C, Trouble.EXPLOITING)
    verdict = judged([normal] * 10 + [looping | {"rollout/truncation_rate": 0.05}] * 4)
    assert verdict.level is S  # longer and surer, as in training on answers that can be checked


def test_one_signal_of_the_defaults_alone_is_at_most_suspicious() -> None:
    entropy = [{"rollout/entropy": 1.9}] * 10 + [{"rollout/entropy": 0.3}] * 4
    assert judged(entropy).level is S
    assert judged(entropy, votes=2).level is S
    assert judged(entropy, votes=1).level is C
    # whoever watches one signal alone means it
    only = [KLMonitor(high=1.0), NonFiniteMonitor()]
    assert judged([{"rollout/kl": 2.0}] * 3, monitors=only).level is C
    gold_falls = [{"gold": 1.0}] * 3 + [{"gold": -1.0}] * 3
    assert judged(gold_falls, monitors=[Monitor("gold", low=0.0)], votes=2).level is C


def test_run_that_begins_in_trouble_is_told_from_its_first_steps() -> None:
    step = {"rollout/kl_per_token": 0.001, "rollout/response_length": 100.0}
    shares = {"rollout/truncation_rate": 0.95, "rollout/repeated_2": 0.7}
    shares |= {"rollout/opening_share": 0.9}
    assert judged([step | shares] * 3).level is C
    below = {"rollout/truncation_rate": 0.94, "rollout/repeated_2": 0.69}
    assert judged([step | below | {"rollout/opening_share": 0.89}] * 3).level is H
    # one of them may belong to the task, such as an opening that a template asks for
    assert judged([step | {"rollout/opening_share": 1.0}] * 12).level is S


def test_two_signals_of_variety_are_monotonous_at_any_distance() -> None:
    normal = {"rollout/kl_per_token": 0.01, "rollout/response_length": 100.0}
    normal |= {"rollout/distinct_2": 0.8, "rollout/opening_share": 0.1}
    moved = {"rollout/distinct_2": 0.5, "rollout/opening_share": 0.5}
    verdict = judged([normal] * 10 + [normal | moved] * 3)
    assert (verdict.level, verdict.trouble) == (C, Trouble.MONOTONOUS)
    assert judged([normal] * 10 + [normal | {"rollout/distinct_2": 0.5}] * 3).level is S


@pytest.mark.parametrize(
    ("key", "start", "mild", "extreme", "trouble"),
    [
        ("rollout/repeated_2", 0.05, 0.45, 0.55, Trouble.MONOTONOUS),
        ("rollout/opening_share", 0.1, 0.75, 0.85, Trouble.MONOTONOUS),
        ("rollout/distinct_2", 0.5, 0.25, 0.15, Trouble.MONOTONOUS),
        ("rollout/entropy", 2.0, 0.3, 0.1, Trouble.MONOTONOUS),
        ("rollout/sampler_kl", 0.002, 0.05, 0.15, Trouble.BROKEN),
        ("ppo/ratio_first", 1.0, 1.1, 1.3, Trouble.BROKEN),
    ],
)
def test_extreme_signal_makes_a_collapse_alone(
    key: str, start: float, mild: float, extreme: float, trouble: Trouble
) -> None:
    near = {"rollout/kl_per_token": 0.01, "rollout/response_length": 100.0}
    assert judged([near | {key: start}] * 10 + [near | {key: mild}] * 3).level is S
    verdict = judged([near | {key: start}] * 10 + [near | {key: extreme}] * 3)
    assert (verdict.level, verdict.trouble) == (C, trouble)


def test_loops_within_responses_are_harm_where_the_policy_has_left_its_reference() -> None:
    normal = {"rollout/kl_per_token": 0.01, "rollout/response_length": 14.0}
    normal |= {"rollout/distinct_2": 0.3, "rollout/repeated_2": 0.01}
    alike = normal | {"rollout/kl_per_token": 0.2, "rollout/distinct_2": 0.15}  # 2.8 nats
    assert judged([normal] * 10 + [alike] * 3).trouble is Trouble.MONOTONOUS
    looping = alike | {"rollout/repeated_2": 0.25}
    assert judged([normal] * 10 + [looping] * 3).trouble is Trouble.EXPLOITING
    near = looping | {"rollout/kl_per_token": 0.01, "rollout/repeated_2": 0.6}
    assert judged([normal] * 10 + [near] * 3).trouble is Trouble.MONOTONOUS


def test_graver_trouble_at_the_same_level_is_news_and_a_lesser_one_is_not() -> None:
    normal = {"rollout/kl_per_token": 0.01, "rollout/response_length": 100.0}
    normal |= {"rollout/distinct_2": 0.8, "rollout/opening_share": 0.1}
    monotonous = normal | {"rollout/distinct_2": 0.5, "rollout/opening_share": 0.5}
    exploiting = monotonous | {"rollout/kl_per_token": 0.1, "rollout/response_length": 300.0}
    steps = (
        [normal] * 10 + [monotonous] * 4 + [exploiting] * 4 + [monotonous] * 4 + [exploiting] * 4
    )
    watch = Watch()
    news = []
    for step in steps:
        # as a run that is resumed at each step
        resumed = Watch()
        resumed.load_state_dict(watch.state_dict())
        watch = resumed
        verdict = watch.step(step)
        if watch.is_news:
            news.append((verdict.level, verdict.trouble))
    assert news == [(C, Trouble.MONOTONOUS), (C, Trouble.EXPLOITING)]


def test_prompts_without_a_spread_are_told_and_are_no_collapse() -> None:
    normal = {"rollout/kl_per_token": 0.01, "rollout/response_length": 100.0}
    watch = Watch()
    for _ in range(10):
        assert watch.step(normal | {"rollout/informative_share": 0.4}).level is Level.HEALTHY
    levels = [watch.step(normal | {"rollout/informative_share": 0.05}).level for _ in range(8)]
    assert levels == [Level.HEALTHY] * 4 + [Level.SUSPICIOUS] * 4
    message = "share of prompts whose responses score the same 0.95"
    assert watch.verdict.sentence.startswith(message)
    # One signal more is still no collapse: the share has no vote.
    far = normal | {"rollout/kl_per_token": 0.14, "rollout/uninformative_share": 0.95}
    assert [watch.step(far).level for _ in range(5)][-1] is Level.SUSPICIOUS
    # Nor does it stand in the way of one.
    far |= {"rollout/response_length": 300.0}
    assert [watch.step(far).level for _ in range(2)][-1] is Level.COLLAPSED


def test_share_of_trl_is_read_as_it_is() -> None:
    names = find_names(["kl", "completions/mean_length", "frac_reward_zero_std"])
    watch = Watch(names=names)
    step = {"kl": 0.01, "completions/mean_length": 100.0, "frac_reward_zero_std": 0.95}
    assert [watch.step(step).level for _ in range(6)][-2:] == [Level.SUSPICIOUS] * 2
