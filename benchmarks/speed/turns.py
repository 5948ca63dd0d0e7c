"""Runs both sides in turn, each in a process of its own, and keeps what was measured in quiet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.speed.job import Job, environment
from benchmarks.speed.machine import QUIET_CORES, wait_until_quiet
from lit_rlhf.evaluation import progress_bar

ROOT = Path(__file__).resolve().parents[2]
PEER = ("torch==2.13.0", "trl==1.12.0", "transformers==5.23.0")
"""The last release of TRL with a PPOTrainer, and the versions that it is measured with."""
PEER_FOLDER = ROOT / "runs" / "peer_trl"
ATTEMPTS = 3
Labels = tuple[str, ...]
"""What tells one case of a benchmark from another: a mode and a precision, say."""


@dataclass(frozen=True)
class Side:
    """A program that does a job.

    Attributes:
        name: In tables.
        module: What its process runs.
        python: The interpreter of its environment.
    """

    name: str
    module: str
    python: str = sys.executable


CEILINGS = Side("ceilings", "benchmarks.speed.ceilings")


def peer_interpreter(given: str | None) -> str:
    """The interpreter of TRL's environment; without one `given`, that of `runs/peer_trl`.

    That one is made when it is missing, by `python -m venv runs/peer_trl` and
    `runs/peer_trl/bin/pip install torch==2.13.0 trl==1.12.0 transformers==5.23.0`.

    Raises:
        ValueError: If `given` is no file.
    """
    if given is not None:
        if not Path(given).is_file():
            raise ValueError(f"peer_python: expected a Python interpreter, got {given!r}")
        return given
    python = PEER_FOLDER / "bin" / "python"
    if not (PEER_FOLDER / "installed").is_file():
        subprocess.run([sys.executable, "-m", "venv", str(PEER_FOLDER)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", *PEER], check=True)
        (PEER_FOLDER / "installed").touch()
    return str(python)


def answer(side: Side, job: Job) -> dict[str, Any]:
    """Run a job in the side's process.

    Raises:
        RuntimeError: If the process fails, with the end of what it printed.
    """
    folder = Path(job.folder)
    job_file, result = folder / "job.json", folder / "result.json"
    job.save(job_file)
    done = subprocess.run(
        [side.python, "-m", side.module, str(job_file), str(result)],
        cwd=ROOT,
        env=environment(job.threads) | {"PYTHONPATH": module_path(side)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{side.name}: {side.module} failed:\n{done.stdout[-4000:]}")
    values: dict[str, Any] = json.loads(result.read_text("utf-8"))
    result.unlink()
    return values


def module_path(side: Side) -> str:
    """Where the side's process finds modules: as here, but for an environment of its own."""
    return os.environ.get("PYTHONPATH", "") if side.python == sys.executable else ""


def is_quiet(update: dict[str, Any], cores: float = QUIET_CORES) -> bool:
    """Whether other processes used at most that many cores during an update."""
    return bool(update["foreign_cores"] <= cores)


def turn(side: Side, job: Job, wait: float, cores: float = QUIET_CORES) -> dict[str, Any]:
    """Run a job on a quiet machine; again if something else ran during each of its updates.

    Args:
        side: Who.
        job: What.
        wait: Seconds to wait for quiet, at most.
        cores: Foreign load that an update is used with.

    Returns:
        The last answer.
    """
    result: dict[str, Any] = {}
    for _ in range(ATTEMPTS):
        wait_until_quiet(wait)
        result = answer(side, job)
        if any(is_quiet(update, cores) for update in result["updates"]):
            break
    return result


def alternate(
    cases: Mapping[Labels, Job],
    sides: Sequence[Side],
    rounds: int,
    wait: float,
    cores: float = QUIET_CORES,
) -> tuple[dict[str, Any], dict[Labels, list[dict[str, Any]]]]:
    """Run every case on every side, one after the other, and all of it again in each round.

    Args:
        cases: Jobs.
        sides: Who does them.
        rounds: How often.
        wait: Seconds to wait for quiet before a turn, at most.
        cores: Foreign load that an update is used with.

    Returns:
        The machine's ceilings, the best of all rounds; and the turns' results by case and side.
    """
    ceilings: dict[str, Any] = {}
    runs: dict[Labels, list[dict[str, Any]]] = {}
    with progress_bar("turns", rounds * len(cases) * len(sides)) as advance:
        for _ in range(rounds):
            wait_until_quiet(wait)
            ceilings = highest(ceilings, answer(CEILINGS, next(iter(cases.values()))))
            for (labels, job), side in product(cases.items(), sides):
                runs.setdefault((*labels, side.name), []).append(turn(side, job, wait, cores))
                advance(1)
    return ceilings, runs


def highest(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The higher of two measurements of each ceiling; what is no number is alike in both."""
    return {
        key: max(value, first.get(key, value)) if isinstance(value, float) else value
        for key, value in second.items()
    }


def quiet_updates(
    runs: Sequence[dict[str, Any]], what: str, cores: float = QUIET_CORES
) -> list[dict[str, Any]]:
    """The updates of several turns during which nothing else ran.

    Args:
        runs: Answers of one side to one job.
        what: Side and job, in words.
        cores: Foreign load that an update is used with.

    Raises:
        RuntimeError: If there is none.
    """
    updates = [update for run in runs for update in run["updates"]]
    quiet = [update for update in updates if is_quiet(update, cores)]
    if not quiet:
        least = min((update["foreign_cores"] for update in updates), default=float("nan"))
        raise RuntimeError(
            f"{what}: expected an update with at most {cores} cores of foreign load, "
            f"got {least:.2f} at least; stop what else runs and try again"
        )
    return quiet
