"""Runs the sides of a benchmark in turn, each in its own process.

Every round measures the machine's ceilings, then every case on every side, so that a change of the
machine hits all sides. Before each turn the script waits until other processes use little, and an
update during which they did not is recorded and left out of the figures.

Finished turns are kept in `<output>.json.partial` until the results are written. The same command
continues with the turns that are missing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from transformers.utils.logging import disable_progress_bar

from benchmarks.speed.job import Job, environment
from benchmarks.speed.machine import QUIET_CORES, wait_until_quiet
from benchmarks.speed.report import (
    OURS,
    PEER,
    Labels,
    comparison_tables,
    is_quiet,
    label_run,
    ratios,
    summarize,
)
from benchmarks.speed.workload import Kernels, save_networks
from lit_rlhf.environment import choose_values
from lit_rlhf.files import ProgressFile, write_text
from lit_rlhf.tools.evaluation.output import progress_bar

ROOT = Path(__file__).resolve().parents[2]
PEER_PACKAGES = ("torch==2.13.0", "trl==1.12.0", "transformers==5.23.0")
"""The last release of TRL with a PPOTrainer, and the versions that it is measured with."""
PEER_FOLDER = ROOT / "runs" / "peer_trl"
ATTEMPTS = 3


@dataclass(frozen=True)
class Side:
    """A program that runs jobs.

    Attributes:
        name: Name in tables.
        module: What its process runs.
        python: Interpreter of its environment.
        tree: Source tree that its process imports from.
        kernels: What runs in its networks; TRL's are always plain.
    """

    name: str
    module: str
    python: str = sys.executable
    tree: Path = ROOT
    kernels: Kernels = "plain"


CEILINGS = Side("ceilings", "benchmarks.speed.ceilings")


def our_sides(
    module: str, trees: Sequence[str] = (), kernels: Sequence[Kernels] = ("plain",)
) -> list[Side]:
    """The sides that run lit_rlhf: this source tree with each kind of kernels, or other trees.

    Args:
        module: What their processes run, each tree its own.
        trees: Source trees (clones or worktrees of this repository), which run plain kernels; none
            for this one.
        kernels: What runs in the networks of this tree.

    Raises:
        ValueError: If a tree does not have the module, or two trees have one name.
    """
    if not trees:
        return [
            Side(OURS if kind == "plain" else f"{OURS} {kind}", module, kernels=kind)
            for kind in kernels
        ]
    sides = []
    for tree in (Path(path).resolve() for path in trees):
        if not (tree / (module.replace(".", "/") + ".py")).is_file():
            raise ValueError(f"trees: expected source trees with {module}, got {str(tree)!r}")
        sides.append(Side(f"{OURS} {tree.name}", module, tree=tree))
    if len({side.name for side in sides}) < len(sides):
        raise ValueError(f"trees: expected folders with different names, got {list(trees)}")
    return sides


def peer_side(module: str, python: str | None) -> Side:
    """TRL, in its own environment.

    Args:
        module: What its process runs.
        python: Interpreter of an environment with TRL; `None`: the one in `runs/peer_trl`, which
            is made if it is missing, by `python -m venv runs/peer_trl` and `runs/peer_trl/bin/pip
            install torch==2.13.0 trl==1.12.0 transformers==5.23.0`.

    Raises:
        ValueError: If `python` is not a file.
    """
    if python is not None:
        if not Path(python).is_file():
            raise ValueError(f"peer_python: expected a Python interpreter, got {python!r}")
        return Side(PEER, module, python)
    python = str(PEER_FOLDER / "bin" / "python")
    if not (PEER_FOLDER / "installed").is_file():
        subprocess.run([sys.executable, "-m", "venv", str(PEER_FOLDER)], check=True)
        subprocess.run([python, "-m", "pip", "install", *PEER_PACKAGES], check=True)
        (PEER_FOLDER / "installed").touch()
    return Side(PEER, module, python)


def run_job(side: Side, job: Job) -> dict[str, Any]:
    """Run a job in a process of its side, and return what the process writes.

    Args:
        side: Who runs the job.
        job: What to run.

    Raises:
        RuntimeError: If the process fails, with the end of its output.
    """
    folder = Path(job.folder)
    job_file, result_file = folder / "job.json", folder / "result.json"
    replace(job, kernels=side.kernels).save(job_file)
    # Its own environment has everything but `benchmarks`, which is in the working directory.
    paths = []
    if side.python == sys.executable:
        packages = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = [str(side.tree), str(side.tree / "callbacks"), *filter(None, packages)]
    variables = environment(job.threads) | {"PYTHONPATH": os.pathsep.join(paths)}
    if side.name.startswith(OURS):  # as its commands do; TRL has its defaults
        variables |= choose_values(variables)
    done = subprocess.run(
        [side.python, "-m", side.module, str(job_file), str(result_file)],
        cwd=side.tree,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{side.name}: {side.module} failed:\n{done.stdout[-4000:]}")
    values: dict[str, Any] = json.loads(result_file.read_text("utf-8"))
    result_file.unlink()
    if side.name.startswith(OURS):
        values["versions"]["commit"] = commit_of(side.tree)
    return values


def commit_of(tree: Path) -> str:
    """Read the abbreviated commit of a source tree, with `-dirty` for uncommitted changes."""
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def take_turn(side: Side, job: Job, wait: float, cores: float = QUIET_CORES) -> dict[str, Any]:
    """Run a job on a quiet machine, again if something else ran during each of its updates.

    Args:
        side: Who runs it.
        job: What to run.
        wait: Seconds to wait for quiet, at most.
        cores: Foreign load that an update is used with.

    Returns:
        What the last process wrote.
    """
    measured: dict[str, Any] = {}
    for _ in range(ATTEMPTS):
        wait_until_quiet(wait)
        measured = run_job(side, job)
        if any(is_quiet(update, cores) for update in measured["updates"]):
            break
    return measured


def run_in_turns(
    cases: Mapping[Labels, Job],
    sides: Sequence[Side],
    *,
    rounds: int,
    wait: float,
    cores: float,
    progress: ProgressFile,
) -> tuple[dict[str, Any], dict[Labels, list[dict[str, Any]]]]:
    """Run every case on every side, one after the other, and all of it again in each round.

    Each turn that ends is a line on standard error unless that is a terminal.

    Args:
        cases: Jobs by case and precision.
        sides: Who runs them.
        rounds: Number of turns of every case and side.
        wait: Seconds to wait for quiet before a turn, at most.
        cores: Foreign load that an update is used with.
        progress: The finished turns, including those before an interruption.

    Returns:
        The machine's ceilings, the best of all rounds; and the turns' results by case, precision
        and side.
    """
    ceilings: dict[str, Any] = {}
    runs: dict[Labels, list[dict[str, Any]]] = {}
    with progress_bar("turns", rounds * len(cases) * len(sides)) as advance:
        for turn in range(rounds):
            if turn < len(progress.batches(CEILINGS.name)):
                measured = progress.batches(CEILINGS.name)[turn]
            else:
                wait_until_quiet(wait)
                measured = run_job(CEILINGS, next(iter(cases.values())))
                progress.add(CEILINGS.name, measured)
            ceilings = best_ceilings(ceilings, measured)
            for (labels, job), side in product(cases.items(), sides):
                name = " ".join((*labels, side.name))
                if turn < len(progress.batches(name)):
                    turn_result = progress.batches(name)[turn]
                else:
                    turn_result = take_turn(side, job, wait, cores)
                    progress.add(name, turn_result)
                runs.setdefault((*labels, side.name), []).append(turn_result)
                advance(1)
                if not sys.stderr.isatty():
                    print(f"round {turn + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
    return ceilings, runs


def keep_turns(output: str, cases: Mapping[Labels, Job], sides: Sequence[Side]) -> ProgressFile:
    """The finished turns of a benchmark that was interrupted, and those to come.

    Args:
        output: Path of the results, without `.json`.
        cases: Jobs by case and precision.
        sides: Who runs them. Turns of another commit are refused.
    """
    settings = {
        "cases": [[*labels, asdict(replace(job, folder=""))] for labels, job in cases.items()],
        "sides": [[side.name, commit_of(side.tree)] for side in sides],
    }
    return ProgressFile(f"{output}.json", settings)


def best_ceilings(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Take the higher of two measurements of each ceiling.

    Args:
        first: An earlier measurement; empty for none.
        second: A later one, whose entries that are no floats are kept.
    """
    return {
        key: max(value, first.get(key, value)) if isinstance(value, float) else value
        for key, value in second.items()
    }


