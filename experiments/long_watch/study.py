"""Watches what a long run takes from the machine: memory, descriptors, threads, files.

    python -m experiments long_watch run    # watches the runs that have no result
    python -m experiments long_watch page   # writes the tables

A run is `lit_rlhf fit` in a process of its own, which is looked at twenty times. A number that
still grows in the second half is a leak.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer

from experiments.frame import Documents
from experiments.results_file import read_runs, table, write_run

RESULTS = Path(__file__).with_name("results.jsonl")
LOOKS = 20


class Watched(NamedTuple):
    """A run that is watched.

    Attributes:
        iterations: Iterations of PPO.
        options: Options of `lit_rlhf fit`.
    """

    iterations: int
    options: list[str]


QUICKSTART = ["--config", "quickstart/ppo_max", "--config", "overlays/resumable"]
QUICKSTART += ["--data.batch_size", "32", "--model.minibatches.minibatch_size", "8"]
SMOLLM2 = ["--config", "smollm2/ppo"]
SMOLLM2 += ["--config", "runs/known_truth/seed_11/configs/ppo_max.yaml"]
SMOLLM2 += ["--config", "overlays/resumable"]
SMOLLM2 += ["--model.init_args.output_dir", "runs/long_watch/model"]
SMOLLM2 += ["--trainer.logger.init_args.save_dir", "runs/long_watch/logs"]
RUNS = {"quickstart": Watched(500, QUICKSTART), "smollm2": Watched(60, SMOLLM2)}
"""The second one needs the folder of `known_truth`."""
HEAD = {
    "iteration": "iteration",
    "memory": "memory, MiB",
    "descriptors": "open files",
    "threads": "threads",
    "temporary": "files in /tmp",
    "log": "log, KiB",
}


class Look(Callback):
    """Notes what this process holds, at some iterations.

    Args:
        path: File that a JSON line is added to at each look.
        every_n_batches: Batches between two looks.
    """

    def __init__(self, path: str, every_n_batches: int) -> None:
        self.path = path
        self.every_n_batches = every_n_batches

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Look, if it is time."""
        done = trainer.fit_loop.total_batch_idx + 1
        if done % self.every_n_batches:
            return
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        log = Path(str(trainer.log_dir))
        look = {
            "iteration": done,
            "memory": pages * os.sysconf("SC_PAGE_SIZE") // 2**20,
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "python_threads": threading.active_count(),
            "temporary": sum(len(files) for *_, files in os.walk(tempfile.gettempdir())),
            "log": sum(f.stat().st_size for f in log.rglob("*") if f.suffix != ".ckpt") // 1024,
        }
        with Path(self.path).open("a") as file:
            file.write(json.dumps(look) + "\n")


def run(only: tuple[str, ...] = tuple(RUNS)) -> None:
    """Watch the runs that have no result, and keep the looks.

    Args:
        only: Names of the runs to watch.
    """
    for name in only:
        if name not in read_runs(RESULTS):
            write_run(RESULTS, name, watch(RUNS[name]))


def watch(watched: Watched) -> dict[str, Any]:
    """The looks at a run, with its options and the versions of the libraries."""
    with tempfile.TemporaryDirectory() as folder:
        looks = Path(folder, "looks.jsonl")
        overlay = Path(folder, "watch.yaml")
        look = {"path": str(looks), "every_n_batches": max(watched.iterations // LOOKS, 1)}
        callback = {"class_path": "experiments.long_watch.study.Look", "init_args": look}
        settings = {
            "trainer": {"max_epochs": -1, "callbacks+": [callback]},
            "model": {"init_args": {"max_iterations": watched.iterations}},
        }
        overlay.write_text(yaml.safe_dump(settings))
        command = [sys.executable, "-m", "lit_rlhf.cli.main", "fit", *watched.options]
        subprocess.run([*command, "--config", str(overlay)], check=True)
        rows = [json.loads(line) for line in looks.read_text().splitlines()]
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    return {"options": watched.options, "versions": versions, "looks": rows}


def documents() -> Documents:
    """All looks, from the committed results."""
    parts = []
    for name, result in read_runs(RESULTS).items():
        rows = [[look[key] for key in HEAD] for look in result["looks"]]
        command = " ".join(["lit_rlhf fit", *result["options"]])
        parts.append(f"## {name}\n\n`{command}`\n\n{table(list(HEAD.values()), rows)}")
    return {RESULTS.with_suffix(".md"): "# What a long run takes\n\n" + "\n".join(parts)}


COMMANDS = (run,)
