"""One PPO iteration of lit_rlhf and of TRL 1.12: the same work, in turn, in one run.

    python -m benchmarks.ppo_iteration --peer_python runs/peer_trl/bin/python
    python -m benchmarks.ppo_iteration --precisions '[fp32,bf16-mixed]'
    python -m benchmarks.ppo_iteration --kernels '[plain,compiled]'
    python -m benchmarks.ppo_iteration --size 135m --peer false
    python -m benchmarks.ppo_iteration --trees '[../before,.]' --peer false --output runs/trees
    python -m benchmarks.ppo_iteration --device cuda --size 1b --precisions '[bf16-true]'

All sides get the same prompts in the same order and networks of the same shape and weights, and
take the same number of optimizer steps of policy and critic in one epoch. Every round measures the
machine's ceilings, then every mode, precision and side in its own process, after waiting for
quiet. Updates with foreign load are recorded and not used. Without `--peer_python` TRL's
environment is made in `runs/peer_trl`.

Prints tables and writes them, and every update, to `ppo_iteration.{md,json}` in the folder of this
processor or GPU in `benchmarks/results`.
"""

from __future__ import annotations

from itertools import product
from typing import Literal

from jsonargparse import auto_cli

from benchmarks.speed.comparison import compare_sides, our_sides, peer_side
from benchmarks.speed.job import Job
from benchmarks.speed.machine import QUIET_CORES
from benchmarks.speed.report import Labels, default_output
from benchmarks.speed.workload import SIZES, Kernels, Mode, Precision, Size, Workload


def ppo_iteration(
    *,
    output: str | None = None,
    peer_python: str | None = None,
    size: Size = "5m",
    device: Literal["cpu", "cuda"] = "cpu",
    precisions: tuple[Precision, ...] = ("fp32",),
    modes: tuple[Mode, ...] = ("ragged", "full"),
    rounds: int = 3,
    updates: int = 3,
    threads: int = 2,
    wait: float = 600.0,
    quiet_cores: float = QUIET_CORES,
    peer: bool = True,
    trees: tuple[str, ...] = (),
    kernels: tuple[Kernels, ...] = ("plain",),
) -> None:
    """Measure all sides in turn, print the tables and write the results.

    Args:
        output: Path of the results, without `.md` and `.json`; `None`: `ppo_iteration`
            with the size, unless that is `5m`, in the folder of this processor or GPU in
            `benchmarks/results`.
        peer_python: Interpreter of an environment with TRL 1.12.
        size: Networks, batch and lengths.
        device: Device of all sides.
        precisions: Precisions to measure.
        modes: `ragged` for responses that end at random, `full` for responses that do not end.
        rounds: Number of turns of every side.
        updates: Timed updates of a turn. Two more come before them.
        threads: Number of threads of every process.
        wait: Seconds to wait for a quiet machine before a turn, at most.
        quiet_cores: Foreign load, in cores, that an update is used with.
        peer: Measure TRL too.
        trees: Source trees of lit_rlhf (clones or worktrees) to measure in turn, each with its own
            `benchmarks.speed.ours`; none for this one.
        kernels: What runs in the networks of lit_rlhf: each is a side of its own. `compiled` needs
            a C++ compiler on a CPU, `fused` a GPU.
    """
    sides = our_sides("benchmarks.speed.ours", trees, kernels)
    if peer:
        sides.append(peer_side("benchmarks.speed.peer_trl", peer_python))
    jobs: dict[Labels, Job] = {
        (mode, precision): Job(
            Workload(mode=mode, **SIZES[size]),
            precision=precision,
            device=device,
            updates=updates,
            threads=threads,
        )
        for mode, precision in product(modes, precisions)
    }
    compare_sides(
        jobs,
        sides,
        rounds=rounds,
        wait=wait,
        quiet_cores=quiet_cores,
        output=output or default_output("ppo_iteration", device=device, size=size),
        size=size,
    )


if __name__ == "__main__":
    auto_cli(ppo_iteration)
