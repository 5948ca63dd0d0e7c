"""The families of runs: steps as a detector reads them, with a label each."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from experiments.detector.labels import Change, Label, Question, ends_of, label_run
from experiments.results_file import read_runs
from lit_callbacks.names import find_names
from lit_callbacks.verdict import Trouble

HERE = Path(__file__).resolve().parent
EXPERIMENTS = HERE.parent

Step = dict[str, float]
Curves = Mapping[str, Sequence[float]]
CHAT = "chat"
SHORT = "short answers"
CHECKABLE = "checkable reward"


@dataclass(frozen=True)
class Trajectory:
    """A run, or the curves of one.

    Attributes:
        family: One of `criterion.CHOOSING` or `criterion.JUDGING`.
        name: Name of the run.
        label: Its troubles.
        steps: Metrics by key, step by step.
        every: Steps of the run from one of `steps` to the next.
        task: What its responses are: the preset of the detector that a user would choose.
    """

    family: str
    name: str
    label: Label
    steps: Sequence[Step]
    every: int = 1
    task: str = CHAT


def make_steps(curves: Curves, responses: int) -> list[Step]:
    """Steps from curves by key, with the number of responses behind each."""
    return [
        {"rollout/responses": float(responses), **dict(zip(curves, values, strict=True))}
        for values in zip(*curves.values(), strict=True)
    ]


def without_truth(curves: Curves) -> dict[str, Sequence[float]]:
    """The curves that a user without the truth would have."""
    return {key: values for key, values in curves.items() if "gold" not in key}


def label_curves(
    curves: Curves,
    *,
    std: float,
    variety: Mapping[str, Change],
    truth: str = "rollout/gold",
    reward: str = "rollout/score",
) -> Label:
    """Label a run of this package by its curves.

    Args:
        curves: Values by key, a value for each step.
        std: Standard deviation of the truth of single responses at the start.
        variety: How measures of variety changed, by their names.
        truth: Key of the mean truth of the responses.
        reward: Key of the mean reward that the run optimizes.
    """
    return label_run(
        truth=curves[truth],
        std=std,
        reward=curves[reward],
        kl=curves["rollout/kl"],
        variety=variety,
    )


LAB_KEYS = {
    "score": "rollout/score",
    "kl": "rollout/kl",
    "response_length": "rollout/response_length",
    "perplexity": "rollout/perplexity",
    "entropy": "rollout/entropy",
    "explained_variance": "ppo/explained_variance",
}


def lab_family(name: str) -> str:
    """The family of an arm of the reproduction."""
    if name in ("vanilla", "ppo_max"):
        return "lab: quickstart"
    if any(world in name for world in ("biased", "extrapolation")):
        return "lab: reward models"
    if "kl_coef" in name or "kl_penalty" in name:
        return "lab: KL weights"
    return "lab: PPO-max arms" if name.startswith("ppo_max") else "lab: constraints"


def lab_runs() -> list[Trajectory]:
    """The runs of the reproduction: 128 responses per iteration, 70 iterations, gold is known."""
    runs = []
    for name, row in read_runs(EXPERIMENTS / "reproduce" / "results.jsonl").items():
        curves = row["curves"]
        if "gold" not in curves or "policy_without_sft" in name:  # starts from untrained weights
            continue
        label = label_run(
            truth=curves["gold"],
            std=row["samples"]["gold_std"][0],
            reward=curves["score"],
            kl=curves["kl"],
            variety={"entropy": ends_of(curves["entropy"])},
        )
        steps = make_steps({key: curves[ours_key] for ours_key, key in LAB_KEYS.items()}, 128)
        runs.append(Trajectory(lab_family(row["name"]), name, label, steps, task=SHORT))
    return runs


def quickstart_runs() -> list[Trajectory]:
    """Ten seeds of vanilla PPO and PPO-max, of which KL, length and gold were kept."""
    runs = []
    for row in json.loads((EXPERIMENTS / "collapse" / "results.json").read_text("utf-8")):
        for arm in ("ppo_vanilla", "ppo_max"):
            curves = row["curves"][arm]
            keys = {f"rollout/{key}": curves[key] for key in ("kl", "response_length")}
            harmed_at = row[arm]["harmed_at"]
            is_harmed = harmed_at is not None
            label = Label(
                troubles=frozenset({Trouble.EXPLOITING} if is_harmed else ()),
                tells=frozenset({Question.HARM}),
                harm=harmed_at - 1 if is_harmed else None,
            )
            steps = make_steps(keys, 128)
            name = f"{arm}-seed_{row['seed']}"
            runs.append(Trajectory("lab: quickstart", name, label, steps, task=SHORT))
    return runs


def exploit_runs() -> list[Trajectory]:
    """The lab's six exploits, each beside the run that learns the truth, and ensembles."""
    runs = []
    for name, row in read_runs(EXPERIMENTS / "exploits" / "results.jsonl").items():
        curves = row["curves"]
        label = label_curves(curves, std=row["gold_std"], variety=training_variety(curves))
        places = range(len(curves["rollout/gold"]))
        # a metric of the update is missing where there was none
        steps = [
            {k: v[i] for k, v in without_truth(curves).items() if v[i] is not None} for i in places
        ]
        runs.append(Trajectory("lab: exploits", name, label, steps, task=SHORT))
    return runs


