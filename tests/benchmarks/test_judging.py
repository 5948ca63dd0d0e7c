"""The code that decides published claims, by cases worked by hand and in a second way."""

from __future__ import annotations

import json
import math
import subprocess
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import collapse, quickstart_seeds
from benchmarks.reproduce.claims import CLAIMS, RULES
from benchmarks.reproduce.history import VERSIONS, judge_by
from benchmarks.reproduce.judging import Check, Claim, Runs, Value, hash_rules
from benchmarks.reproduce.page import read_results
from benchmarks.reproduce.running import RESULTS
from benchmarks.reproduce.table import ITERATIONS, Arm
from lit_callbacks import KLMonitor, Level, Monitor

# --- runs of the quickstart, of which the vanilla one collapses

LOGS = {
    # SFT's gold is 0.4 with a deviation of 1.4, so harm is done below -0.3: in iteration 6
    "ppo_vanilla": {
        "rollout/kl": [0.1, 0.1, 0.1, 0.1, 0.9, 2.0, 3.0, 9.0],
        "rollout/gold": [0.5, 0.6, 0.5, 0.8, 0.2, -0.4, -1.0, -2.0],
        "rollout/response_length": [8.0] * 8,
    },
    "ppo_max": {
        "rollout/kl": [0.1, 0.1, 0.1, 0.1, 0.78, 0.9, 0.7, 0.2],
        "rollout/gold": [0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.1],
        "rollout/response_length": [8.0] * 8,
    },
    "ppo_rollback": {
        "rollout/kl": [0.1] * 6,
        "rollout/gold": [0.5] * 6,
        "rollout/response_length": [8.0] * 6,
        # two collapses, the first of which lasts two iterations
        "monitor/level": [Level(level) for level in (0, 2, 2, 1, 2, 0)],
    },
}
GOLDS = {"sft": (0.4, 1.4), "ppo_vanilla": (-2.1, 0.1), "ppo_max": (1.1, 0.3)}
GOLDS["ppo_rollback"] = (0.6, 0.2)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with logs and the evaluation; the detector is one monitor of KL, above 1."""

    def monitors() -> list[Monitor]:
        return [KLMonitor(high=1.0, baseline_steps=3, horizon=0)]

    folder = tmp_path / "seed_7"
    for name, columns in LOGS.items():
        log = folder / "logs" / name
        log.mkdir(parents=True)
        rows = zip(*columns.values(), strict=True)
        lines = [",".join(map(str, map(float, (k, *row)))) for k, row in enumerate(rows, 1)]
        (log / "metrics.csv").write_text("\n".join([",".join(["step", *columns]), *lines]) + "\n")
    policies: dict[str, Any] = {}
    for place, (name, (mean, std)) in enumerate(GOLDS.items()):
        rewards = {"gold_reward": {"mean": mean, "std": std}}
        rewards["reward"] = {"mean": 10.0 + place, "std": 7.0}
        rewards["well_formed"] = {"mean": 0.9 - place / 10, "std": 0.3}
        policies[name] = {"rewards": rewards, "response_length": 8, "kl": place, "perplexity": 2.0}
    (folder / "evaluation.json").write_text(json.dumps({"policies": policies}))
    monkeypatch.setattr(collapse, "default_monitors", monitors)
    monkeypatch.setattr(quickstart_seeds, "default_monitors", monitors)
    return tmp_path


def test_quickstart_is_judged_by_its_logs_and_evaluation(root: Path) -> None:
    run = quickstart_seeds.judge_run(root / "seed_7", 7, "bf16", minutes=3.0)
    assert run.outcome == (0.4, 1.4, -2.1, 1.1, 11.0, 12.0, 0.9, 0.8, 0.7)
    # two readings beyond 1 / 1.3, 1 and 1.3; the first beyond the way to it is still healthy
    assert run.flagged_at == {"ppo_vanilla": [6, 7, 7], "ppo_max": [6, None, None]}
    assert run.healthy_until == [5, 5, 6]
    assert run.harmed_at == 6
    assert run.in_time == [True, True, False]  # with the farthest, harm was called healthy
    assert run.metrics["ppo_max"] == {"response_length": 8, "kl": 2, "perplexity": 2.0}
    assert (run.seed, run.arithmetic, run.minutes) == (7, "bf16", 3.0)


def test_seed_of_the_detector_is_summarized(root: Path) -> None:
    row = collapse.summarize_seed(root, 7)
    assert row["ppo_vanilla"] == {
        "flagged_at": 7,
        "healthy_until": 5,
        "gold_at_flag": -1.0,
        "peak_gold": 0.8,
        "last_gold": pytest.approx(-0.1),
        "harmed_at": 6,
        "lead": -1,  # the flag comes an iteration after the harm
        "in_time": True,
    }
    assert (row["ppo_max"]["flagged_at"], row["ppo_max"]["harmed_at"]) == (None, None)
    assert row["collapses"] == 2
    assert row["sft_gold"] == 0.4
    assert row["final_gold"] == {"ppo_vanilla": -2.1, "ppo_max": 1.1, "ppo_rollback": 0.6}
    assert row["curves"]["ppo_max"]["gold"] == LOGS["ppo_max"]["rollout/gold"]


def test_committed_tables_follow_from_the_committed_curves() -> None:
    for row in json.loads(collapse.RESULT.read_text("utf-8")):
        vanilla, gold = row["ppo_vanilla"], np.array(row["curves"]["ppo_vanilla"]["gold"])
        assert vanilla["peak_gold"] == pytest.approx(gold.max(), abs=6e-4)
        assert vanilla["last_gold"] == pytest.approx(gold[-10:].mean(), abs=6e-4)
        assert vanilla["gold_at_flag"] == pytest.approx(gold[vanilla["flagged_at"] - 1], abs=6e-4)
        assert gold[: vanilla["harmed_at"] - 1].min() > gold[vanilla["harmed_at"] - 1]
        assert vanilla["lead"] == vanilla["harmed_at"] - vanilla["flagged_at"]
        assert vanilla["in_time"] == (vanilla["healthy_until"] < vanilla["harmed_at"])
    for run in quickstart_seeds.read_results():
        o, harm = run.outcome, run.harmed_at or math.inf
        assert o.exploited == (o.sft_gold - o.vanilla_gold >= o.sft_std / 2) & (
            o.vanilla_score > o.max_score
        )
        flags = zip(run.flagged_at["ppo_vanilla"], run.healthy_until, strict=True)
        assert run.in_time == [bool(flag) and healthy < harm for flag, healthy in flags]


# --- comparisons of the reproduction

A, B = Arm("a", overlays=("no_ptx",)), Arm("b", overlays=("no_kl_penalty",))


def runs(gold_a: list[float], gold_b: list[float], **others: Any) -> Runs:
    ours = {"samples": {"gold": gold_a}, "curves": {}, **others}
    return {A.name: ours, B.name: {"samples": {"gold": gold_b}, "curves": {}}}


@pytest.mark.parametrize(
    ("check", "found", "effect"),
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
            Check(Value(A, "first_warning.kl"), "<", float(ITERATIONS)),
            runs([], [], first_warning={"kl": None}),
            -1.0,  # never is after the end
        ),
    ],
)
def test_effect_of_a_seed(check: Check, found: Runs, effect: float) -> None:
    assert check.effect(found) == pytest.approx(effect, abs=1e-4, nan_ok=True)


def test_values_of_curves_and_histograms() -> None:
    curve = [None, *map(float, range(20))]  # 20 numbers, a tenth of which are two
    # scores of 0.5 and 2.5, one to three: mean 2, deviation sqrt((2.25 + 3 * 0.25) / 4)
    samples = {"histogram_edges": [0, 1, 2, 3], "histograms": [[1, 0, 3]], "gold": [1.0]}
    found = {A.name: {"curves": {"gold": curve, "kl": curve}, "samples": samples}}
    values = [Value(A, "rollout.gold", at).of(found) for at in ("start", "end", "early", "peak")]
    assert values == [0.5, 18.5, 2.0, 18.5]
    assert Value(A, "gold").of(found) == 1.0  # held out, unless rollouts are asked for
    assert Value(A, "score_width").of(found) == pytest.approx(math.sqrt(0.75))


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


# --- the committed verdicts in a second way


def read_number(run: Any, measure: str, at: str) -> float:
    samples, curves = run.get("samples", {}), run.get("curves", {})
    if measure == "gain":
        return max(-1.0, samples["gold"][-1] - samples["gold"][0])
    if measure == "score_width":
        edges = np.array(samples["histogram_edges"])
        middles = edges[:-1] + np.diff(edges) / 2
        place = 0 if at == "start" else -1
        return float(np.repeat(middles, samples["histograms"][place]).std())
    if measure in samples:
        course, width = np.array(samples[measure], float), 1
    elif (name := measure.removeprefix("rollout.")) in curves:
        course = np.array([v for v in curves[name] if v is not None], float)
        width = max(1, round(len(course) / 10))
    else:
        found = reduce(lambda tree, key: tree[key], measure.split("."), run)
        return 71.0 if found is None else float(found)
    smooth = np.convolve(course, np.full(width, 1 / width), "valid")
    early = course[: len(course) // 4].mean()
    return float({"start": smooth[0], "end": smooth[-1], "peak": smooth.max(), "early": early}[at])


def decide(check: Check, seeds: list[dict[str, Any]]) -> bool | None:
    from scipy import stats

    def column(value: Value | float) -> np.ndarray:
        if not isinstance(value, Value):
            return np.full(len(seeds), value)
        return np.array([read_number(s[value.part.name], value.measure, value.at) for s in seeds])

    left, right = column(check.left), column(check.right)
    if check.left.measure == "gain" and ((left == -1) & (right == -1)).any():
        return None
    if check.is_ratio:
        effect = np.log(left / right / check.factor)
    else:
        effect = left - check.factor * right - (check.sign != "~") * check.margin
    spread = effect.std(ddof=1)
    if check.left.measure == "gain" and not isinstance(check.right, Value):
        spread = max(spread, 0.1)
    half = stats.t.ppf(0.975, len(seeds) - 1) * spread / len(seeds) ** 0.5
    low, high = effect.mean() - half, effect.mean() + half
    if check.sign == "~":
        far = low > check.margin or high < -check.margin
        return False if far else True if max(-low, high) <= check.margin else None
    return None if low <= 0 <= high else bool((low > 0) == (check.sign == ">"))


def test_committed_verdicts_follow_from_the_raw_curves() -> None:
    pytest.importorskip("scipy")
    by_seed: dict[int, dict[str, Any]] = {}
    for line in RESULTS.read_bytes().splitlines():
        run = json.loads(line)
        by_seed.setdefault(run["seed"], {})[run["name"]] = run
    judged = json.loads(RESULTS.with_name("reproduction_verdicts.json").read_text("utf-8"))
    for claim, verdict in zip(CLAIMS, judged["verdicts"]["3"], strict=True):
        seeds = [runs for runs in by_seed.values() if claim.parts() <= set(runs)]
        if len(seeds) < 3:
            assert verdict == "not run yet"
            continue
        premise, parts = ({decide(c, seeds) for c in cs} for cs in (claim.premise, claim.checks))
        if parts == {True}:
            parts |= {decide(check, seeds) for check in claim.then}
        if False in premise:
            expected = "not at this scale"
        elif None in premise or (None in parts and False not in parts):
            expected = "undecided"
        elif False in parts:
            expected = "partly" if True in parts else "contradicted"
        else:
            expected = "confirmed"
        assert verdict == expected, claim.text


def test_earlier_rules_are_those_that_were_committed() -> None:
    judged = json.loads(RESULTS.with_name("reproduction_verdicts.json").read_text("utf-8"))
    assert judged["rules"] == RULES
    found = read_results(RESULTS)
    for version in VERSIONS:
        try:
            verdicts = judge_by(version, found)
        except subprocess.CalledProcessError:
            pytest.skip(f"the history lacks commit {version.commit}")
        assert judged["verdicts"][str(version.number)] == verdicts
