"""The ready examples of docs/examples.md: what each learns of its reward, and of what was meant.

    python -m experiments examples run MODEL   # trains what is missing, from SmolLM2-135M-Instruct
    python -m experiments examples page        # writes all tables and samples

Each run is `configs/examples/NAME.yaml` on one thread. The results have means of the first three
and the last three iterations, the detector's verdicts and the responses of the timeline. The
policies of `arithmetic` are also asked the sums that they were not trained on.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import yaml

from experiments.frame import Documents
from experiments.known_truth.study import ON_POLICY
from experiments.processes import CONFIGS, Step, run_missing_steps
from experiments.results_file import read_runs, table, write_run
from lit_callbacks.runs import read_run
from lit_rlhf.files import write_json_lines

RESULTS = Path(__file__).with_name("results.jsonl")
ARITHMETIC = CONFIGS / "examples" / "arithmetic.yaml"
REWARD_AND_TRUTH = {
    "sentiment": ("cheerful", "one_sentence"),
    "list": ("last_number", "whole"),
    "arithmetic": ("right", "right"),
}
SEEDS = (0, 1)
ENDS = 3  # iterations; in the first two the policy is not trained
HEAD = ("example, seed", "reward", "truth", "KL, nats", "tokens", "detector", "CPU minutes")


def run(model: str, output_dir: str = "runs/examples") -> None:
    """Train the examples that are missing, and ask the policies of `arithmetic` unseen sums.

    Args:
        model: Folder of SmolLM2-135M-Instruct.
        output_dir: Folder of all runs.
    """
    base = Path(model).resolve()
    root = Path(output_dir).resolve()
    steps = [train(base, root, name, seed) for name, seed in product(REWARD_AND_TRUTH, SEEDS)]
    steps += [ask_seed(base, root, seed) for seed in SEEDS]
    for step, row in run_missing_steps(steps, read_runs(RESULTS), folder=root, threads=1):
        write_run(RESULTS, step.name, {**row["result"], "cpu_minutes": row["cpu_minutes"]})


def train(base: Path, root: Path, name: str, seed: int) -> Step:
    """A step that trains an example.

    Args:
        base: Folder of SmolLM2-135M-Instruct.
        root: Folder of all runs.
        name: Name of the example.
        seed: Seed of the rollouts and of the order of the data.
    """
    label = f"{name}_{seed}"
    options = {
        "model.model_path": base,
        "model.output_dir": root / label,
        "model.seed": seed,
        "data.seed": seed,
        "trainer.logger.save_dir": root / "logs",
        "trainer.logger.name": label,
    }
    command = ["-m", "lit_rlhf", "fit", "--config", f"examples/{name}"]
    command += [word for key, value in options.items() for word in (f"--{key}", str(value))]
    return Step(label, 1, command, lambda: read_log(name, root / "logs" / label))


def read_log(name: str, log: Path) -> dict[str, Any]:
    """Both ends of a run, the detector's verdicts and the samples, from its log."""
    done = read_run(log.name, log)
    reward, truth = REWARD_AND_TRUTH[name]
    keys = {
        "reward": f"rollout/score/{reward}",
        "truth": f"rollout/score/{truth}",
        "kl": "rollout/kl",
        "tokens": "rollout/response_length",
    }
    values = {k: [point.value for point in done.curves[key].points] for k, key in keys.items()}
    texts = (log / "samples.jsonl").read_text("utf-8").splitlines()
    return {
        "first": {key: mean(found[:ENDS]) for key, found in values.items()},
        "last": {key: mean(found[-ENDS:]) for key, found in values.items()},
        "detector": [verdict.sentence for verdict in done.verdicts],
        "worst": done.worst.name.lower(),
        "samples": [json.loads(line) for line in texts],
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }


def ask_seed(base: Path, root: Path, seed: int) -> Step:
    """A step that asks the model, and the policy trained from it, the sums that no iteration had.

    Args:
        base: Folder of SmolLM2-135M-Instruct.
        root: Folder of all runs.
        seed: Seed of the policy.
    """
    report = root / f"unseen_{seed}.json"
    command = ask_unseen([base, root / f"arithmetic_{seed}"], report)

    def collect() -> dict[str, Any]:
        policies = json.loads(report.read_text("utf-8"))["policies"]
        scores = {name: row["rewards"]["right"] for name, row in policies.items()}
        return {"sums": len(unseen_sums()), "right": scores}

    return Step(f"unseen_{seed}", 1, [*command, "--samples_per_prompt", "4"], collect)


def unseen_sums() -> list[dict[str, Any]]:
    """The sums of numbers from 2 to 9 that `arithmetic` does not have."""
    config = yaml.safe_load(ARITHMETIC.read_text("utf-8"))
    seen = {row["prompt"] for row in config["data"]["init_args"]["train_sources"][0]["path"]}
    sums = [(f"What is {a} + {b}?", a + b) for a, b in product(range(2, 10), repeat=2)]
    return [{"prompt": text, "answer": total} for text, total in sums if text not in seen]


def ask_unseen(policies: Sequence[Path], report: Path) -> list[str]:
    """The command that evaluates policies on the unseen sums; its prompts are beside `report`."""
    prompts = write_json_lines(report.with_suffix(".prompts.jsonl"), unseen_sums())
    options = yaml.safe_load(ARITHMETIC.read_text("utf-8"))["model"]["init_args"]
    command = ["-m", "lit_rlhf", "evaluate", "--policies", *map(str, policies)]
    command += ["--prompts", str(prompts), "--rewards", json.dumps(options["rewards"])]
    command += ["--max_new_tokens", str(options["sampling"]["max_new_tokens"])]
    return [*command, "--output", str(report), *ON_POLICY]


def make_table(runs: dict[str, dict[str, Any]]) -> str:
    """The page's table: before and after, by example and seed."""
    rows = []
    for name, seed in product(REWARD_AND_TRUTH, SEEDS):
        results = runs[f"{name}_{seed}"]
        first = results["first"]
        last = results["last"]
        cells = [f"{first[key]:.2f} to {last[key]:.2f}" for key in ("reward", "truth")]
        cells += [f"{last['kl']:.1f}", f"{first['tokens']:.0f} to {last['tokens']:.0f}"]
        rows.append([f"{name}, {seed}", *cells, results["worst"], f"{results['cpu_minutes']:.0f}"])
    return table(HEAD, rows)


def make_samples(runs: dict[str, dict[str, Any]]) -> str:
    """The page's samples: responses of seed 0 before and after training, slashes between lines."""
    rows = []
    for name in REWARD_AND_TRUTH:
        samples = runs[f"{name}_0"]["samples"]
        texts = {
            (sample["step"], sample["prompt"]): sample["response"].replace("\n", " / ").strip(" /")
            for sample in samples
        }
        first = samples[0]["step"]
        last = samples[-1]["step"]
        prompts = [prompt for step, prompt in texts if step == first]
        rows += [[prompt, texts[first, prompt], texts[last, prompt]] for prompt in prompts]
    return table(("prompt", "before", "after"), rows)


def documents() -> Documents:
    """All tables and samples, from the committed results."""
    runs = read_runs(RESULTS)
    return {RESULTS.with_suffix(".md"): f"{make_table(runs)}\n{make_samples(runs)}"}


COMMANDS = (run,)
