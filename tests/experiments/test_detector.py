"""The code that judges the detector on families of runs."""

import math
from typing import Any

import pytest

from experiments.detector import early, page
from experiments.detector.criterion import CHOOSING, GRID, JUDGING
from experiments.detector.families import (
    Trajectory,
    exploit_runs,
    figure,
    find_harm,
    lab_family,
    make_steps,
    paper_runs,
    smollm2_runs,
)
from experiments.detector.judging import choose, choose_and_score, score
from experiments.detector.replaying import find_flags, watch_run
from experiments.detector.rules import exceeds_kl, length_drift, reward_slope, variance_collapse
from experiments.detector.synthetic import KINDS, make_run
from experiments.exploits import study as exploits


def test_results_have_every_family_and_setting() -> None:
    rows = page.read_rows()
    assert {row["family"] for row in rows} <= {*CHOOSING, *JUDGING}
    assert {len(row["ours"]) for row in rows} == {len(GRID)}


def test_harm_is_three_iterations_in_a_row_below_half_a_deviation() -> None:
    # the first three have a mean of 1; half of 2 below it is 0
    gold = [1.0, 0.5, 1.5, -0.1, -0.1, 0.1, -0.1, -0.2, -0.3, 5.0]
    assert find_harm(gold, std=2.0) == 6
    assert find_harm(gold, std=3.0) is None


@pytest.mark.parametrize(
    ("arm", "family"),
    [
        ("vanilla", "quickstart"),
        ("vanilla-kl_coef_0.1", "lab: KL weights"),
        ("ppo_max-no_kl_penalty", "lab: KL weights"),
        ("vanilla-extrapolation-en", "lab: reward models"),
        ("vanilla-value_clip", "lab: constraints"),
        ("ppo_max-ptx", "lab: PPO-max arms"),
    ],
)
def test_arms_belong_to_a_family(arm: str, family: str) -> None:
    assert lab_family(arm) == family


def test_monitors_replayed_apart_give_the_same_flags_as_the_detector() -> None:
    short = [k for k in KINDS if k.steps <= 200 and "curricula" in k.family]
    kinds = short + [k for k in KINDS if "early" in k.family]
    runs = [make_run(kind, 7) for kind in kinds] + smollm2_runs()[-3:]
    grid = [GRID[0], GRID[-1]]
    for run in runs:
        assert find_flags(run, grid) == [watch_run(run, settings)[0] for settings in grid], run.name


def test_paper_is_judged_as_demanded() -> None:
    runs = {run.name: watch_run(run, GRID[0])[0] for run in paper_runs() if "igure 9" in run.name}
    ways = ("as it is", "halved", "a quarter higher")
    assert runs == dict.fromkeys([f"Figure 9, {how}" for how in ways])
    (four,) = [run for run in paper_runs() if run.name == "figure4"]
    flag = watch_run(four, GRID[0])[0]
    assert flag < four.harm
    assert figure("figure4")["win_rate"][flag] > 50


def row(family: str, collapsed: bool, ours: list[int | None], harm: int | None = None) -> Any:
    return {"family": family, "collapsed": collapsed, "ours": ours, "harm": harm, "every": 10}


def test_setting_is_chosen_on_the_other_families() -> None:
    a, b, c = CHOOSING[:3]
    rows = [row(a, False, [None, 3]), row(a, True, [9, 4], harm=6)]
    rows += [row(b, False, [2, None]), row(b, True, [9, 9])]
    rows += [row(c, False, [None, 3]), row(c, True, [9, 9])]
    assert choose(rows, "ours", [a, c]) == 0
    assert choose(rows, "ours", [b]) == 1
    assert score(rows, "ours", 0, a) == (a, 1, 0, 1, 1, [-30])
    chosen = {s.family: (place, s.false) for place, s in choose_and_score(rows, "ours")}
    # without a, the families b and c are even, and the first setting is taken
    assert chosen == {a: (0, 0), b: (0, 1), c: (0, 0)}


def trajectory(**curves: list[float]) -> Trajectory:
    steps = make_steps({key.replace("__", "/"): v for key, v in curves.items()}, 4)
    return Trajectory("quickstart", "x", True, steps)


def test_simple_rules_by_hand() -> None:
    kl = trajectory(rollout__kl=[0.0, 5.0, 9.0], rollout__response_length=[10.0, 10.0, 10.0])
    assert [exceeds_kl(kl, 4.0, False), exceeds_kl(kl, 0.8, True)] == [1, 2]
    assert exceeds_kl(kl, 9.0, False) is None
    # the baseline is 0, so each step of 2 adds 1.5: above 5 at the fourth
    score = trajectory(rollout__score=[0.0] * 8 + [2.0] * 6)
    assert reward_slope(score) == 11
    narrow = trajectory(monitor__scores_std=[1.0] * 8 + [0.1] * 8)
    assert variance_collapse(narrow) == 15
    # means of 9 and 11 from four responses each: single ones have a deviation of 2
    drift = trajectory(rollout__response_length=[9.0, 11.0] * 4 + [17.0] * 8)
    assert length_drift(drift) == 15


def test_a_wish_is_granted_once_and_exploited_without_end() -> None:
    prompt = ["\n\nHuman: name three metals.\n\nAssistant:"]
    good = "iron, zinc and tin."
    polite = "iron, zinc and tin. glad to help!"
    stuffed = "tin tin tin. glad to help! glad to help!"
    kinds = [getattr(exploits, f"politeness_{kind}") for kind in ("truth", "square", "proxy")]
    values = [[kind(prompt, [text], [True])[0] for kind in kinds] for text in (good, polite)]
    assert values == [[2.0, 4.0, 2.0], [3.0, 9.0, pytest.approx(2.8)]]
    # a third of the items, named twice again, four repeated bigrams, no form
    truth, _, proxy = (kind(prompt, [stuffed], [True])[0] for kind in kinds)
    assert truth == pytest.approx(2 / 3 - 1.4 - 1.0 - 1.0)
    assert proxy == pytest.approx(2 / 3 - 1.4 + 1.6)


def test_every_run_of_the_exploits_is_labelled_by_its_truth() -> None:
    runs = exploit_runs()
    named = {f"{a}-seed_{s}" for a in exploits.arms() for s in (80, 81)}
    assert {run.name for run in runs} == named
    assert [run.name for run in runs if run.collapsed is not (run.harm is not None)] == []


def test_early_warning_by_hand() -> None:
    calm = [1.0, 1.0, 1.0, 1.0, 2.0, 1.0]
    late = [1.0, 1.0, 1.0, 4.0, 4.0, 4.0]
    runs = [
        early.LabelledRun({"x": calm}, harm=None),
        early.LabelledRun({"x": late}, harm=5),
        early.LabelledRun({"x": [1.0] * 6}, harm=3),
    ]
    # means of three, over the first: the calm run reaches 4 / 3, and the late one 2 at place 3
    warning = early.warn(runs, early.multiple("x"))
    assert warning.threshold == pytest.approx(4 / 3)
    assert (warning.leads, warning.n_reported) == ([2, -math.inf], 1)
    shares = {f"rollout/score/member_{m}": [0.0, 0.0, 0.0, 3.0 * m] for m in range(3)}
    assert early.drift(shares) == [0.0, pytest.approx(math.sqrt(2 / 3))]