def compare_sides(
    jobs: Mapping[Labels, Job],
    sides: Sequence[Side],
    *,
    rounds: int,
    wait: float,
    quiet_cores: float,
    output: str,
    size: str,
) -> None:
    """Run all jobs on all sides in turns, write the results and print their tables.

    Args:
        jobs: By case and precision. Their folders are set here.
        sides: Who runs them.
        rounds: Number of turns of every side.
        wait: Seconds to wait for quiet before a turn, at most.
        quiet_cores: Foreign load that an update is used with.
        output: Path of the results, without `.md` and `.json`.
        size: Name of the size of networks and batches, for the results.
    """
    # saving the networks would show one
    disable_progress_bar()  # type: ignore[no-untyped-call]
    with keep_turns(output, jobs, sides) as progress, TemporaryDirectory(prefix="speed_") as folder:
        placed = {
            labels: job.in_folder(Path(folder) / job.precision) for labels, job in jobs.items()
        }
        for job in {job.precision: job for job in placed.values()}.values():
            save_networks(job.work, Path(job.folder), job.precision, job.device)
        ceilings, turns = run_in_turns(
            placed, sides, rounds=rounds, wait=wait, cores=quiet_cores, progress=progress
        )
        runs = [
            [label_run(run, labels, jobs[labels[:2]]) for run in of_side]
            for labels, of_side in turns.items()
        ]
        rows = [summarize(of_side, ceilings, quiet_cores) for of_side in runs]
        threads = next(iter(jobs.values())).threads
        comparison = {
            "machine": {**ceilings, "cores": os.cpu_count(), "threads": threads},
            "summary": rows,
            "ratios": ratios(rows),
            "runs": [run for of_side in runs for run in of_side],
            "size": size,
            "date": date.today().isoformat(),
        }
        write_comparison(comparison, output)


def write_comparison(comparison: dict[str, Any], output: str) -> None:
    """Write a comparison to files, and print its tables.

    Args:
        comparison: Summaries, ratios and runs, as `compare_sides` makes them.
        output: Path of the files, without `.json` and `.md`.
    """
    write_text(f"{output}.json", json.dumps(comparison, indent=1) + "\n")
    write_text(f"{output}.md", comparison_tables(comparison))
    Console().print(Markdown(comparison_tables(comparison)))
