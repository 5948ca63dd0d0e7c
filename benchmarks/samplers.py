"""PPO-max with vLLM as its sampler, beside lit_rlhf's own decoder.

    python -m benchmarks.samplers run FOLDER SEED
    python -m benchmarks.samplers run_pretrained SMOLLM2 FOLDER SEED
    python -m benchmarks.samplers report

`FOLDER` has the world, SFT and reward model of a quickstart of that seed. It needs an environment
with vLLM. The arm `stale` hands the weights over once, before training, to see what notices, and
`stale_unweighted` has no importance weights either.

The rule, fixed before the runs: vLLM's gold is within noise of the decoder's if Student's 95 %
interval of the paired difference over the seeds contains 0 and its mean is less than 0.2 away, the
margin of equal arms in `experiments.reproduce`. A stale sampler is noticed if `SamplerMonitor`
calls it collapsed before the run ends, and no other arm's. Gold is taken from the run's rollouts;
gold of the finished policies on held-out prompts, sampled by lit_rlhf, was added after the runs,
and so was `stale_unweighted`.

With SmolLM2-135M, PPO-max of `experiments.known_truth`: `FOLDER` has its seeds, and its
runs are the decoder's where there are results of them. The rule is the same, with the truth from
-1 to 1 as gold, over the last ten of 40 iterations; fixed on 2026-11-26, before vLLM's runs.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli

from experiments.judging import student_interval
from experiments.known_truth.study import RESULTS as KNOWN_TRUTH
from experiments.known_truth.study import Recipe, Seed
from experiments.processes import run_step
from experiments.results_file import read_run as read_result
from experiments.results_file import read_runs, table, write_run
from lit_callbacks import Level, SamplerMonitor, read_run
from lit_rlhf.files import write_text
from lit_rlhf.forward import LanguageModel
from lit_rlhf.rollout import VLLMSampler
from lit_rlhf.tools.commands.quickstart import Quickstart

RESULTS = Path(__file__).parent / "results" / "samplers.jsonl"
TABLE = Path(__file__).parent / "results" / "samplers.md"
MARGIN = 0.2
ENGINE = {"engine": {"max_model_len": 192, "max_num_seqs": 128, "enforce_eager": True}}
SERVER = {"url": "http://127.0.0.1:8000", "weights_dir": "/dev/shm/lit_rlhf_policy"}
ARMS: dict[str, dict[str, Any] | None] = {
    "decoder": None,
    "vllm": {"class_path": "lit_rlhf.rollout.VLLMSampler", "init_args": ENGINE},
    "server": {"class_path": "lit_rlhf.rollout.VLLMServerSampler", "init_args": SERVER},
    "stale": {"class_path": "benchmarks.samplers.StaleSampler", "init_args": ENGINE},
    "stale_unweighted": {"class_path": "benchmarks.samplers.StaleSampler", "init_args": ENGINE},
}
"""By arm, what `model.sampler` is. The server of `server` has to run, see docs/sampler.md."""
SHOWN = ("rollout/gold", "rollout/score", "rollout/kl", "rollout/response_length")
QUICKSTART = "quickstart"
SMOLLM2 = "SmolLM2-135M"
LAST = {QUICKSTART: (7, 70), SMOLLM2: (10, 40)}
"""Number of last iterations that are measured, and number of all iterations, by model."""


class StaleSampler(VLLMSampler):
    """vLLM with the weights of the first rollout."""

    done = False

    def hand_over(self, model: LanguageModel) -> None:
        """Give vLLM the weights at the first call."""
        if not self.done:
            super().hand_over(model)
        self.done = True


def run(
    folder: str,
    seed: int,
    arms: tuple[str, ...] = ("decoder", "vllm", "stale", "stale_unweighted"),
    results: str = str(RESULTS),
) -> None:
    """Train the arms that are missing, and evaluate all.

    Args:
        folder: Folder of a quickstart whose reward model is trained.
        seed: Its seed.
        arms: Names of samplers.
        results: File of the results.
    """
    root = Path(folder).resolve()
    stages = Quickstart(root, seed, overwrite=True)
    for arm in arms:
        name = f"{arm}-seed_{seed}"
        if name in read_runs(Path(results)):
            continue
        model: dict[str, Any] = {"output_dir": f"runs/quickstart/{arm}", "sampler": ARMS[arm]}
        if arm.endswith("unweighted"):
            model["loss"] = {"importance_cap": None}
        logger = {"init_args": {"name": arm}}
        overlay = {"model": {"init_args": model}, "trainer": {"logger": logger}}
        path = write_text(root / "configs" / f"{arm}.yaml", json.dumps(overlay))
        stages.fit_ppo(["ppo_max.yaml", path])
        measured = measure(logged_curves(root / "logs" / arm), LAST[QUICKSTART][0])
        write_run(Path(results), name, {"seed": seed, "arm": arm, **measured})
    stages.evaluate("sft", *arms)
    policies = json.loads((root / "evaluation.json").read_text("utf-8"))["policies"]
    heldout = {name: policies[name]["rewards"]["gold_reward"]["mean"] for name in ("sft", *arms)}
    for name, row in read_runs(Path(results)).items():
        if row["seed"] == seed and row["arm"] in heldout and "model" not in row:
            gold = {"heldout_gold": heldout[row["arm"]], "sft_gold": heldout["sft"]}
            write_run(Path(results), name, row | gold)


def run_pretrained(
    base: str,
    folder: str,
    seed: int,
    *,
    arms: tuple[str, ...] = ("decoder", "vllm"),
    threads: int = 2,
    results: str = str(RESULTS),
) -> None:
    """Train SmolLM2's arms that are missing.

    Args:
        base: Folder of SmolLM2-135M-Instruct.
        folder: Folder of `experiments.known_truth` with the seed's SFT and reward model.
        seed: The seed.
        arms: Names of samplers.
        threads: Threads of a run.
        results: File of the results.
    """
    runs = Seed(Path(folder).resolve(), f"seed_{seed}", base, seed, Recipe())
    for arm in arms:
        name = f"smollm2-{arm}-seed_{seed}"
        if name in read_runs(Path(results)):
            continue
        steps = (read_result(KNOWN_TRUTH, f"seed_{seed}") or {}).get("steps", {})
        if arm == "decoder" and "ppo_max" in steps:
            curves = steps["ppo_max"]["result"]["curves"]
        else:
            step = runs.fit_ppo(f"ppo_max_{arm}", sampler=ARMS[arm])
            run_step(step, runs.root, threads)
            curves = logged_curves(runs.root / "logs" / f"ppo_max_{arm}")
        measured = measure(curves, LAST[SMOLLM2][0])
        row = {"seed": seed, "arm": arm, "model": SMOLLM2, **measured}
        write_run(Path(results), name, row)


def logged_curves(log: Path) -> dict[str, list[float]]:
    """Read what a run logged: values in the order of steps, by key."""
    curves = read_run(log.name, log).curves
    return {key: [point.value for point in curve.points] for key, curve in curves.items()}


def measure(curves: Mapping[str, Sequence[float]], last: int) -> dict[str, Any]:
    """Summarize a run by its last iterations, its sampling time and what the monitor said.

    Args:
        curves: A value for each iteration, by key.
        last: Number of last iterations that the means are taken over.

    Returns:
        Means by key; `rollout_seconds`, a median; `largest_sampler_kl` in nats; and `noticed`, the
        first iteration at which the sampler's monitor collapsed, or `None`.
    """
    measured: dict[str, Any] = {
        key: round(statistics.fmean(curves[key][-last:]), 4) for key in SHOWN
    }
    if seconds := curves.get("time/rollout"):
        measured["rollout_seconds"] = round(statistics.median(seconds), 3)
    sampler_kls = curves.get("rollout/sampler_kl", [])
    monitor = SamplerMonitor()
    noticed = None
    for iteration, value in enumerate(sampler_kls, 1):
        if monitor.observe(value) is Level.COLLAPSED and noticed is None:
            noticed = iteration
    return measured | {"largest_sampler_kl": max(sampler_kls, default=None), "noticed": noticed}


def report() -> None:
    """Write the table from the committed results."""
    write_text(TABLE, format_report(read_runs(RESULTS)))


def format_report(results: dict[str, dict[str, Any]]) -> str:
    """Format the runs, and what the rule at the top of this file says of them."""
    right = all(
        (row["noticed"] is not None) == row["arm"].startswith("stale") for row in results.values()
    )
    text = (
        "# PPO-max with another sampler\n\n"
        "Written by `python -m benchmarks.samplers report`; the rule is in that file. The "
        f"monitor noticed {'the stale samplers, and no other' if right else 'something else'}.\n"
    )
    for model, (last, n_iterations) in LAST.items():
        model_results = [r for r in results.values() if r.get("model", QUICKSTART) == model]
        if model_results:
            text += f"\n## {model}\n\nMeans over the last {last} of {n_iterations} iterations.\n\n"
            text += _compare(model_results)
    return text


def _compare(results: list[dict[str, Any]]) -> str:
    """The table of a model's runs, and the verdict on vLLM."""
    rows = [
        [
            str(row["seed"]),
            row["arm"],
            *(f"{row[key]:.2f}" for key in SHOWN),
            f"{row['sft_gold']:.2f} to {row['heldout_gold']:.2f}" if "heldout_gold" in row else "",
            f"{row['rollout_seconds']:.2f}" if "rollout_seconds" in row else "",
            "" if row["largest_sampler_kl"] is None else f"{row['largest_sampler_kl']:.1e}",
            "" if row["noticed"] is None else str(row["noticed"]),
        ]
        for row in sorted(results, key=lambda row: row["seed"])
    ]
    head = ["seed", "sampler", "gold", "score", "KL", "length", "held-out gold, SFT to PPO"]
    head += ["s per rollout", "largest sampler KL", "noticed at iteration"]
    gold = {(r["arm"], r["seed"]): r["rollout/gold"] for r in results}
    seeds = [seed for arm, seed in gold if arm == "vllm" and ("decoder", seed) in gold]
    if len(seeds) < 2:
        return table(head, rows)
    effects = [gold["vllm", seed] - gold["decoder", seed] for seed in seeds]
    low, mean, high = student_interval(effects)
    equal = low <= 0 <= high and abs(mean) < MARGIN
    return (
        f"{table(head, rows)}\n"
        f"Gold of vLLM minus gold of the decoder, paired over {len(seeds)} seeds: {mean:+.2f} "
        f"[{low:+.2f}, {high:+.2f}]: {'within noise' if equal else 'not within noise'}.\n"
    )


if __name__ == "__main__":
    auto_cli([run, run_pretrained, report])
