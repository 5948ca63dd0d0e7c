"""Whether the collapse detector flags runs in time, and whether rolling back saves them.

    python benchmarks/collapse.py run --output_dir runs/collapse
    python benchmarks/collapse.py report --output_dir runs/collapse

`run` trains, for each seed, the quickstart's stages, then vanilla PPO and PPO-max under a detector
that only watches, and vanilla PPO under one that rolls back and raises `kl_coef`. Runs that are
finished are not repeated. `report` reads the runs' logs, prints the tables, and writes them, all
numbers and the ROC to the folder. `quickstart_seeds.py` tests the same detector on more runs,
without rolling back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from jsonargparse import auto_cli
from matplotlib.figure import Figure

from lit_callbacks import (
    FirstRatioMonitor,
    Level,
    Monitor,
    default_monitors,
    read_logged_steps,
    replay_steps,
)
from lit_rlhf.cli.quickstart import Quickstart

SEEDS = (10, 11, 12, 13, 14, 15, 16, 17, 18, 19)
"""Reported seeds; the thresholds were chosen on seeds 0 to 2."""
HARM = 0.5
"""Harm is done below the SFT policy's gold reward minus this many of its standard deviations."""
ROLLBACK = Path("configs/overlays/rollback.yaml")
RUNS: dict[str, tuple[str | Path, ...]] = {
    "ppo_vanilla": ("ppo_max.yaml", "ppo_vanilla.yaml"),
    "ppo_max": ("ppo_max.yaml",),
    "ppo_rollback": ("ppo_max.yaml", "ppo_vanilla.yaml", ROLLBACK),
}


def run_seed(output_dir: str, seed: int) -> None:
    """Train all runs of one seed, in this process.

    Args:
        output_dir: Folder of the benchmark.
        seed: Seed of the world, the weights, the data order and the rollouts.
    """
    stages = Quickstart(Path(output_dir) / f"seed_{seed}", seed, overwrite=True)
    if not (stages.root / "reward" / "model.safetensors").is_file():
        stages.prepare()
    for name, configs in RUNS.items():
        if not (stages.root / name / "model.safetensors").is_file():
            stages.fit_ppo(configs, "--name", name)
    if not (stages.root / "evaluation.json").is_file():
        stages.evaluate("sft", *RUNS)


