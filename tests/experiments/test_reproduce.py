"""The reproduction of the paper's figures: its table, verdicts, figures and page.

Verdicts are checked by cases worked by hand, and the committed ones also in a second way.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from scipy import stats

import lit_rlhf
from experiments.frame import DOCS, ROOT
from experiments.reproduce import page, running, table
from experiments.reproduce.claims import CLAIMS, RULES
from experiments.reproduce.history import VERSIONS, judge_by
from experiments.reproduce.judging import (
    VERSION,
    Check,
    Claim,
    Projection,
    Runs,
    Value,
    Verdict,
    hash_rules,
    judge,
    project,
)
from experiments.reproduce.measuring import BINS, summarize_samples
from experiments.reproduce.running import RESULTS, Plan
from experiments.results_file import read_runs, write_run
from lit_rlhf.cli.configs import find_config
from lit_rlhf.tools.lab import World, render_prompt

A = table.Arm("a", overlays=("no_ptx",))
B = table.Arm("b", overlays=("no_kl_penalty",))
HIGHER = Check(Value(A, "gold"), ">", Value(B, "gold"))


def run_of(gold: float, length: float = 8.0) -> dict[str, Any]:
    return {"samples": {"gold": [0.0, gold], "response_length": [8.0, length]}, "curves": {}}


def claim(*checks: Check, premise: tuple[Check, ...] = (), then: tuple[Check, ...] = ()) -> Claim:
    return Claim(
        source="Section 0",
        text="A is better.",
        figure="fig4",
        checks=checks,
        premise=premise,
        then=then,
    )


def results(*golds: tuple[float, float], lengths: tuple[float, float] = (8, 8)) -> dict[int, Runs]:
    """Results of seeds with these final golds of A and B."""
    return {
        seed: {A.name: run_of(gold_a, lengths[0]), B.name: run_of(gold_b, lengths[1])}
        for seed, (gold_a, gold_b) in enumerate(golds)
    }


WON = (1.0, 0.0)
LOST = (0.0, 1.0)
SPREAD = ((1.2, 0.0), (0.9, 0.0), (1.1, 0.0))  # t interval 1.07 ± 2.48 * 0.153 = 0.69 to 1.45
NO_MORE = Check(Value(A, "gold"), "<", Value(B, "gold"), margin=0.5)
BY_07 = replace(HIGHER, margin=0.7)
BY_06 = replace(HIGHER, margin=0.68)
# fails alone, by 0.47 ± 0.38, and not as one of two, by 0.47 ± 6.205 * 0.153 / 3**.5 = 0.47 ± 0.55
BARELY = replace(NO_MORE, margin=0.6)


@pytest.mark.parametrize(
    ("runs_by_seed", "claim", "verdict"),
    [
        (results(*SPREAD), claim(HIGHER), Verdict.CONFIRMED),
        (results(*SPREAD), claim(BY_06), Verdict.CONFIRMED),
        (results(*SPREAD), claim(BY_07), Verdict.UNDECIDED),
        (results(WON, WON, LOST), claim(HIGHER), Verdict.UNDECIDED),  # two of three is no verdict
        (results(WON, LOST, LOST, LOST), claim(HIGHER), Verdict.UNDECIDED),
        (results(LOST, LOST, LOST), claim(HIGHER), Verdict.CONTRADICTED),
        (results(*SPREAD), claim(HIGHER, NO_MORE), Verdict.PARTLY),
        (results(*SPREAD), claim(HIGHER, BY_07), Verdict.UNDECIDED),
        (results(*SPREAD), claim(NO_MORE, BY_07), Verdict.CONTRADICTED),
        (results(*SPREAD), claim(NO_MORE, then=(HIGHER,)), Verdict.CONTRADICTED),  # saves nothing
        (results(*SPREAD), claim(HIGHER, then=(NO_MORE,)), Verdict.PARTLY),
        (results(*SPREAD), claim(BARELY), Verdict.CONTRADICTED),
        (results(*SPREAD), claim(BARELY, BY_07), Verdict.UNDECIDED),
        (results(*SPREAD), claim(BARELY, BARELY), Verdict.UNDECIDED),
        (results(*SPREAD), claim(HIGHER, BARELY), Verdict.UNDECIDED),
        (results(*SPREAD), claim(HIGHER, then=(BARELY,)), Verdict.UNDECIDED),
        (results(*SPREAD), claim(NO_MORE, BY_06), Verdict.CONTRADICTED),  # holds alone, by 0.39
        (results(*SPREAD), claim(BY_06, BY_06), Verdict.CONFIRMED),  # all hold: no correction
        (results(*SPREAD), claim(HIGHER, premise=(BY_06, BY_06)), Verdict.CONFIRMED),
        (results(*SPREAD), claim(HIGHER, premise=(BARELY,)), Verdict.NOT_AT_THIS_SCALE),
        (results(*SPREAD), claim(HIGHER, premise=(BARELY, HIGHER)), Verdict.UNDECIDED),
        (results(*SPREAD), claim(HIGHER, premise=(NO_MORE,)), Verdict.NOT_AT_THIS_SCALE),
        (results(*SPREAD), claim(HIGHER, premise=(BY_07,)), Verdict.UNDECIDED),
        (results(*SPREAD), claim(HIGHER, premise=(BY_07, NO_MORE)), Verdict.NOT_AT_THIS_SCALE),
        (results(WON, WON), claim(HIGHER), Verdict.NOT_RUN),
        ({}, claim(HIGHER), Verdict.NOT_RUN),
        ({s: {A.name: run_of(1.0)} for s in range(3)}, claim(HIGHER), Verdict.NOT_RUN),
        (results((math.nan, 0.0), WON, WON), claim(HIGHER), Verdict.UNDECIDED),
    ],
)
def test_verdict_of_a_claim_follows_from_its_intervals(
    runs_by_seed: dict[int, Runs], claim: Claim, verdict: Verdict
) -> None:
    assert judge(claim, runs_by_seed).verdict is verdict


def test_seeds_that_would_decide_a_claim_by_hand() -> None:
    seeds = list(results(*SPREAD).values())
    # by 0.367 with a spread of 0.153: 4.303 * 0.153 / 3**.5 = 0.379, 3.182 * 0.153 / 4**.5 = 0.243
    assert project(claim(BY_07), seeds) == Projection(4, Verdict.CONFIRMED)
    # by 0.467: as one of two 6.205 * 0.153 / 3**.5 = 0.547, 4.177 * 0.153 / 4**.5 = 0.319
    assert project(claim(HIGHER, BARELY), seeds) == Projection(4, Verdict.PARTLY)
    assert project(claim(HIGHER), seeds) == Projection(3, Verdict.CONFIRMED)
    missing = list(results((math.nan, 0.0), WON, WON).values())
    assert project(claim(HIGHER), missing) is None


def test_comparison_says_what_the_correction_changes() -> None:
    runs_by_seed = results(*SPREAD)
    statement = claim(HIGHER, BARELY)
    plain, corrected = page.describe_checks(statement, judge(statement, runs_by_seed))
    assert plain.endswith(": holds, +0.69 to +1.45")
    assert corrected.endswith(": fails, -0.85 to -0.09; undecided as one of 2, -1.01 to +0.08")
    statement = claim(BY_06, BY_06)  # confirmed, which needs no correction
    assert page.describe_checks(statement, judge(statement, runs_by_seed))[0].endswith(
        ": holds, +0.01 to +0.77"
    )


# --- effects, by hand


def runs(gold_a: list[float], gold_b: list[float], **others: Any) -> Runs:
    ours = {"samples": {"gold": gold_a}, "curves": {}, **others}
    return {A.name: ours, B.name: {"samples": {"gold": gold_b}, "curves": {}}}


@pytest.mark.parametrize(
    ("check", "seed_runs", "effect"),
    [
        (Check(Value(A, "gain"), ">", 0.3), runs([0.5, 0.0, 1.0], []), 0.2),
        (Check(Value(A, "gain"), "<", -0.3), runs([0.5, -9.0], []), 0.7),  # counted down to -1
        (Check(Value(A, "gain"), ">", Value(B, "gain")), runs([0.5, 1.0], [0, -9]), 1.5),
        (Check(Value(A, "gain"), ">", Value(B, "gain")), runs([0.5, -2], [0, -9]), math.nan),
        (Check(Value(A, "gold"), "<", Value(B, "gold"), margin=-0.2), runs([1], [3]), 1.8),
        (Check(Value(A, "gold", "peak"), "~", Value(B, "gold"), margin=9), runs([1, 0], [3]), -2),
        (Check(Value(A, "kl.x"), ">", Value(A, "y"), 3.0), runs([], [], kl={"x": 6}, y=1), 0.6931),
        (
            Check(Value(A, "kl.x"), ">", Value(A, "y"), 3.0),
            runs([], [], kl={"x": 0}, y=1),
            math.nan,
        ),
        (
            Check(Value(A, "first_warning.kl"), "<", float(table.ITERATIONS)),
            runs([], [], first_warning={"kl": None}),
            -1.0,  # never is after the end
        ),
    ],
)
def test_effect_of_a_seed_equals_the_difference_by_hand(
    check: Check, seed_runs: Runs, effect: float
) -> None:
    assert check.effect(seed_runs) == pytest.approx(effect, abs=1e-4, nan_ok=True)


def test_values_of_curves_and_histograms() -> None:
    curve = [None, *map(float, range(20))]  # 20 numbers, a tenth of which are two
    # scores of 0.5 and 2.5, one to three: mean 2, deviation sqrt((2.25 + 3 * 0.25) / 4)
    samples = {"histogram_edges": [0, 1, 2, 3], "histograms": [[1, 0, 3]], "gold": [1.0]}
    runs = {A.name: {"curves": {"gold": curve, "kl": curve}, "samples": samples}}
    values = [Value(A, "rollout.gold", at).of(runs) for at in ("start", "end", "early", "peak")]
    assert values == [0.5, 18.5, 2.0, 18.5]
    assert Value(A, "gold").of(runs) == 1.0  # held out, unless rollouts are asked for
    assert Value(A, "score_width").of(runs) == pytest.approx(math.sqrt(0.75))


def test_interval_of_equal_gains_is_no_point() -> None:
    collapsed = [runs([0.0, -5.0], [])] * 3
    interval = Check(Value(A, "gain"), "<", -0.5).interval(collapsed)
    # 4.303 * 0.1 / 3**.5
    assert interval == pytest.approx((0.2516, 0.5, 0.7484), abs=1e-4)


def test_hash_is_of_the_rules_and_not_of_words() -> None:
    check = Check(Value(A, "gold"), ">", Value(B, "gold"), margin=0.1)
    claim = Claim("Section 0", "A is better.", "fig4", (check,))
    value = replace(check.left, part=replace(A, label="other words"))
    same = replace(claim, text="Other words.", checks=(replace(check, left=value),))
    assert hash_rules([claim]) == hash_rules([same])
    peak = replace(check.left, at="peak")
    changes = [{"checks": (replace(check, margin=0.2),)}, {"checks": (replace(check, left=peak),)}]
    changes += [{"premise": (check,)}, {"checks": (), "then": (check,)}]
    others = [replace(claim, **change) for change in changes]
    assert len({hash_rules([claim]), *(hash_rules([other]) for other in others)}) == 5


# --- the table


def parts_of(experiment: table.Experiment) -> set[str]:
    foundations = {foundation.name for foundation in experiment.needed_foundations()}
    return foundations | {arm.name for arm in experiment.arms}


def test_every_claim_is_measured_by_its_figure() -> None:
    assert len(CLAIMS) >= 22
    for claim in CLAIMS:
        needed = claim.parts() - parts_of(table.EXPERIMENTS[claim.figure])
        # a few compare with a run that another figure has
        assert needed <= {table.VANILLA.name, table.PPO_MAX.name, table.REWARD_08.name}, claim.text


def test_arms_of_one_name_are_one_run() -> None:
    arms = [arm for figure in table.EXPERIMENTS.values() for arm in figure.arms]
    names = {name: replace(arm, label="") for name, arm in table.arms_by_name().items()}
    assert [arm for arm in arms if names[arm.name] != replace(arm, label="")] == []
    assert all(find_config(f"ablations/{name}") for arm in arms for name in arm.overlays)


def test_key_follows_from_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(table.VANILLA, 0, tmp_path)
    key = plan.key()
    assert plan.of(replace(table.VANILLA, label="another name")).key() == key
    others = [replace(plan, seed=1), replace(plan, trial=True), plan.of(table.PPO_MAX)]
    others.append(plan.of(replace(table.VANILLA, foundation=table.FEW_PAIRS)))
    assert len({key, *(other.key() for other in others)}) == 5
    packages = [Path(lit_rlhf.__file__).parent / name for name in running.HASHED]
    assert all(list(package.glob("*.py")) for package in packages)
    monkeypatch.setattr(running, "code_hash", lambda: "other code")
    assert plan.key() == key  # a change of code alone trains nothing anew


def test_result_of_other_settings_is_not_a_finished_run(tmp_path: Path) -> None:
    plan = Plan(table.VANILLA, 0, tmp_path, tmp_path / "results.jsonl")
    assert not plan.is_finished()
    write_run(plan.results, plan.name, {"key": plan.key()})
    assert plan.is_finished()
    write_run(plan.results, plan.name, {"key": "of another configuration"})
    assert not plan.is_finished()


def test_arm_comes_after_what_it_starts_from(tmp_path: Path) -> None:
    arm = replace(table.VANILLA, foundation=table.FEW_PAIRS)
    names = [plan.part.name for plan in Plan(arm, 0, tmp_path).chain()]
    assert names == [table.ENGLISH.name, table.FEW_PAIRS.name, arm.name]


# --- measures


def test_samples_are_compared_with_those_of_the_start(tmp_path: Path) -> None:
    prompts = [render_prompt(prompt) for prompt in World().sample_prompts(2, seed=0)]
    row = {"score": 1.0, "kl": 0.5, "length": 3, "truncated": False}
    rows = [
        {"step": step, "prompt_index": index, "prompt": "", "response": response, **row}
        for step, responses in ((0, ["iron.", "iron."]), (2, ["iron.", "\x85\u2028"]))
        for index, response in enumerate(responses)
    ]
    path = tmp_path / "samples.jsonl"
    # as the timeline writes them: line breaks of Unicode are part of a response
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    summary = summarize_samples(path, prompts)
    assert summary["iteration"] == [0, 2]
    assert (summary["win"], summary["tie"], summary["lose"]) == ([0, 0], [1, 0.5], [0, 0.5])
    assert summary["gold"][1] < summary["gold"][0]
    assert [sum(counts) for counts in summary["histograms"]] == [2, 2]
    assert len(summary["histogram_edges"]) == BINS + 1


# --- figures and page

Committed = Mapping[int, Runs]


@pytest.fixture(scope="module")
def committed() -> Committed:
    """The committed results."""
    return page.read_results(RESULTS)


def test_committed_figures_are_those_with_enough_seeds(committed: Committed) -> None:
    figures = {
        name for name, figure in table.EXPERIMENTS.items() if page.has_seeds(figure, committed)
    }
    assert {path.stem for path in (DOCS / page.FIGURES).glob("*.svg")} == figures
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert f"tests {len(CLAIMS)} statements" in text


def test_verdicts_of_other_results_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = json.loads(page.VERDICTS.read_text("utf-8"))
    judged["verdicts"][str(VERSION)][0] = "contradicted"
    monkeypatch.setattr(page, "VERDICTS", tmp_path / "verdicts.json")
    page.VERDICTS.write_text(json.dumps(judged), "utf-8")
    with pytest.raises(
        ValueError, match=r"verdicts\.json: expected the verdicts of .*, got others"
    ):
        page.make_documents(RESULTS)


def mean_gold(committed: Committed, figure: str, arm: table.Arm, place: int = -1) -> str:
    """The committed gold reward of an arm, in the sample at a place, rounded like the pages."""
    names = {arm.name for arm in table.EXPERIMENTS[figure].arms}
    runs = [runs for runs in committed.values() if names <= runs.keys()]
    return f"{fmean(run[arm.name]['samples']['gold'][place] for run in runs):.2f}"


def test_table_of_tricks_agrees_with_the_committed_results(committed: Committed) -> None:
    gold = partial(mean_gold, committed, "tricks")
    pairs = zip(table.LEFT_OUT, table.ADDED, strict=True)
    rows = [f"| {b.label.removeprefix('with ')} | {gold(a)} | {gold(b)} |" for a, b in pairs]
    rows.append(f"| none left out, none added | {gold(table.PPO_MAX)} | {gold(table.VANILLA)} |")
    text = (ROOT / "docs" / "recipe.md").read_text("utf-8")
    assert "\n".join(rows) in text
    assert f"means of ten seeds, where SFT has {gold(table.PPO_MAX, 0)} (" in text


def test_page_of_the_worlds_agrees_with_the_committed_results(committed: Committed) -> None:
    figure = table.EXPERIMENTS["worlds"]
    gold = partial(mean_gold, committed, "worlds")
    vanilla, ppo_max = figure.arms
    text = " ".join((ROOT / "docs" / "lab.md").read_text("utf-8").split())
    assert (
        f"gold rises from {gold(vanilla, 0)} to {gold(vanilla, 4)} in iteration 40, where "
        f"PPO-max has {gold(ppo_max, 4)}, and both end at {gold(vanilla)}"
    ) in text
    assert gold(vanilla) == gold(ppo_max)
    runs = [committed[seed][arm.name] for seed in figure.seeds for arm in figure.arms]
    assert [run["samples"]["iteration"][4] for run in runs] == [40] * 6
    assert [run["flagged_at"] for run in runs] == [None] * 6  # the detector flags none of them


# --- the committed verdicts, in a second way


def read_number(run: Any, measure: str, moment: str) -> float:
    samples = run.get("samples", {})
    curves = run.get("curves", {})
    if measure == "gain":
        return max(-1.0, samples["gold"][-1] - samples["gold"][0])
    if measure == "score_width":
        edges = np.array(samples["histogram_edges"])
        middles = edges[:-1] + np.diff(edges) / 2
        place = 0 if moment == "start" else -1
        return float(np.repeat(middles, samples["histograms"][place]).std())
    if measure in samples:
        course = np.array(samples[measure], float)
        width = 1
    elif (name := measure.removeprefix("rollout.")) in curves:
        course = np.array([v for v in curves[name] if v is not None], float)
        width = max(1, round(len(course) / 10))
    else:
        number = reduce(lambda tree, key: tree[key], measure.split("."), run)
        return 71.0 if number is None else float(number)
    smooth = np.convolve(course, np.full(width, 1 / width), "valid")
    early = course[: len(course) // 4].mean()
    return float(
        {"start": smooth[0], "end": smooth[-1], "peak": smooth.max(), "early": early}[moment]
    )


def decide(check: Check, seeds: list[dict[str, Any]], comparisons: int) -> bool | None:
    def column(operand: Value | float) -> np.ndarray:
        if not isinstance(operand, Value):
            return np.full(len(seeds), operand)
        return np.array(
            [read_number(s[operand.part.name], operand.measure, operand.at) for s in seeds]
        )

    left = column(check.left)
    right = column(check.right)
    if check.left.measure == "gain" and ((left == -1) & (right == -1)).any():
        return None
    if check.is_ratio:
        effect = np.log(left / right / check.factor)
    else:
        effect = left - check.factor * right - (check.sign != "~") * check.margin
    spread = effect.std(ddof=1)
    if check.left.measure == "gain" and not isinstance(check.right, Value):
        spread = max(spread, 0.1)
    half = stats.t.isf(0.025 / comparisons, len(seeds) - 1) * spread / len(seeds) ** 0.5
    low = effect.mean() - half
    high = effect.mean() + half
    if check.sign == "~":
        far = low > check.margin or high < -check.margin
        return False if far else True if max(-low, high) <= check.margin else None
    return None if low <= 0 <= high else bool((low > 0) == (check.sign == ">"))


def test_committed_verdicts_follow_from_the_raw_curves() -> None:
    by_seed: dict[int, dict[str, Any]] = {}
    for line in RESULTS.read_bytes().splitlines():
        run = json.loads(line)
        by_seed.setdefault(run["seed"], {})[run["name"]] = run
    judged = json.loads(RESULTS.with_name("verdicts.json").read_text("utf-8"))
    for claim, verdict in zip(CLAIMS, judged["verdicts"]["4"], strict=True):
        seeds = [runs for runs in by_seed.values() if claim.parts() <= set(runs)]
        if len(seeds) < 3:
            assert verdict == "not run yet"
            continue
        checks = list(claim.checks)
        if all(decide(check, seeds, 1) for check in checks):
            checks += claim.then
        together = {decide(c, seeds, len(claim.checks) + len(claim.then)) for c in checks}
        if any(decide(c, seeds, len(claim.premise)) is False for c in claim.premise):
            expected = "not at this scale"
        elif not all(decide(c, seeds, 1) for c in claim.premise):
            expected = "undecided"
        elif all(decide(c, seeds, 1) for c in checks):
            expected = "confirmed"
        elif False in together:
            expected = "partly" if True in together else "contradicted"
        else:
            expected = "undecided"
        assert verdict == expected, claim.text


def test_earlier_rules_are_those_that_were_committed(committed: Committed) -> None:
    judged = json.loads(RESULTS.with_name("verdicts.json").read_text("utf-8"))
    assert judged["rules"] == RULES
    for version in VERSIONS:
        try:
            verdicts = judge_by(version, committed)
        except subprocess.CalledProcessError:
            pytest.skip(f"the history lacks commit {version.commit}")
        assert judged["verdicts"][str(version.number)] == verdicts


def test_correction_decides_on_claim_34_alone(committed: Committed) -> None:
    judged = json.loads(RESULTS.with_name("verdicts.json").read_text("utf-8"))["verdicts"]
    today = [str(judge(claim, committed).verdict) for claim in CLAIMS]
    changes = [
        (number, old, new)
        for number, (old, new) in enumerate(zip(judged["3"], today, strict=True), start=1)
        if old != new
    ]
    assert changes == [(34, "contradicted", "undecided")]
    # -0.0778, -0.0774 and -0.0430: -0.0661 ± 4.303 * 0.0115, and as one of four ± 8.860 * 0.0115
    wider = CLAIMS[33].checks[2]
    seeds = judge(CLAIMS[33], committed).seeds
    assert wider.interval(seeds) == pytest.approx((-0.1157, -0.0661, -0.0165), abs=1e-4)
    of_four = wider.interval(seeds, comparisons=CLAIMS[33].n_comparisons)
    assert of_four == pytest.approx((-0.1682, -0.0661, 0.0361), abs=1e-4)


def test_seeds_that_decide_are_those_of_the_page(committed: Committed) -> None:
    needed = {
        number: project(CLAIMS[number - 1], judge(CLAIMS[number - 1], committed).seeds)
        for number in (2, 3, 14, 23, 31, 32)
    }
    numbers = {number: plan.n_seeds for number, plan in needed.items() if plan}
    assert numbers == {2: 4, 3: 4, 14: 90, 23: 8, 31: 217, 32: 4}
    assert "14 (90), 30 (67), 31 (217)" in page.PAGE.read_text("utf-8")
    text = RESULTS.with_suffix(".md").read_text("utf-8")
    assert "| 14 | 5 | 90 | confirmed; given up |" in text
    assert "| 23 | 3 | 8 | not at this scale |" in text


# --- a run


@pytest.mark.slow
def test_trial_is_interrupted_and_resumed(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "experiments", "reproduce", "run", "fig4", "--trial", "true"),
        *("--seeds", "[0]", "--output_dir", str(tmp_path / "runs")),
        *("--results", str(tmp_path / "results.jsonl")),
    ]
    log = tmp_path / "log.txt"
    results = tmp_path / "results.jsonl"
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
        # the first checkpoint of the first PPO run
        while not list(tmp_path.glob("runs/*/logs/vanilla/checkpoints/*")):
            assert process.poll() is None, log.read_text("utf-8")
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    assert read_runs(results).keys() == {"foundation-biased-en-seed_0"}
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ)
    again = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    runs = {name.removesuffix("-seed_0"): run for name, run in read_runs(results).items()}
    assert runs.keys() == {"foundation-biased-en", "vanilla", "ppo_max"}
    (output,) = tmp_path.glob("runs/*/vanilla.log")
    assert "resum" in output.read_text("utf-8").lower()
    assert "0 of 0 runs trained" in again.stderr
    curve = runs["vanilla"]["curves"]
    assert curve["iteration"] == [1, 2, 3, 4]
    assert None not in curve["score"]
    assert runs["ppo_max"]["preferences"]["helpful"].keys() == {"win", "tie", "lose"}
    assert runs["foundation-biased-en"]["accuracy"] >= 0
    assert page.read_results(results) == {}  # a trial is no result
