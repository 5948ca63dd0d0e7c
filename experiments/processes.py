"""Runs of an experiment or benchmark in processes, some at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple


class Job(NamedTuple):
    """A run in its own process.

    Attributes:
        command: Words after `python -m`.
        log: File that its output is appended to.
        threads: Number of threads.
    """

    command: list[str]
    log: Path
    threads: int = 1

    def run(self) -> None:
        """Run to the end; a line on standard error says so.

        Raises:
            subprocess.CalledProcessError: If the process fails.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as log:
            subprocess.run(
                [sys.executable, "-m", *self.command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": str(self.threads)},
                check=True,
            )
        print(f"{' '.join(self.command[1:])} has finished", file=sys.stderr, flush=True)


def run_jobs(jobs: Iterable[Job], parallel: int) -> None:
    """Run jobs, so many at a time, and raise the first failure."""
    with ThreadPoolExecutor(parallel) as pool:
        list(pool.map(Job.run, jobs))