def run(
    output_dir: str = "runs/collapse", seeds: tuple[int, ...] = SEEDS, parallel: int = 2
) -> None:
    """Train the runs that are missing, each seed in a process with one thread.

    Args:
        output_dir: Folder of the benchmark.
        seeds: Seeds to run.
        parallel: Number of seeds that run at a time.
    """

    def one(seed: int) -> None:
        folder = Path(output_dir) / f"seed_{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "log.txt").open("a") as log:
            subprocess.run(
                [sys.executable, __file__, "run_seed", output_dir, str(seed)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                check=True,
            )
        print(f"seed {seed} done", flush=True)

    with ThreadPoolExecutor(parallel) as pool:
        list(pool.map(one, seeds))


read_steps = cache(read_logged_steps)


def read_metric(folder: Path, key: str) -> dict[int, float]:
    """Read a metric of a run by iteration."""
    return {s.step: s.scalars[key] for s in read_steps(str(folder)) if key in s.scalars}


class Detection(NamedTuple):
    """What a detector says of a run.

    Attributes:
        flagged_at: Iteration of the first verdict "collapsed"; `None` without one.
        healthy_until: Last iteration before it, or of the run, with the verdict "healthy"; 0
            without one.
    """

    flagged_at: int | None
    healthy_until: int


def detect_collapse(folder: Path, monitors: list[Monitor], votes: int = 2) -> Detection:
    """Replay a detector on a run's logs.

    Args:
        folder: The run's logs.
        monitors: The detector's monitors.
        votes: Number of signals that make a collapse.
    """
    healthy_until = 0
    for step, verdict in replay_steps(read_steps(str(folder)), monitors, votes):
        if verdict.level is Level.COLLAPSED:
            return Detection(step, healthy_until)
        if verdict.level is Level.HEALTHY:
            healthy_until = step
    return Detection(None, healthy_until)


def compare_with_harm(folder: Path, detection: Detection, bound: float) -> dict[str, Any]:
    """When a run was flagged, and when harm was done.

    A run is flagged in time if no iteration from harm on was called healthy before the flag. A
    roll-back, which restores weights that later healthy iterations have confirmed, then undoes it.

    Args:
        folder: The run's logs.
        detection: What the detector says of the run.
        bound: Gold reward below which harm is done.
    """
    flagged_at, healthy_until = detection
    gold = read_metric(folder, "rollout/gold")
    harmed_at = next((step for step, value in gold.items() if value < bound), None)
    return {
        "flagged_at": flagged_at,
        "healthy_until": healthy_until,
        "gold_at_flag": None if flagged_at is None else gold[flagged_at],
        "peak_gold": max(gold.values()),
        "last_gold": fmean(list(gold.values())[-10:]),
        "harmed_at": harmed_at,
        "lead": None if flagged_at is None or harmed_at is None else harmed_at - flagged_at,
        "in_time": flagged_at is not None and (harmed_at is None or healthy_until < harmed_at),
    }


def summarize_seed(root: Path, seed: int) -> dict[str, Any]:
    """The figures of one seed in the tables."""
    folder = root / f"seed_{seed}"
    policies = json.loads((folder / "evaluation.json").read_text("utf-8"))["policies"]
    gold = {
        name.rpartition("/")[2]: report["rewards"]["gold_reward"]
        for name, report in policies.items()
    }
    bound = gold["sft"]["mean"] - HARM * gold["sft"]["std"]
    logs = {name: folder / "logs" / name for name in RUNS}
    return {
        "seed": seed,
        "sft_gold": gold["sft"]["mean"],
        "sft_gold_std": gold["sft"]["std"],
        "harm_bound": bound,
        **{
            name: compare_with_harm(
                logs[name], detect_collapse(logs[name], default_monitors()), bound
            )
            for name in ("ppo_vanilla", "ppo_max")
        },
        "final_gold": {name: gold[name]["mean"] for name in RUNS},
        "collapses": sum(
            before < Level.COLLAPSED <= after
            for before, after in pairwise(
                [0.0, *read_metric(logs["ppo_rollback"], "monitor/level").values()]
            )
        ),
    }


FIGURES = ("flagged_at", "gold_at_flag", "peak_gold", "last_gold", "harmed_at", "lead")
"""Figures of a run in the first table, in the order of its columns."""


def format_tables(rows: list[dict[str, Any]]) -> str:
    """The tables as Markdown."""

    def shown(value: float | int | None) -> str:
        return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)

    lines = [
        "| run | flagged at iteration | gold at that iteration | peak gold | "
        "gold, last 10 iterations | harm at iteration | lead, iterations |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in ("ppo_vanilla", "ppo_max"):
        lines += [
            f"| {name.removeprefix('ppo_')}, seed {row['seed']} | "
            + " | ".join(shown(row[name][key]) for key in FIGURES)
            + " |"
            for row in rows
        ]
    in_time = sum(row["ppo_vanilla"]["in_time"] for row in rows)
    flagged = sum(row["ppo_vanilla"]["flagged_at"] is not None for row in rows)
    false = sum(row["ppo_max"]["flagged_at"] is not None for row in rows)
    kept = sum(row["final_gold"]["ppo_rollback"] >= row["sft_gold"] for row in rows)
    lines += [
        "",
        f"The detector flags {flagged} of {len(rows)} vanilla runs, {in_time} of them in "
        f"time, and {false} of {len(rows)} PPO-max runs.",
        "",
        "| seed | final gold: SFT | vanilla | vanilla, roll-back | PPO-max | collapses flagged |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row['seed']} | {row['sft_gold']:.2f} | "
            + " | ".join(
                f"{row['final_gold'][name]:.2f}"
                for name in ("ppo_vanilla", "ppo_rollback", "ppo_max")
            )
            + f" | {row['collapses']} |"
            for row in rows
        ),
        "",
        f"With roll-back, the final gold of {kept} of {len(rows)} vanilla runs is no lower than "
        "that of SFT.",
    ]
    return "\n".join(lines) + "\n"


