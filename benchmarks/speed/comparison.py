"""What `ppo_iteration.py` and `sft_reward.py` do alike: both sides in turn, tables, results."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from transformers.utils.logging import disable_progress_bar

from benchmarks.speed.job import Job
from benchmarks.speed.summary import labelled, ratios, summary
from benchmarks.speed.tables import comparison_tables
from benchmarks.speed.turns import Labels, Side, alternate
from benchmarks.speed.workload import save_networks
from lit_rlhf.evaluation import write_text

RESULTS = Path(__file__).resolve().parents[1] / "results"


def compare(
    jobs: Mapping[Labels, Job], sides: list[Side], rounds: int, wait: float, quiet_cores: float
) -> dict[str, Any]:
    """Run all jobs on all sides in turn.

    Args:
        jobs: By case and precision; their folders are set here.
        sides: Who does them.
        rounds: Turns of every side.
        wait: Seconds to wait for quiet before a turn, at most.
        quiet_cores: Foreign load that an update is used with.

    Returns:
        What is written as JSON.
    """
    disable_progress_bar()  # of saving the networks
    with TemporaryDirectory(prefix="speed_") as folder:
        placed = {labels: job.placed(Path(folder) / job.precision) for labels, job in jobs.items()}
        for job in {job.precision: job for job in placed.values()}.values():
            save_networks(job.work, Path(job.folder), job.precision)
        ceilings, turns = alternate(placed, sides, rounds, wait, quiet_cores)
    runs = [
        [labelled(run, labels, jobs[labels[:2]]) for run in of_side]
        for labels, of_side in turns.items()
    ]
    rows = [summary(of_side, ceilings, quiet_cores) for of_side in runs]
    threads = next(iter(jobs.values())).threads
    return {
        "machine": {**ceilings, "cores": os.cpu_count(), "threads": threads},
        "summary": rows,
        "ratios": ratios(rows),
        "runs": [run for of_side in runs for run in of_side],
    }


def publish(result: dict[str, Any], output: str) -> None:
    """Write a comparison to `<output>.json` and `<output>.md`, and print its tables."""
    write_text(f"{output}.json", json.dumps(result, indent=1) + "\n")
    write_text(f"{output}.md", comparison_tables(result))
    Console().print(Markdown(comparison_tables(result)))
