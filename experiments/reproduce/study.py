"""Reproduce the paper's figures on the built-in world.

    python -m experiments reproduce figures
    python -m experiments reproduce run fig4 fig7 --parallel 2
    python -m experiments reproduce page

`figures` shows the figures with their budget and what there is. `run` trains what is missing, and
can be interrupted and repeated. `judge` judges the claims by all versions of the rules, and `page`
draws the figures and writes docs/reproduction.md.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from experiments.frame import Documents
from experiments.processes import say
from experiments.reproduce.page import make_documents, write_verdicts
from experiments.reproduce.running import RESULTS, Plan, find_plan, start
from experiments.reproduce.running import train as train_plan
from experiments.reproduce.table import (
    CORES,
    EXPERIMENTS,
    Experiment,
    arms_by_name,
    planned_seeds,
    total_seconds,
)
from experiments.results_file import table
from lit_callbacks.words import format_duration


def plan_experiment(
    experiment: Experiment,
    *,
    output_dir: Path,
    results: Path,
    trial: bool,
    seeds: Sequence[int],
) -> Iterator[Plan]:
    """All runs of a figure: the foundations, which can be trained at a time, then seed by seed.

    Args:
        experiment: The figure.
        output_dir: Folder for models and logs.
        results: File of the results.
        trial: Whether all stages are cut to a few batches.
        seeds: Seeds to run, instead of the figure's; empty: the figure's.
    """
    chosen = seeds or experiment.seeds
    for seed in chosen:
        for foundation in experiment.needed_foundations():
            yield Plan(foundation, seed, output_dir, results, trial)
    for seed in chosen:
        for arm in experiment.arms:
            yield Plan(arm, seed, output_dir, results, trial)


class Runner:
    """Trains plans in processes, each run once, and ends the processes when it is interrupted."""

    def __init__(self, n_plans: int) -> None:
        self.n_plans = n_plans
        self.n_done = 0
        self.stopped = False
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._locks: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()

    def run(self, plan: Plan) -> None:
        """Train a plan, after what it starts from.

        Raises:
            RuntimeError: If a process has failed; the error names its log.
        """
        for needed in plan.chain() if not plan.is_finished() else ():
            with self._guard:
                lock = self._locks.setdefault(needed.name, threading.Lock())
            with lock:  # another figure may need the same run
                if not (self.stopped or needed.is_ready()):
                    self._train(needed)
        self.n_done += 1

    def _train(self, plan: Plan) -> None:
        name = f"{plan.part.name}, seed {plan.seed}"
        begun = time.monotonic()
        process = start(plan)
        self._processes.add(process)
        try:
            status = process.wait()
        finally:
            self._processes.discard(process)
        # Lightning ends a stage that gets SIGTERM with status 0, so the status alone says little
        if plan.is_finished():
            passed = format_duration(time.monotonic() - begun)
            say(f"{name}: finished in {passed}, after {self.n_done} of {self.n_plans} runs")
        elif not self.stopped:
            raise RuntimeError(f"{name}: the process ended with status {status}, see {plan.log}")

    def stop(self) -> None:
        """End the processes; their runs resume the next time."""
        self.stopped = True
        for process in list(self._processes):
            process.terminate()


def run(
    figures: list[str],
    *,
    output_dir: str = "runs/reproduction",
    results: str = str(RESULTS),
    seeds: tuple[int, ...] = (),
    parallel: int = 1,
    trial: bool = False,
) -> None:
    """Train the runs of figures or of single arms that are missing, in the order given.

    Args:
        figures: Names of figures, as `figures` shows them, or of arms, or `all`.
        output_dir: Folder for models and logs.
        results: File of the results.
        seeds: Seeds to run, instead of the table's.
        parallel: Number of processes at a time, with one thread each.
        trial: Cut all stages to a few batches, to try the commands. Give it its own `output_dir`
            and `results`.
    """
    chosen = list(EXPERIMENTS) if figures == ["all"] else figures
    known = EXPERIMENTS | {
        name: Experiment(name, arm.label, (arm,), planned_seeds(arm))
        for name, arm in arms_by_name().items()
    }
    if unknown := [name for name in chosen if name not in known]:
        raise ValueError(
            f"figures: expected some of {', '.join(known)} or all, got {', '.join(unknown)}"
        )
    plans = [
        plan
        for name in chosen
        for plan in plan_experiment(
            known[name],
            output_dir=Path(output_dir),
            results=Path(results),
            trial=trial,
            seeds=seeds,
        )
    ]
    plans = [plan for plan in dict.fromkeys(plans) if not plan.is_finished()]
    runner = Runner(len(plans))
    # as Ctrl-C does: without it the processes would outlive this one
    default = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    pool = ThreadPoolExecutor(parallel)
    try:
        for done in [pool.submit(runner.run, plan) for plan in plans]:
            done.result()
    finally:
        runner.stop()
        pool.shutdown(cancel_futures=True)
        signal.signal(signal.SIGTERM, default)
    say(f"{runner.n_done} of {len(plans)} runs trained.")


def figures(results: str = str(RESULTS)) -> None:
    """List the figures with their arms, budget, and how many runs are finished.

    Args:
        results: File of the results.
    """
    rows = []
    for experiment in EXPERIMENTS.values():
        plans = list(
            plan_experiment(
                experiment, output_dir=Path(), results=Path(results), trial=False, seeds=()
            )
        )
        rows.append(
            [
                experiment.name,
                len(experiment.arms),
                len(experiment.seeds),
                f"{sum(plan.is_finished() for plan in plans)}/{len(plans)}",
                f"{experiment.wall_seconds() / 60:.0f}",
                experiment.title,
            ]
        )
    head = ["figure", "arms", "seeds", "finished", f"minutes on {CORES} cores", "title"]
    print(table(head, rows))
    hours = total_seconds() / CORES / 3600
    print(f"All runs, each counted once: {hours:.1f} hours on {CORES} cores.")


def train(name: str, output_dir: str, results: str, *, seed: int, trial: bool = False) -> None:
    """Train one run in this process; `run` calls it.

    Args:
        name: Name of a foundation or an arm.
        output_dir: Folder for models and logs.
        results: File of the results.
        seed: Its seed.
        trial: Cut all stages to a few batches.
    """
    train_plan(find_plan(name, seed, output_dir, results, trial))


def judge() -> None:
    """Judge the claims by all versions of the rules, from the history of this repository."""
    print(write_verdicts(RESULTS))


def documents() -> Documents:
    """The page, its figures and the list of claims, from the committed results."""
    return make_documents(RESULTS)


COMMANDS = (figures, run, train, judge)
