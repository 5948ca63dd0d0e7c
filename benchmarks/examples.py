"""The ready examples of docs/examples.md: what each learns of its reward, and of what was meant.

`python -m benchmarks.examples run MODEL NAME SEED OUTPUT_DIR` trains `configs/examples/NAME.yaml`
from a folder with SmolLM2-135M-Instruct. It keeps means of the first three and the last three
iterations, the detector's verdicts and the responses of the timeline in
`benchmarks/results/examples.jsonl`.
`python -m benchmarks.examples unseen MODEL SEED OUTPUT_DIR` asks the policy of `arithmetic`
the sums that it was not trained on, and `python -m benchmarks.examples tables` prints the tables.
"""

from __future__ import annotations

import json
import platform
import resource
import subprocess
import sys
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import yaml

from benchmarks.pretrained import CONFIGS
from benchmarks.results_file import read_runs, table, write_run
from lit_callbacks.runs import read_run
from lit_rlhf.files import write_json_lines

RESULTS = Path(__file__).parent / "results" / "examples.jsonl"
REWARD_AND_TRUTH = {
    "sentiment": ("cheerful", "one_sentence"),
    "list": ("last_number", "whole"),
    "arithmetic": ("right", "right"),
}
ENDS = 3  # iterations; in the first two the policy is not trained
HEAD = ("example, seed", "reward", "truth", "KL, nats", "tokens", "detector", "CPU minutes")


def run(model: str, name: str, seed: int, output_dir: Path) -> None:
    """Train an example, and keep what came out."""
    logs, label = output_dir / "logs", f"{name}_{seed}"
    options = {
        "model.model_path": model,
        "model.output_dir": output_dir / label,
        "model.seed": seed,
        "data.seed": seed,
        "trainer.logger.save_dir": logs,
        "trainer.logger.name": label,
    }
    command = [sys.executable, "-m", "lit_rlhf", "fit", "--config", f"examples/{name}"]
    command += [word for key, value in options.items() for word in (f"--{key}", str(value))]
    subprocess.run(command, check=True)
    minutes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime / 60
    done = read_run(label, logs / label)
    reward, truth = REWARD_AND_TRUTH[name]
    keys = {
        "reward": f"rollout/score/{reward}",
        "truth": f"rollout/score/{truth}",
        "kl": "rollout/kl",
        "tokens": "rollout/response_length",
    }
    values = {k: [point.value for point in done.curves[key].points] for k, key in keys.items()}
    texts = (logs / label / "samples.jsonl").read_text("utf-8").splitlines()
    result: dict[str, Any] = {
        "first": {key: mean(found[:ENDS]) for key, found in values.items()},
        "last": {key: mean(found[-ENDS:]) for key, found in values.items()},
        "detector": [verdict.sentence for verdict in done.verdicts],
        "worst": done.worst.name.lower(),
        "cpu_minutes": round(minutes, 1),
        "samples": [json.loads(line) for line in texts],
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    write_run(RESULTS, label, result)


def ask_unseen(model: str, seed: int, output_dir: Path) -> None:
    """Evaluate the model, and the policy trained from it, on the sums that no iteration had."""
    config = yaml.safe_load((CONFIGS / "examples" / "arithmetic.yaml").read_text("utf-8"))
    seen = {row["prompt"] for row in config["data"]["init_args"]["train_sources"][0]["path"]}
    prompts, report = output_dir / "unseen.jsonl", output_dir / f"unseen_{seed}.json"
    sums = [(f"What is {a} + {b}?", a + b) for a, b in product(range(2, 10), repeat=2)]
    rows = [{"prompt": text, "answer": total} for text, total in sums if text not in seen]
    write_json_lines(prompts, rows)
    command = [sys.executable, "-m", "lit_rlhf", "evaluate", "--policies", model]
    command += [str(output_dir / f"arithmetic_{seed}"), "--prompts", str(prompts)]
    command += ["--rewards", json.dumps(config["model"]["init_args"]["rewards"])]
    command += ["--max_new_tokens", "24", "--samples_per_prompt", "4", "--output", str(report)]
    for option in ("temperature", "top_p", "repetition_penalty"):
        command += [f"--{option}", "1"]
    subprocess.run(command, check=True)
    policies = json.loads(report.read_text("utf-8"))["policies"]
    scores = {name: row["rewards"]["right"] for name, row in policies.items()}
    write_run(RESULTS, f"unseen_{seed}", {"sums": len(rows), "right": scores})


def make_table(runs: dict[str, dict[str, Any]]) -> str:
    """The page's table: before and after, by example and seed."""
    rows = []
    for name in REWARD_AND_TRUTH:
        for label, found in runs.items():
            if not label.startswith(f"{name}_"):
                continue
            first, last = found["first"], found["last"]
            cells = [f"{first[key]:.2f} to {last[key]:.2f}" for key in ("reward", "truth")]
            cells += [f"{last['kl']:.1f}", f"{first['tokens']:.0f} to {last['tokens']:.0f}"]
            seed = label.removeprefix(f"{name}_")
            rows.append([f"{name}, {seed}", *cells, found["worst"], f"{found['cpu_minutes']:.0f}"])
    return table(HEAD, rows)


def make_samples(runs: dict[str, dict[str, Any]]) -> str:
    """The page's samples: responses of seed 0 before and after training, slashes between lines."""
    rows = []
    for name in REWARD_AND_TRUTH:
        found = runs[f"{name}_0"]["samples"]
        ends = {sample["step"]: {} for sample in (found[0], found[-1])}
        for sample in found:
            if sample["step"] in ends:
                text = " / ".join(sample["response"].split("\n")).replace("|", "\\|").strip(" /")
                ends[sample["step"]][sample["prompt"]] = text
        before, after = ends.values()
        rows += [[prompt, text, after[prompt]] for prompt, text in before.items()]
    return table(("prompt", "before", "after"), rows)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
    elif sys.argv[1] == "unseen":
        ask_unseen(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
    else:
        print(make_table(read_runs(RESULTS)), make_samples(read_runs(RESULTS)), sep="\n", end="")
