"""What a critic knows by position: returns, values and explained variance along a response.

    python -m experiments critic_positions run      # trains what is missing
    python -m experiments critic_positions page     # draws the figure

Repeats the runs of `experiments.estimators` that have a critic (PPO-max and VAPO's lambdas), with
a module that keeps the returns and values of each token. Returns are the sums of the rewards to
come, and not the critic's own targets. The variance of returns at a position is over the responses
that reach it, and explained is what the value tells of it, 1 - Var(return - value) / Var(return).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import Tensor

from experiments.drawing import COLORS, STYLE, band, finish_axis
from experiments.estimators import study as estimators
from experiments.frame import IMAGES, Documents, fill_template
from experiments.processes import command_job, run_missing_jobs
from experiments.reproduce.running import Plan
from experiments.reproduce.table import foundations_by_name
from experiments.results_file import read_runs, table, write_run
from lit_rlhf.files import write_text
from lit_rlhf.functional import gae
from lit_rlhf.modules import PPOModule
from lit_rlhf.ppo import PPO
from lit_rlhf.rollout import Experience, RolloutBatch, TokenStatistics
from lit_rlhf.tools.commands.quickstart import Quickstart

RESULTS = Path(__file__).with_name("results.jsonl")
FIGURE = IMAGES / "critic_positions.svg"
TEMPLATE = Path(__file__).with_name("results.md.j2")
SEEDS: Final = (43, 44, 45)
ARMS: Final = {"ppo_max": "PPO-max", "vapo": "VAPO's lambdas"}
PHASES: Final = {"critic pre-training": (0, 5), "after it": (5, 20), "end": (20, 35)}
"""Iterations, the first of a phase and the first after it."""
MEASURES: Final = ("return", "value", "explained_variance")
POSITIONS: Final = 12
LEAST: Final = 50
"""Responses that have to reach a position."""


class WatchedPPO(PPO):
    """PPO that keeps returns and values of its training."""

    kept: list[list[Tensor]]

    def experience(
        self, rollouts: RolloutBatch, rewards: Tensor, estimates: TokenStatistics
    ) -> Experience:
        """Keep the returns, values and response mask of an iteration, `[B, POSITIONS]` each."""
        if not hasattr(self, "kept"):
            self.kept = []
        mask = rollouts.response_mask
        returns = gae(torch.zeros_like(rewards), rewards, mask, lam=1.0).advantages
        tensors = (returns, estimates.values, mask.float())
        width = max(POSITIONS, mask.shape[1])
        padded = [torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in tensors]
        self.kept.append([x[:, :POSITIONS] for x in padded])
        return super().experience(rollouts, rewards, estimates)


class WatchedModule(PPOModule):
    """A run of `WatchedPPO` that writes what it kept beside its model."""

    ppo_class = WatchedPPO
    ppo: WatchedPPO

    def on_fit_end(self) -> None:
        """Write the measures of all phases."""
        super().on_fit_end()
        phases = {
            name: measure(
                *(torch.cat(parts) for parts in zip(*self.ppo.kept[slice(*of)], strict=True))
            )
            for name, of in PHASES.items()
        }
        write_text(f"{self.output_dir}/positions.json", json.dumps(phases))


def measure(returns: Tensor, values: Tensor, mask: Tensor) -> list[dict[str, float]]:
    """Responses that reach each position, mean return and value there, and explained variance.

    All are `[N, POSITIONS]`; positions that fewer than `LEAST` responses reach are left out.
    """
    rows = []
    for place in range(returns.shape[1]):
        reaching = mask[:, place].bool()
        if int(reaching.sum()) < LEAST:
            break
        real = returns[reaching, place].double()
        guess = values[reaching, place].double()
        row = {
            "responses": int(reaching.sum()),
            "return": float(real.mean()),
            "value": float(guess.mean()),
            "explained_variance": float(1 - (real - guess).var() / real.var()),
        }
        rows.append({key: round(value, 4) for key, value in row.items()})
    return rows


def run_one(output_dir: str, seed: int, arm: str) -> None:
    """Train an arm in this process and keep its measures.

    Args:
        output_dir: Folder of the benchmark.
        seed: As in `experiments.estimators`.
        arm: Key of `ARMS`.
    """
    root = Plan(foundations_by_name()[estimators.FOUNDATION], seed, Path(output_dir)).root
    name = f"watched_{arm}"
    configs: list[str | Path] = ["ppo_max.yaml", *estimators.arm_overlays(root, arm)]
    watched = f"{WatchedModule.__module__}.{WatchedModule.__qualname__}"
    stages = Quickstart(root, seed, overwrite=True)
    stages.fit_ppo(configs, "--model", watched, "--name", name)
    positions = json.loads((root / name / "positions.json").read_text("utf-8"))
    write_run(RESULTS, f"{arm}-seed_{seed}", positions)


def run(output_dir: str = "runs/reproduction") -> None:
    """Train what has no result yet, on the models of `experiments.estimators`.

    Args:
        output_dir: Folder of all runs.
    """
    jobs = {
        f"{arm}-seed_{seed}": command_job(
            "critic_positions",
            "run_one",
            {"output_dir": output_dir, "seed": seed, "arm": arm},
            log=Path(output_dir) / f"positions-{seed}-{arm}.log",
        )
        for seed in SEEDS
        for arm in ARMS
    }
    run_missing_jobs(jobs, RESULTS, 1)


def courses(results: Mapping[str, Any], arm: str, phase: str, key: str) -> list[list[float]]:
    """A measure by position, of each seed."""
    return [[row[key] for row in results[f"{arm}-seed_{seed}"][phase]] for seed in SEEDS]


def documents() -> Documents:
    """The figure, and all measures at the end, from the committed results."""
    results = read_runs(RESULTS)
    return {
        RESULTS.with_suffix(".md"): format_tables(results),
        FIGURE: lambda: draw(results),
    }


def format_tables(results: Mapping[str, Any]) -> str:
    """Format the measures of each arm at the end, as means over the seeds.

    Args:
        results: Results by the name of the run.
    """
    arms = []
    for arm, label in ARMS.items():
        columns = [courses(results, arm, "end", measure) for measure in MEASURES]
        size = min(map(len, columns[0]))
        rows = [
            [place + 1, *(f"{fmean(run[place] for run in column):.2f}" for column in columns)]
            for place in range(size)
        ]
        head = ["token", *(measure.replace("_", " ") for measure in MEASURES)]
        arms.append({"label": label, "table": table(head, rows)})
    return fill_template(TEMPLATE, arms=arms)


def draw(results: Mapping[str, Any]) -> Figure:
    """Draw returns and values by position, and the variance that values explain.

    Args:
        results: Results by the name of the run.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=(9.0, 3.4))
        left, *others = figure.subplots(1, 3)
        for color, (key, label) in zip(
            COLORS, {"return": "return", "value": "value"}.items(), strict=False
        ):
            _draw(left, courses(results, "ppo_max", "end", key), label, color)
        left.set_title("PPO-max, iterations 21 to 35: means")
        for axis, (arm, label) in zip(others, ARMS.items(), strict=True):
            # the curve of pre-training is far below 0
            for color, (phase, (first, end)) in zip(
                COLORS[2:], [*PHASES.items()][1:], strict=False
            ):
                values = courses(results, arm, phase, "explained_variance")
                _draw(axis, values, f"iterations {first + 1} to {end}", color)
            axis.set_title(f"{label}: variance explained")
            axis.set_ylim(0.0, 1.0)
        for axis in (left, *others):
            axis.set_xlabel("token of the response")
            axis.legend(fontsize=8)
            finish_axis(axis)
        return figure


def _draw(axis: Any, values: Sequence[Sequence[float]], label: str, color: str) -> None:  # noqa: ANN401
    size = min(map(len, values))
    band(axis, [np.array(row[:size]) for row in values], list(range(1, size + 1)), label, color)


COMMANDS = (run, run_one)