def training_variety(curves: Curves) -> dict[str, Change]:
    """Changes of the variety by training metrics, for runs without a measure of held-out prompts.

    The detector reads these metrics, too.
    """
    keys = {
        "distinct": "rollout/distinct_2",
        "opening": "rollout/opening_share",
        "entropy": "rollout/entropy",
    }
    return {name: ends_of(curves[key]) for name, key in keys.items() if key in curves}


def trl_runs() -> list[Trajectory]:
    """GRPO of TRL with a proxy and with the truth as reward: 64 responses a step, gold is known."""
    runs = []
    for name, row in read_runs(EXPERIMENTS / "trl_grpo" / "results.jsonl").items():
        if row["stopped_by"]:
            continue
        logged = row["steps"]
        names = find_names(logged[0])
        curves = {key: [step[logged_name] for step in logged] for key, logged_name in names.items()}
        label = label_run(
            truth=[step["rewards/truth/mean"] for step in logged],
            std=logged[0]["rewards/truth/std"],
            reward=[step["reward"] for step in logged],
            kl=curves["rollout/kl_per_token"],
            variety=training_variety(curves),
        )
        curves["rollout/score"] = [step["reward"] for step in logged]
        runs.append(Trajectory("lab: TRL", name, label, make_steps(curves, 64), task=SHORT))
    return runs


def smollm2_runs() -> list[Trajectory]:
    """SmolLM2-135M on HH-RLHF: 16 responses per iteration, gold is another reward model."""
    results = read_runs(EXPERIMENTS / "pretrained" / "results.jsonl")
    measured = {
        name: (step["result"], policy)
        for step_name, step in results.items()
        if "policies" in step_name
        for name, policy in step["result"]["policies"].items()
        if name != "sft"
    }
    runs = []
    for name, row in results.items():
        if not name.startswith("ppo_"):
            continue
        curves = row["result"]["curves"]
        variety = {}
        std = results["policies_0"]["result"]["policies"]["sft"]["rewards"]["gold"]["std"]
        if name in measured:  # on held-out prompts
            seed_result, policy = measured[name]
            sft = seed_result["policies"]["sft"]
            std = sft["rewards"]["gold"]["std"]
            shares = seed_result["openings"]
            variety = {
                "distinct": Change(sft["distinct_2"], policy["distinct_2"]),
                "opening": Change(shares["sft"]["share"], shares[name]["share"]),
            }
        label = label_curves(
            curves,
            std=std,
            variety=variety or training_variety(curves),
            truth="rollout/score/gold",
            reward="rollout/score/reward",
        )
        steps = make_steps(with_score(curves), 16)
        runs.append(Trajectory("SmolLM2: HH-RLHF", name, label, steps))
    return runs


def with_score(curves: Curves) -> dict[str, Sequence[float]]:
    """Curves without the truth, with the reward that the run optimizes under its usual name."""
    shown = {key: values for key, values in curves.items() if not key.startswith("rollout/score/")}
    if "rollout/score/reward" in curves:
        shown["rollout/score"] = curves["rollout/score/reward"]
    return without_truth(shown)


def known_truth_runs() -> list[Trajectory]:
    """SmolLM2-135M with a known rule: 16 responses per iteration, canned shares are held out."""
    runs = []
    for seed, row in read_runs(EXPERIMENTS / "known_truth" / "results.jsonl").items():
        if not seed.startswith("seed_"):
            continue
        policies = row["steps"]["policies"]["result"]
        for arm in ("ppo_vanilla", "ppo_max"):
            curves = row["steps"][arm]["result"]["curves"]
            label = label_curves(
                curves,
                std=pstdev(policies["sft"]["truth"]),
                variety={"canned": Change(policies["sft"]["canned"], policies[arm]["canned"])},
            )
            steps = make_steps(without_truth(curves), 16)
            name = f"{arm}-{seed}"
            runs.append(Trajectory("SmolLM2: known truth", name, label, steps, task=SHORT))
    return runs


