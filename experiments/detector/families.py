"""The families of runs: steps as a detector reads them, with a label each."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.detector.criterion import HARM_STDS, HARM_STEPS
from experiments.results_file import read_runs
from lit_callbacks.names import find_names

HERE = Path(__file__).resolve().parent
EXPERIMENTS = HERE.parent

Step = dict[str, float]


@dataclass(frozen=True)
class Trajectory:
    """A run, or the curves of one.

    Attributes:
        family: One of `criterion.CHOOSING` or `criterion.JUDGING`.
        name: Name of the run.
        collapsed: Its label; `None` for a run that nobody labelled, which is told and not judged.
        steps: Metrics by key, step by step.
        harm: Place in `steps` of the first step of the harm, if it is known.
        every: Steps of the run from one of `steps` to the next.
    """

    family: str
    name: str
    collapsed: bool | None
    steps: Sequence[Step]
    harm: int | None = None
    every: int = 1


def find_harm(gold: Sequence[float], std: float) -> int | None:
    """Place of the first of `HARM_STEPS` iterations in a row whose gold is too low."""
    bound = fmean(gold[:3]) - HARM_STDS * std
    for place in range(len(gold) - HARM_STEPS + 1):
        if all(value < bound for value in gold[place : place + HARM_STEPS]):
            return place
    return None


def make_steps(curves: Mapping[str, Sequence[float]], responses: int) -> list[Step]:
    """Steps from curves by key, with the number of responses behind each."""
    return [
        {"rollout/responses": float(responses), **dict(zip(curves, values, strict=True))}
        for values in zip(*curves.values(), strict=True)
    ]


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
        return "quickstart"
    if any(world in name for world in ("biased", "extrapolation")):
        return "lab: reward models"
    if "kl_coef" in name or "kl_penalty" in name:
        return "lab: KL weights"
    return "lab: PPO-max arms" if name.startswith("ppo_max") else "lab: constraints"


def lab_runs() -> list[Trajectory]:
    """The runs of the reproduction: 128 responses per iteration, 70 iterations, gold is known."""
    runs = []
    for name, result in read_runs(EXPERIMENTS / "reproduce" / "results.jsonl").items():
        curves = result["curves"]
        if "gold" not in curves or "policy_without_sft" in name:  # starts from untrained weights
            continue
        harm = find_harm(curves["gold"], result["samples"]["gold_std"][0])
        steps = make_steps({key: curves[ours] for ours, key in LAB_KEYS.items()}, 128)
        family = lab_family(result["name"])
        runs.append(Trajectory(family, name, harm is not None, steps, harm))
    return runs


def quickstart_runs() -> list[Trajectory]:
    """Ten seeds of vanilla PPO and PPO-max, of which KL, length and gold were kept."""
    runs = []
    for row in json.loads((EXPERIMENTS / "collapse" / "results.json").read_text("utf-8")):
        for arm in ("ppo_vanilla", "ppo_max"):
            curves = row["curves"][arm]
            keys = {f"rollout/{key}": curves[key] for key in ("kl", "response_length")}
            harmed_at = row[arm]["harmed_at"]
            runs.append(
                Trajectory(
                    "quickstart",
                    f"{arm}-seed_{row['seed']}",
                    arm == "ppo_vanilla",
                    make_steps(keys, 128),
                    None if harmed_at is None else harmed_at - 1,
                )
            )
    return runs


def smollm2_runs() -> list[Trajectory]:
    """SmolLM2-135M: 16 responses per iteration; 20 times the learning rate ends in one answer."""
    runs = []
    for name, row in read_runs(EXPERIMENTS / "pretrained" / "results.jsonl").items():
        if not name.startswith("ppo_"):
            continue
        curves: dict[str, list[float]] = {
            key: values for key, values in row["result"]["curves"].items() if "score" not in key
        }
        steps = make_steps(curves, 16)
        runs.append(Trajectory("SmolLM2", name, name.startswith("ppo_faster"), steps))
    return runs


def exploit_runs() -> list[Trajectory]:
    """The lab's six exploits, each beside the run that learns the truth, and ensembles."""
    runs = []
    for name, row in read_runs(EXPERIMENTS / "exploits" / "results.jsonl").items():
        harm = find_harm(row["curves"]["rollout/gold"], row["gold_std"])
        places = range(len(row["curves"]["rollout/gold"]))
        curves = {key: v for key, v in row["curves"].items() if key != "rollout/gold"}
        # a metric of the update is missing where there was none
        steps = [{k: v[i] for k, v in curves.items() if v[i] is not None} for i in places]
        runs.append(Trajectory("lab: exploits", name, harm is not None, steps, harm))
    return runs


def trl_runs() -> list[Trajectory]:
    """GRPO of TRL with a proxy and with the truth as reward: 64 responses a step, gold is known."""
    runs = []
    for name, row in read_runs(EXPERIMENTS / "trl_grpo" / "results.jsonl").items():
        if row["stopped_by"]:
            continue
        logged = row["steps"]
        names = find_names(logged[0])
        steps = make_steps(
            {key: [step[ours] for step in logged] for key, ours in names.items()}, 64
        )
        gold = [step["rewards/truth/mean"] for step in logged]
        harm = find_harm(gold, logged[0]["rewards/truth/std"])
        runs.append(Trajectory("TRL", name, harm is not None, steps, harm))
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
        runs.append(Trajectory("paper", f"Figure 9, {name}", False, steps, every=23))
    for path in sorted((HERE / "figures").glob("figure*.csv")):
        if path.stem in ("figure9", "figure13"):  # the latter are ten distributions of scores
            continue
        curve = figure(path.stem)
        curves = {
            "rollout/kl_per_token": curve["kl_per_token"],
            "rollout/response_length": curve["length"],
        }
        harm = None
        label = None
        if path.stem == "figure4":
            win = curve["win_rate"]
            # before the first point the policy is the SFT policy
            harm = next(i for i, value in enumerate(win) if i > 10 and value < 50)
            label = True
        steps = make_steps(curves, 128)
        runs.append(Trajectory("paper", path.stem, label, steps, harm, every=10))
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
    return {"family": run.family, "name": run.name, "collapsed": run.collapsed, "harm": run.harm}
