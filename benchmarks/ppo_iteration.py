"""One PPO iteration of lit_rlhf and of TRL 1.12: the same work, in turn, in one run.

    python -m benchmarks.ppo_iteration --peer_python runs/peer_trl/bin/python
    python -m benchmarks.ppo_iteration --precisions '[fp32,bf16-mixed]'
    python -m benchmarks.ppo_iteration --device cuda --size 1b --precisions '[bf16-true]'

Same prompts in the same order, same networks, one epoch, four optimizer steps each of policy and
critic. Every round measures the machine's ceilings, then every mode, precision and side in a
process of its own, and waits for quiet before each. Updates with foreign load are recorded and not
used. Without `--peer_python` TRL's environment is made in `runs/peer_trl`.

Prints a table and writes it, with every update, to `benchmarks/results/ppo_iteration.{md,json}`.
"""

from __future__ import annotations

from itertools import product
from typing import Literal

from jsonargparse import auto_cli

from benchmarks.speed.comparison import RESULTS, compare, publish
from benchmarks.speed.job import Job
from benchmarks.speed.machine import QUIET_CORES
from benchmarks.speed.turns import Labels, Side, peer_interpreter
from benchmarks.speed.workload import SIZES, Mode, Precision, Size, Workload


def ppo_iteration(
    output: str = str(RESULTS / "ppo_iteration"),
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
) -> None:
    """Measure both sides in turn, print the tables and write the results.

    Args:
        output: Path of the results, without `.md` and `.json`.
        peer_python: Interpreter of an environment with TRL 1.12.
        size: Of the networks.
        device: Where both sides run.
        precisions: Measured on both sides.
        modes: Responses that end at random, and responses that do not.
        rounds: Turns of every side.
        updates: Timed updates of a turn; two more come before them.
        threads: Of every process.
        wait: Seconds to wait for a quiet machine before a turn, at most.
        quiet_cores: Foreign load, in cores, that an update is used with.
        peer: Measure TRL too.
    """
    sides = [Side("lit_rlhf", "benchmarks.speed.ours")]
    if peer:
        sides.append(Side("TRL", "benchmarks.speed.peer_trl", peer_interpreter(peer_python)))
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
    publish(compare(jobs, sides, rounds, wait, quiet_cores) | {"size": size}, output)


if __name__ == "__main__":
    auto_cli(ppo_iteration)