def scale_thresholds(monitor: Monitor, factor: float) -> Monitor:
    """Move every threshold of a monitor `factor` times as far from the baseline."""
    if isinstance(monitor, FirstRatioMonitor):  # fixed thresholds around 1, the healthy ratio
        assert monitor.high is not None
        assert monitor.low is not None
        monitor.high = 1 + (monitor.high - 1) * factor
        monitor.low = 1 - (1 - monitor.low) * factor
        return monitor
    if monitor.high is not None:
        monitor.high *= factor
    if monitor.high_ratio is not None:
        monitor.high_ratio = 1 + (monitor.high_ratio - 1) * factor
    if monitor.low_ratio is not None:
        monitor.low_ratio = max(0.0, 1 - (1 - monitor.low_ratio) * factor)
    return monitor


SIGNALS = ("kl", "length", "perplexity", "entropy", "repetition", "reward")
"""Signals with a curve of their own. The others are about the critic and the computation."""
FACTORS = tuple(1.15**power for power in range(-14, 15))


def compute_rates(
    root: Path, rows: list[dict[str, Any]], monitors: Callable[[], list[Monitor]], votes: int
) -> list[dict[str, float]]:
    """False alarms and collapses flagged in time, as shares of the runs, by factor."""
    points = []
    for factor in FACTORS:
        hits = alarms = 0
        for row in rows:
            logs = root / f"seed_{row['seed']}" / "logs"
            detections = {
                name: detect_collapse(
                    logs / name,
                    [scale_thresholds(monitor, factor) for monitor in monitors()],
                    votes,
                )
                for name in ("ppo_vanilla", "ppo_max")
            }
            hits += compare_with_harm(
                logs / "ppo_vanilla", detections["ppo_vanilla"], row["harm_bound"]
            )["in_time"]
            alarms += detections["ppo_max"].flagged_at is not None
        points.append(
            {"factor": factor, "false_alarms": alarms / len(rows), "in_time": hits / len(rows)}
        )
    return points


def monitors_of(signal: str) -> Callable[[], list[Monitor]]:
    """A function that makes the default monitors of one signal."""
    return lambda: [monitor for monitor in default_monitors() if monitor.vote == signal]


def draw_roc(curves: dict[str, list[dict[str, float]]], output: Path) -> None:
    """Draw false alarms against collapses flagged in time, one curve for each detector."""
    figure = Figure(figsize=(7.5, 5.0), layout="constrained")
    axes = figure.add_subplot()
    for name, points in curves.items():
        together = name == "together"
        axes.plot(
            [point["false_alarms"] for point in points],
            [point["in_time"] for point in points],
            marker="o",
            markersize=5 if together else 3,
            linewidth=2.5 if together else 1.0,
            color="black" if together else None,
            zorder=3 if together else 2,
            label=name,
        )
    axes.set(
        xlabel="PPO-max runs with a false alarm, share",
        ylabel="vanilla runs flagged in time, share",
        xlim=(-0.03, 1.03),
        ylim=(-0.03, 1.03),
    )
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right center", frameon=False)
    figure.savefig(output, dpi=150)


def report(output_dir: str = "runs/collapse", seeds: Sequence[int] = SEEDS) -> None:
    """Tabulate the runs and draw the ROC.

    Args:
        output_dir: Folder of the benchmark.
        seeds: Seeds of the tables.
    """
    root = Path(output_dir)
    rows = [summarize_seed(root, seed) for seed in seeds]
    curves = {"together": compute_rates(root, rows, default_monitors, 2)}
    curves |= {signal: compute_rates(root, rows, monitors_of(signal), 1) for signal in SIGNALS}
    text = format_tables(rows)
    (root / "collapse.md").write_text(text, "utf-8")
    result = {"seeds": rows, "roc": curves}
    (root / "collapse.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    draw_roc(curves, root / "roc.png")
    print(text)


if __name__ == "__main__":
    auto_cli([run, report, run_seed])
