"""Watches what a long run takes from the machine: memory, descriptors, threads, files.

`python -m experiments long_watch NAME ITERATIONS --config quickstart/ppo_max ...` runs
`lit_rlhf fit` with these options for so many iterations of PPO in a process of its own, looks at
it at twenty moments, prints a table, and keeps the looks under the name in
`experiments/long_watch/results.jsonl`. A number that still grows in the second half is a leak.
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
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer

from experiments.results_file import table, write_run

RESULTS = Path(__file__).with_name("results.jsonl")
LOOKS = 20
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
        self.path, self.every_n_batches = path, every_n_batches

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


def main(name: str, iterations: int, options: list[str]) -> None:
    """Run, and keep and print the looks."""
    with tempfile.TemporaryDirectory() as folder:
        looks, overlay = Path(folder, "looks.jsonl"), Path(folder, "watch.yaml")
        look = {"path": str(looks), "every_n_batches": max(iterations // LOOKS, 1)}
        callback = {"class_path": "experiments.long_watch.study.Look", "init_args": look}
        settings = {
            "trainer": {"max_epochs": -1, "callbacks+": [callback]},
            "model": {"init_args": {"max_iterations": iterations}},
        }
        overlay.write_text(yaml.safe_dump(settings))
        command = [sys.executable, "-m", "lit_rlhf.cli.main", "fit", *options]
        subprocess.run([*command, "--config", str(overlay)], check=True)
        found = [json.loads(line) for line in looks.read_text().splitlines()]
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    write_run(RESULTS, name, {"options": options, "versions": versions, "looks": found})
    print(table(list(HEAD.values()), [[look[key] for key in HEAD] for look in found]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