def preference_runs() -> list[Trajectory]:
    """SmolLM2-135M on people's pairs: 16 responses per iteration, gold is Gemma 3 270M."""
    runs = []
    for seed, row in read_runs(EXPERIMENTS / "preferences" / "results.jsonl").items():
        if not seed.startswith("seed_"):
            continue
        number = seed.removeprefix("seed_")
        policies = row[f"policies_{number}"]["result"]
        sft = policies["sft"]
        for arm in ("ppo_vanilla", "ppo_max"):
            curves = row[f"{arm}_{number}"]["result"]["curves"]
            policy = policies[arm]
            label = label_curves(
                curves,
                std=pstdev(sft["truth"]),
                variety={
                    "distinct": Change(sft["distinct_2"], policy["distinct_2"]),
                    "opening": Change(sft["opening"]["share"], policy["opening"]["share"]),
                },
                truth="rollout/score/gold",
                reward="rollout/score/reward",
            )
            steps = make_steps(with_score(curves), 16)
            runs.append(Trajectory("SmolLM2: preferences", f"{arm}-{seed}", label, steps))
    return runs


def alignment_tax_runs() -> list[Trajectory]:
    """Seed 12 of the known truth with other seeds of PPO, with and without PPO-ptx."""
    known = read_runs(EXPERIMENTS / "known_truth" / "results.jsonl")["seed_12"]
    std = pstdev(known["steps"]["policies"]["result"]["sft"]["truth"])
    runs = []
    for seed, row in read_runs(EXPERIMENTS / "alignment_tax" / "results.jsonl").items():
        for arm, step in row.items():
            if not arm.startswith("ppo_"):
                continue
            curves = step["result"]["curves"]
            label = label_curves(curves, std=std, variety=training_variety(curves))
            steps = make_steps(without_truth(curves), 16)
            name = f"{arm}-{seed}"
            runs.append(Trajectory("SmolLM2: alignment tax", name, label, steps, task=SHORT))
    return runs


def sums_runs() -> list[Trajectory]:
    """SmolLM2-135M learning sums: 16 responses per iteration; the reward is the truth."""
    runs = []
    for name, row in read_runs(EXPERIMENTS / "estimator_sums" / "results.jsonl").items():
        if "courses" not in row:
            continue
        curves = row["courses"]
        right = fmean(curves["gold"][:3])
        label = label_run(
            truth=curves["gold"],
            std=(right * (1 - right)) ** 0.5,
            reward=None,
            kl=curves["kl"],
            variety={},
        )
        steps = make_steps(
            {
                "rollout/kl": curves["kl"],
                "rollout/response_length": curves["response_length"],
                "rollout/score": curves["gold"],
            },
            16,
        )
        runs.append(Trajectory("SmolLM2: sums", name, label, steps, task=CHECKABLE))
    return runs


@cache
def figure(name: str) -> dict[str, list[float]]:
    """The columns of a curve of the paper, see `figures/README.md`."""
    with (HERE / "figures" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {key: [float(row[key]) for row in rows] for key in rows[0]}


def paper_runs() -> list[Trajectory]:
    """Figures 4 and 9, and the runs of Figures 6, 7 and 14 to 16, which have no label."""
    nine = figure("figure9")
    runs = []
    for name, factor in (("as it is", 1.0), ("halved", 0.5), ("a quarter higher", 1.25)):
        length = [value * factor for value in nine["length"]]
        per_token = [value * factor for value in nine["kl_per_token"]]
        curves = {"rollout/kl_per_token": per_token, "rollout/response_length": length}
        steps = make_steps(curves, 128)
        label = Label(tells=frozenset({Question.HARM}))
        runs.append(Trajectory("paper", f"Figure 9, {name}", label, steps, every=23))
    for path in sorted((HERE / "figures").glob("figure*.csv")):
        if path.stem in ("figure9", "figure13"):  # the latter are ten distributions of scores
            continue
        curve = figure(path.stem)
        curves = {
            "rollout/kl_per_token": curve["kl_per_token"],
            "rollout/response_length": curve["length"],
        }
        label = Label(tells=frozenset())
        if path.stem == "figure4":
            win = curve["win_rate"]
            # before the first point the policy is the SFT policy
            harm = next(i for i, value in enumerate(win) if i > 10 and value < 50)
            label = Label(frozenset({Trouble.EXPLOITING}), frozenset({Question.HARM}), harm)
        steps = make_steps(curves, 128)
        runs.append(Trajectory("paper", path.stem, label, steps, every=10))
    return runs


def gather(groups: Iterable[Sequence[Trajectory]]) -> dict[str, list[Trajectory]]:
    """Runs by family."""
    families: dict[str, list[Trajectory]] = {}
    for group in groups:
        for run in group:
            families.setdefault(run.family, []).append(run)
    return families


def describe(run: Trajectory) -> dict[str, Any]:
    """Family, name and label of a run, for the results."""
    return {
        "family": run.family,
        "name": run.name,
        "troubles": sorted(run.label.troubles),
        "tells": sorted(run.label.tells),
        "harm": run.label.harm,
    }
