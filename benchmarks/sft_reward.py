"""SFT and reward modelling of lit_rlhf and of TRL 1.12: the same steps, in turn, in one run.

    python -m benchmarks.sft_reward --peer_python runs/peer_trl/bin/python
    python -m benchmarks.sft_reward --size 135m --peer false

All sides step on the same batches: prompts with a ragged response each, or with two for the reward
model, whose loss is only the pairwise one. Rounds, source trees and waiting for quiet are as in
`ppo_iteration.py`. Results go to `benchmarks/results/MACHINE/sft_reward.{md,json}`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Literal

from jsonargparse import auto_cli

from benchmarks.speed.comparison import compare_sides, our_sides, peer_side
from benchmarks.speed.job import Job
from benchmarks.speed.machine import QUIET_CORES
from benchmarks.speed.report import Labels, default_output
from benchmarks.speed.workload import SIZES, Kernels, Precision, Size, Workload


def sft_reward(
    *,
    output: str | None = None,
    peer_python: str | None = None,
    size: Size = "5m",
    device: Literal["cpu", "cuda"] = "cpu",
    precisions: tuple[Precision, ...] = ("fp32",),
    stages: tuple[Literal["sft", "reward"], ...] = ("sft", "reward"),
    batch: int | None = None,
    rounds: int = 3,
    updates: int = 8,
    threads: int = 2,
    wait: float = 600.0,
    quiet_cores: float = QUIET_CORES,
    peer: bool = True,
    trees: tuple[str, ...] = (),
    kernels: tuple[Kernels, ...] = ("plain",),
) -> None:
    """Measure all sides in turn, print the tables and write the results.

    Args:
        output: Path of the results, without `.md` and `.json`; `None`: `sft_reward`
            with the size, unless that is `5m`, in the folder of this processor or GPU in
            `benchmarks/results`.
        peer_python: Interpreter of an environment with TRL 1.12.
        size: Networks and lengths.
        device: Device of all sides.
        precisions: Precisions to measure.
        stages: Stages to measure.
        batch: Sequences, or pairs, of an optimizer step; `None` for the size's minibatch.
        rounds: Number of turns of every side.
        updates: Timed steps of a turn. Two more come before them.
        threads: Number of threads of every process.
        wait: Seconds to wait for a quiet machine before a turn, at most.
        quiet_cores: Foreign load, in cores, that a step is used with.
        peer: Measure TRL too.
        trees: Source trees of lit_rlhf (clones or worktrees) to measure in turn, each with its own
            `benchmarks.speed.ours_supervised`; none for this one.
        kernels: What runs in the networks of lit_rlhf: each is a side of its own. `compiled` needs
            a C++ compiler on a CPU, `fused` a GPU.
    """
    sides = our_sides("benchmarks.speed.ours_supervised", trees, kernels)
    if peer:
        sides.append(peer_side("benchmarks.speed.peer_supervised", peer_python))
    work = Workload(**SIZES[size])
    work = replace(work, batch=batch or work.minibatch)
    jobs: dict[Labels, Job] = {
        (stage, precision): Job(
            work,
            stage=stage,
            precision=precision,
            device=device,
            updates=updates,
            threads=threads,
        )
        for stage, precision in product(stages, precisions)
    }
    compare_sides(
        jobs,
        sides,
        rounds=rounds,
        wait=wait,
        quiet_cores=quiet_cores,
        output=output or default_output("sft_reward", device=device, size=size),
        size=size,
    )


if __name__ == "__main__":
    auto_cli(sft_reward)
