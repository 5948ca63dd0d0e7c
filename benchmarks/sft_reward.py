"""SFT and reward modelling of lit_rlhf and of TRL 1.12: the same steps, in turn, in one run.

    python -m benchmarks.sft_reward --peer_python runs/peer_trl/bin/python

Both sides step on the same batches: 32 prompts with a ragged response each, or with two for the
reward model, whose loss is the pairwise one alone. Rounds, quiet and results are as in
`ppo_iteration.py`; results go to `benchmarks/results/sft_reward.{md,json}`.
"""

from __future__ import annotations

from itertools import product
from typing import Literal

from jsonargparse import auto_cli

from benchmarks.speed.comparison import RESULTS, compare, publish
from benchmarks.speed.job import Job
from benchmarks.speed.machine import QUIET_CORES
from benchmarks.speed.turns import Labels, Side, peer_interpreter
from benchmarks.speed.workload import SIZES, Precision, Size, Workload


def sft_reward(
    output: str = str(RESULTS / "sft_reward"),
    peer_python: str | None = None,
    size: Size = "5m",
    device: Literal["cpu", "cuda"] = "cpu",
    precisions: tuple[Precision, ...] = ("fp32",),
    stages: tuple[Literal["sft", "reward"], ...] = ("sft", "reward"),
    batch: int = 32,
    rounds: int = 3,
    updates: int = 8,
    threads: int = 2,
    wait: float = 600.0,
    quiet_cores: float = QUIET_CORES,
) -> None:
    """Measure both sides in turn, print the tables and write the results.

    Args:
        output: Path of the results, without `.md` and `.json`.
        peer_python: Interpreter of an environment with TRL 1.12.
        size: Of the networks.
        device: Where both sides run.
        precisions: Measured on both sides.
        stages: What is trained.
        batch: Sequences, or pairs, of an optimizer step.
        rounds: Turns of every side.
        updates: Timed steps of a turn; two more come before them.
        threads: Of every process.
        wait: Seconds to wait for a quiet machine before a turn, at most.
        quiet_cores: Foreign load, in cores, that a step is used with.
    """
    sides = [
        Side("lit_rlhf", "benchmarks.speed.ours_supervised"),
        Side("TRL", "benchmarks.speed.peer_supervised", peer_interpreter(peer_python)),
    ]
    jobs: dict[Labels, Job] = {
        (stage, precision): Job(
            Workload(**SIZES[size] | {"batch": batch}),
            stage=stage,
            precision=precision,
            device=device,
            updates=updates,
            threads=threads,
        )
        for stage, precision in product(stages, precisions)
    }
    publish(compare(jobs, sides, rounds, wait, quiet_cores) | {"size": size}, output)


if __name__ == "__main__":
    auto_cli(sft_reward)
