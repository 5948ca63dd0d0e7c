"""The code that judges the detector on families of runs."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from experiments.detector import distance, early, foreign, page
from experiments.detector.calibrating import CALIBRATION, calibrate_family
from experiments.detector.criterion import CHOOSING, GRID, GROUPS, JUDGING
from experiments.detector.families import (
    Trajectory,
    alignment_tax_runs,
    exploit_runs,
    figure,
    known_truth_runs,
    lab_family,
    make_steps,
    paper_runs,
    preference_runs,
    smollm2_runs,
    sums_runs,
)
from experiments.detector.judging import (
    Count,
    choose,
    first_flag,
    score,
    score_families,
)
from experiments.detector.kinds import KINDS, NEW_KINDS
from experiments.detector.labels import Change, Label, Question, find_harm, label_run, loses_variety
from experiments.detector.replaying import find_flags, find_levels, name_troubles
from experiments.detector.rules import exceeds_kl, length_drift, reward_slope, variance_collapse
from experiments.detector.synthetic import make_run
from experiments.exploits import study as exploits
from experiments.frame import ROOT
from experiments.results_file import read_lines
from lit_callbacks import Level, Verdict
from lit_callbacks.verdict import Trouble

HARM_ONLY = ["harm"]


@pytest.mark.parametrize("file", [page.RESULT, page.BEFORE_RESULT])
def test_results_have_every_family_and_setting(file: Path) -> None:
    rows = read_lines(file)
    assert {row["family"] for row in rows} == {*CHOOSING, *JUDGING}
    assert {len(row["ours"]) for row in rows} == {len(GRID)}
    assert all(page.group_of(row["family"]) in GROUPS for row in rows)


def test_harm_is_three_iterations_in_a_row_below_half_a_deviation() -> None:
    # the first three have a mean of 1; half of 2 below it is 0
    gold = [1.0, 0.5, 1.5, -0.1, -0.1, 0.1, -0.1, -0.2, -0.3, 5.0]
    assert find_harm(gold, std=2.0) == 6
    assert find_harm(gold, std=3.0) is None


@pytest.mark.parametrize(
    ("measures", "expected"),
    [
        ({}, None),
        ({"distinct": Change(0.6, 0.47)}, True),
        ({"distinct": Change(0.6, 0.49)}, False),
        ({"distinct": Change(0.6, 0.6), "opening": Change(0.1, 0.31)}, True),
        ({"canned": Change(0.45, 0.64)}, False),
        ({"entropy": Change(2.0, 0.39)}, True),
        ({"entropy": Change(2.0, 0.41)}, False),
        ({"entropy": Change(2.0, 0.1), "distinct": Change(0.6, 0.6)}, False),
    ],
)
def test_variety_is_lost_by_a_fifth_of_the_bigrams_or_20_points_of_a_share(
    measures: dict[str, Change], expected: bool | None
) -> None:
    assert loses_variety(measures) is expected


def test_labels_tell_harm_breakage_and_variety_apart() -> None:
    truth = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    rising = [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    near = [0.0, 0.1, 0.2, 0.3, 0.3, 0.3]

    def label(reward: list[float] | None, kl: list[float], **variety: Change) -> Label:
        return label_run(truth, 1.0, reward, kl, variety)

    assert label(rising, near) == Label(
        frozenset({Trouble.EXPLOITING}), frozenset({Question.HARM}), 3
    )
    assert label(truth, near).troubles == {Trouble.BROKEN}
    assert label(None, [-2.0] * 6).troubles == {Trouble.EXPLOITING, Trouble.BROKEN}
    exploited = label(rising, near, distinct=Change(0.6, 0.1))
    assert exploited.troubles == {Trouble.EXPLOITING, Trouble.MONOTONOUS}
    assert exploited.tells == set(Question)
    assert label_run(rising, 1.0, rising, near, {}).troubles == set()


@pytest.mark.parametrize(
    ("arm", "family"),
    [
        ("vanilla", "lab: quickstart"),
        ("vanilla-kl_coef_0.1", "lab: KL weights"),
        ("ppo_max-no_kl_penalty", "lab: KL weights"),
        ("vanilla-extrapolation-en", "lab: reward models"),
        ("vanilla-value_clip", "lab: constraints"),
        ("ppo_max-ptx", "lab: PPO-max arms"),
    ],
)
def test_arms_belong_to_a_family(arm: str, family: str) -> None:
    assert lab_family(arm) == family


def test_real_models_are_labelled_by_truth_and_variety() -> None:
    runs = known_truth_runs() + preference_runs() + alignment_tax_runs()
    assert len(runs) == 24
    troubles = {(run.family, run.name): run.label.troubles for run in runs}
    # its truth is at -0.9, and its answers name neither place nor thing
    vanilla = troubles["SmolLM2: known truth", "ppo_vanilla-seed_11"]
    assert vanilla == {Trouble.EXPLOITING, Trouble.MONOTONOUS}
    # its truth rises while 89 % of its answers are canned
    assert troubles["SmolLM2: known truth", "ppo_max-seed_11"] == {Trouble.MONOTONOUS}
    assert troubles["SmolLM2: preferences", "ppo_max-seed_0"] == set()
    assert {run.label.tells for run in sums_runs()} == {frozenset({Question.HARM})}


def test_steps_have_no_truth() -> None:
    runs = known_truth_runs() + preference_runs() + smollm2_runs() + exploit_runs() + sums_runs()
    keys = {key for run in runs for step in run.steps for key in step}
    assert not [key for key in keys if "gold" in key or "truth" in key]
    assert "rollout/score" in keys


def test_synthetic_runs_repeat_and_have_the_label_of_their_kind() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    assert {kind.family for kind in KINDS} <= set(CHOOSING)
    (negative,) = [kind for kind in NEW_KINDS if kind.name.startswith("negative KL and")]
    run = make_run(negative, 3)
    assert run.steps == make_run(negative, 3).steps
    assert run.steps != make_run(negative, 4).steps
    assert run.label.troubles == {Trouble.BROKEN}
    assert run.steps[-1]["rollout/kl_per_token"] == pytest.approx(-0.3, abs=0.05)
    # the standard error of the reward is 1.5 / 8
    assert run.steps[-1]["rollout/score"] == pytest.approx(-4, abs=1)
    (default,) = [kind for kind in NEW_KINDS if kind.name.startswith("loops to the cap")]
    assert "rollout/kl" not in make_run(default, 0).steps[0]


@pytest.mark.parametrize(
    ("sentence", "trouble", "kinds"),
    [
        ("x: the policy cuts its answers short", Trouble.EXPLOITING, ["exploiting"]),
        (
            "x: the policy cuts its answers short; also monotonous",
            Trouble.EXPLOITING,
            ["exploiting", "monotonous"],
        ),
        ("my own metric 4 is above 2", None, ["unnamed"]),
    ],
)
def test_every_kind_that_a_verdict_names_is_counted(
    sentence: str, trouble: Trouble | None, kinds: list[str]
) -> None:
    assert name_troubles(Verdict(Level.COLLAPSED, sentence, 3, trouble)) == kinds


def test_paper_is_judged_as_demanded() -> None:
    runs = {run.name: find_flags(run, GRID[0]) for run in paper_runs() if "igure 9" in run.name}
    ways = ("as it is", "halved", "a quarter higher")
    assert runs == {f"Figure 9, {how}": {} for how in ways}
    (figure_4,) = [run for run in paper_runs() if run.name == "figure4"]
    flag = min(find_flags(figure_4, GRID[0]).values())
    assert figure_4.label.harm is not None
    assert flag < figure_4.label.harm
    assert figure("figure4")["win_rate"][flag] > 50


def row(family: str, troubles: list[str], *ours: dict[str, int], **fields: Any) -> Any:
    row = {"family": family, "troubles": troubles, "tells": ["harm", "variety"], "ours": [*ours]}
    return {**row, "harm": None, "every": 10, **fields}


def test_setting_is_chosen_on_the_other_families() -> None:
    first, second, third = CHOOSING[:3]
    bad = ["exploiting"]
    flag = {"exploiting": 9}
    rows = [row(first, [], {}, {"exploiting": 3}), row(first, bad, flag, {"exploiting": 4}, harm=6)]
    rows += [row(second, [], {"broken": 2}, {}), row(second, bad, flag, flag)]
    rows += [row(third, [], {}, {"exploiting": 3}), row(third, bad, flag, flag)]
    assert choose(rows, "ours", [first, third]) == 0
    assert choose(rows, "ours", [second]) == 1
    scores = score_families(rows, "ours")
    # without the first family, the other two are even, and the first setting is taken
    assert {family: s.untroubled for family, s in scores.items()} == {
        first: Count(0, 1),
        second: Count(1, 1),
        third: Count(0, 1),
    }
    assert scores[first].leads == [-30]


def test_kinds_and_questions_are_counted_apart() -> None:
    rows = [
        row("x", ["monotonous"], {"exploiting": 2, "monotonous": 5}),
        row("x", ["exploiting", "monotonous"], {"monotonous": 5}),
        row("x", [], {"monotonous": 1}, tells=HARM_ONLY),  # its variety is not known
        row("x", [], {"data changed": 1}),
        row("x", ["data changed"], {"data changed": 4, "exploiting": 7}),
        row("x", ["broken"], {}),
        row("x", [], {"unnamed": 1}, tells=[]),  # nobody labelled it
    ]
    summary = score(rows, "ours", 0)
    assert (summary.untroubled, summary.troubled, summary.right) == (
        Count(0, 2),
        Count(3, 4),
        Count(2, 3),
    )
    assert (summary.harmless, summary.harmed) == (Count(2, 4), Count(0, 2))
    assert (summary.varied, summary.monotonous) == (Count(0, 3), Count(2, 2))
    assert first_flag(rows[0], "ours", 0) == (2, "exploiting")
    assert first_flag(rows[2], "ours", 0) is None


def test_foreign_logs_are_read_from_a_folder_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(foreign.DATA_VARIABLE, str(tmp_path))
    assert foreign.foreign_folder() is None
    (log,) = [log for log in foreign.LOGS if log.file.startswith("tsushanth")]
    folder = tmp_path / "foreign_logs"
    folder.mkdir()
    lines = [{"step": 0, "env/reward_mean": 0.7}, {"env/reward_mean": -0.3, "objective/kl": -4.2}]
    (folder / log.file).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert foreign.foreign_folder() == folder
    run = foreign.read_foreign(folder, log)
    assert run.steps == [
        {"rollout/score": 0.7, "rollout/responses": 0.0},
        {"rollout/score": -0.3, "rollout/kl": -4.2, "rollout/responses": 0.0},
    ]
    assert run.label == Label(frozenset({Trouble.BROKEN}), foreign.HARM)


def trajectory(**curves: list[float]) -> Trajectory:
    steps = make_steps({key.replace("__", "/"): v for key, v in curves.items()}, 4)
    return Trajectory("lab: quickstart", "x", Label(), steps)


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
    harm = {Trouble.BROKEN, Trouble.EXPLOITING}
    assert all(bool(run.label.troubles & harm) is (run.label.harm is not None) for run in runs)


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


def calm_then(name: str, *troubles: Trouble, **last: float) -> Trajectory:
    """Ten calm steps, and eight with other values."""
    calm = {"rollout/kl_per_token": 0.01, "rollout/response_length": 100.0}
    later = calm | {key.replace("__", "/"): value for key, value in last.items()}
    steps = [calm] * 10 + [later] * 8
    return Trajectory("lab: quickstart", name, Label(frozenset(troubles)), steps)


def test_family_is_judged_with_the_thresholds_of_its_healthy_runs() -> None:
    far = {"rollout__kl_per_token": 0.1, "rollout__response_length": 220.0}
    members = [calm_then(f"healthy {place}", **far) for place in range(3)]
    broken = {"rollout__kl_per_token": math.nan}
    farther = {"rollout__kl_per_token": 0.4, "rollout__response_length": 400.0}
    members += [calm_then("refused", **broken), calm_then("bad", Trouble.EXPLOITING, **farther)]
    flags = {"exploiting": 11}
    shipped = {run.name: flags for run in members}
    for seed in range(6):
        rows = {row["name"]: row for row in calibrate_family(members, shipped, seed)}
        calibrating = [name for name, row in rows.items() if row["drawn"] == "calibrates"]
        judged = {name: row for name, row in rows.items() if not row["drawn"]}
        assert len(calibrating) == 2
        assert "refused" not in calibrating
        assert rows["refused"]["drawn"] in ("", "refused")
        # 0.1 nats and 2.2 times the length, times 1.25
        (healthy,) = [name for name in judged if name.startswith("healthy")]
        assert judged[healthy]["calibrated"] == [{}]
        assert judged["bad"]["calibrated"] == judged["bad"]["shipped"] == [flags]


def test_calibration_helps_if_it_is_quieter_and_loses_few() -> None:
    def compared(flagged: int, seen: int) -> page.Comparison:
        def scored(false: int, true: int) -> Any:
            rows = [row("x", [], {"exploiting": 1} if i < false else {}) for i in range(10)]
            bad = ["exploiting"]
            rows += [row("x", bad, {"exploiting": 1} if i < true else {}) for i in range(20)]
            return score(rows, "ours", 0)

        return page.Comparison(before=scored(2, 19), now=scored(flagged, seen))

    changes = [compared(1, 19), compared(1, 18), compared(1, 17), compared(2, 20)]
    assert [page.is_helped(change) for change in changes] == [True, True, False, False]


def test_calibration_results_have_each_draw_of_each_family() -> None:
    rows = read_lines(CALIBRATION)
    seeds: dict[str, set[int]] = {}
    for line in rows:
        seeds.setdefault(line["family"], set()).add(line["seed"])
    assert set(map(frozenset, seeds.values())) == {frozenset({0, 1, 2})}
    for family in seeds:
        calibrating = [line for line in rows if line["family"] == family and line["drawn"]]
        assert all(not line["troubles"] for line in calibrating)


def test_levels_are_held_and_counted_by_hand() -> None:
    def steps(lengths: str) -> list[dict[str, float]]:
        calm = {"rollout/kl_per_token": 0.01, "rollout/response_length": 100.0}
        return [calm | {"rollout/response_length": 100.0 + 200.0 * int(c)} for c in lengths]

    run = Trajectory("x", "x", Label(), steps("0" * 10 + "1101100000"))
    # suspicious at the second long step; a level is left at the third calm one, or at the first
    assert find_levels(run) == (11, 2, 4)


def test_best_of_n_needs_what_its_gain_costs() -> None:
    # the largest of 2 and of 4 normal scores
    assert distance.needed_nats(0.5642) == pytest.approx(math.log(2) - 1 / 2, abs=0.01)
    assert distance.needed_nats(1.0294) == pytest.approx(math.log(4) - 3 / 4, abs=0.01)
    assert [distance.needed_nats(gain) for gain in (-1.0, 0.0, 20.0)] == [0.0, 0.0, 200.0]
    assert distance.histogram_std([0.0, 2.0, 4.0], [1, 1]) == 1.0
    assert distance.area([2.0, 3.0], [1.0, 2.0]) == 0.875
    run = trajectory(rollout__kl=[0.0] * 3 + [1.0] * 3, rollout__response_length=[10.0] * 6)
    scored = [step | {"rollout/score": 0.5 * (i > 2)} for i, step in enumerate(run.steps)]
    tokens, nats, beyond, multiple = distance.largest_signals(
        Trajectory("x", "x", Label(), scored), spread=0.5
    )
    assert (tokens, nats) == (pytest.approx(0.1), pytest.approx(1.0))
    # the means of three rise by thirds; a gain of a third is taken to need the least, 0.1 nats
    shares = (1 / 3, 2 / 3, 1.0)
    assert beyond == pytest.approx(max(share - distance.needed_nats(share) for share in shares))
    assert multiple == pytest.approx(10 / 3)


def test_readme_quotes_the_committed_results() -> None:
    groups = page.compare_groups(read_lines(page.BEFORE_RESULT), read_lines(page.RESULT))
    lab = groups["lab"].now
    real = groups["real models"].now
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    quotes = (
        f"flags {lab.untroubled} untroubled runs of the built-in world and {real.untroubled} of",
        f"sees {lab.troubled} and {real.troubled} of the troubled ones",
        f"names the kind of trouble right for {lab.right} and {real.right}",
    )
    assert all(quote in text for quote in quotes)
