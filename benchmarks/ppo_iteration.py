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

import json
import os
from itertools import product
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any, Literal

from jsonargparse import auto_cli
from rich.console import Console
from rich.markdown import Markdown

from benchmarks.speed.flops import generation_bytes, update_flops
from benchmarks.speed.job import Job
from benchmarks.speed.machine import QUIET_CORES
from benchmarks.speed.tables import ppo_tables
from benchmarks.speed.turns import Labels, Side, alternate, peer_interpreter, quiet_updates
from benchmarks.speed.workload import SIZES, Mode, Precision, Size, Workload, save_networks
from lit_rlhf.evaluation.files import write_text

RESULTS = Path(__file__).parent / "results"
PHASES = ("rollout", "score", "update", "other")


def counted(update: dict[str, Any], job: Job) -> dict[str, Any]:
    """An update with its useful work in place of the lengths of its prompts and responses."""
    prompts, responses = update["prompts"], update["responses"]
    value_bytes = 4 if job.precision == "fp32" else 2
    return {
        **{key: update[key] for key in ("seconds", "foreign_cores", "phases")},
        "prompt_tokens": sum(prompts),
        "response_tokens": sum(responses),
        "flops": update_flops(job.work, prompts, responses)._asdict(),
        "generation_bytes": generation_bytes(job.work, prompts, responses, value_bytes),
    }


def labelled(run: dict[str, Any], labels: tuple[str, ...], job: Job) -> dict[str, Any]:
    """A turn's result with its mode and side, and its updates' work counted."""
    mode, _, side = labels
    updates = [counted(update, job) for update in run["updates"]]
    return {"side": side, "mode": mode, **run, "updates": updates}


def summary(
    runs: list[dict[str, Any]], ceilings: dict[str, Any], quiet_cores: float
) -> dict[str, Any]:
    """One side's figures in one mode and precision.

    Args:
        runs: Its turns.
        ceilings: What the machine can reach.
        quiet_cores: Foreign load that an update is used with.
    """
    first = runs[0]
    name = f"{first['side']}, {first['mode']}, {first['precision']}"
    used = quiet_updates(runs, name, quiet_cores)
    seconds = [update["seconds"] for update in used]
    rates = [sum(u["flops"].values()) / u["seconds"] for u in used]
    ceiling = ceilings["flops_fp32" if first["precision"] == "fp32" else "flops_bf16"]
    row = {
        **{key: first[key] for key in ("side", "mode", "precision")},
        "updates": len(used),
        "updates_dropped": sum(len(run["updates"]) for run in runs) - len(used),
        "seconds": median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "phases": {phase: median(u["phases"][phase] for u in used) for phase in PHASES},
        "response_tokens": fmean(u["response_tokens"] for u in used),
        "real_tokens": fmean(u["prompt_tokens"] + u["response_tokens"] for u in used),
        "useful_gflops": median(rates) / 1e9,
        "ceiling_fraction": median(rates) / ceiling,
        "peak_memory_mib": max(run["peak_memory_mib"] for run in runs),
        "memory_before_mib": max(run["memory_before_mib"] for run in runs),
    }
    if ceilings["peak_bf16"] is not None:
        row["training_mfu"] = median(
            u["flops"]["update"] / u["phases"]["update"] / ceilings["peak_bf16"] for u in used
        )
        row["generation_tokens_per_second"] = median(
            u["response_tokens"] / u["phases"]["rollout"] for u in used
        )
        row["generation_bound_fraction"] = median(
            u["generation_bytes"] / ceilings["bytes_per_second"] / u["phases"]["rollout"]
            for u in used
        )
    return row


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The peer's seconds over ours and our memory over the peer's, for all precisions of a mode."""
    return [
        {
            "mode": a["mode"],
            "precision": a["precision"],
            "peer_precision": b["precision"],
            "speed": b["seconds"] / a["seconds"],
            "memory": a["peak_memory_mib"] / b["peak_memory_mib"],
        }
        for a, b in product(rows, rows)
        if (a["side"], b["side"]) == ("lit_rlhf", "TRL") and a["mode"] == b["mode"]
    ]


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
        updates: Timed updates of a turn; one more comes before them.
        threads: Of every process.
        wait: Seconds to wait for a quiet machine before a turn, at most.
        quiet_cores: Foreign load, in cores, that an update is used with.
        peer: Measure TRL too.
    """
    sides = [Side("lit_rlhf", "benchmarks.speed.ours")]
    if peer:
        sides.append(Side("TRL", "benchmarks.speed.peer_trl", peer_interpreter(peer_python)))
    with TemporaryDirectory(prefix="speed_") as folder:
        cases: dict[Labels, Job] = {}
        for mode, precision in product(modes, precisions):
            work = Workload(mode=mode, **SIZES[size])
            networks = Path(folder) / precision
            save_networks(work, networks, precision)
            cases[mode, precision] = Job(
                work, str(networks), precision, device, 1, updates, threads
            )
        ceilings, turns = alternate(cases, sides, rounds, wait, quiet_cores)
    runs = {
        labels: [labelled(run, labels, cases[labels[:2]]) for run in of_side]
        for labels, of_side in turns.items()
    }
    rows = [summary(of_side, ceilings, quiet_cores) for of_side in runs.values()]
    result = {
        "machine": {**ceilings, "cores": os.cpu_count(), "threads": threads},
        "size": size,
        "summary": rows,
        "ratios": ratios(rows),
        "runs": [run for of_side in runs.values() for run in of_side],
    }
    write_text(f"{output}.json", json.dumps(result, indent=1) + "\n")
    write_text(f"{output}.md", ppo_tables(result))
    Console().print(Markdown(ppo_tables(result)))


if __name__ == "__main__":
    auto_cli(ppo_iteration)
