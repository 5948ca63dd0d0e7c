"""The processes of experiments: runs that keep their own result, and measured steps.

A `Job` is a command of an experiment that writes its result itself. A `Step` is any command whose
output is read once it has ended, together with its time and memory.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from experiments.device import device_name
from experiments.frame import ROOT, read_commands
from experiments.results_file import read_runs
from lit_callbacks import Level, default_monitors, read_logged_steps, replay_steps
from lit_rlhf.files import write_text

CONFIGS = ROOT / "configs"


def say(text: str) -> None:
    """Print a line on standard error at once, even to a file."""
    print(text, file=sys.stderr, flush=True)


def cpu_seconds_used() -> float:
    """CPU seconds of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return round(sum(usage.ru_utime + usage.ru_stime for usage in usages), 1)


# --- jobs


class Job(NamedTuple):
    """A run in its own process, which keeps its result itself.

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
        say(f"{' '.join(self.command[1:])} has finished")


def command_job(
    experiment: str, command: str, options: Mapping[str, object], *, log: Path, threads: int = 1
) -> Job:
    """A job that runs a command of an experiment.

    Args:
        experiment: Name of the experiment.
        command: Name of its command.
        options: Arguments of the command by name.
        log: File that its output is appended to.
        threads: Number of threads.
    """
    without_flag = read_commands(experiment)[command].words
    words = [str(options[name]) for name in without_flag]
    for name, value in options.items():
        if name not in without_flag:
            words += [f"--{name}", str(value)]
    return Job(["experiments", experiment, command, *words], log, threads)


def run_jobs(jobs: Iterable[Job], parallel: int) -> None:
    """Run jobs.

    Args:
        jobs: The jobs, in the order in which they start.
        parallel: Number of jobs at a time.

    Raises:
        subprocess.CalledProcessError: If a process fails; the first failure is raised.
    """
    with ThreadPoolExecutor(parallel) as pool:
        list(pool.map(Job.run, jobs))


def run_missing_jobs(jobs: Mapping[str, Job], results: Path, parallel: int) -> None:
    """Run the jobs whose result is missing.

    Args:
        jobs: Each job by the name of its run in the file of results.
        results: File of the results.
        parallel: Number of jobs at a time.
    """
    finished = read_runs(results)
    run_jobs([job for name, job in jobs.items() if name not in finished], parallel)


# --- steps


class Step(NamedTuple):
    """A process whose output is read once it has ended.

    Attributes:
        name: Its name, also in the file of the results.
        part: Number of the experiment's part that it belongs to.
        command: Words after the interpreter.
        collect: Reads the figures once the process has ended.
    """

    name: str
    part: int
    command: list[str]
    collect: Callable[[], dict[str, Any]]


class Finished(NamedTuple):
    """A step that has ended, and its line in the file of the results.

    Attributes:
        step: The step.
        row: What it took, and its figures as `result`.
    """

    step: Step
    row: dict[str, Any]


def run_missing_steps(
    steps: Iterable[Step], done: Container[str], *, folder: Path, threads: int
) -> Iterator[Finished]:
    """Run the steps that are not done, one after the other.

    The caller keeps each result before it asks for the next one, so that an interruption loses no
    more than one step.

    Args:
        steps: Steps in an order in which each has what it needs.
        done: Names of the steps that are not to be repeated.
        folder: Folder of all files of the steps.
        threads: Threads of a step.

    Yields:
        Each step that was run, with its result.
    """
    for step in steps:
        if step.name not in done:
            say(f"{folder.name}: {step.name}; output: {folder / 'output' / step.name}.txt")
            finished = Finished(step, run_step(step, folder, threads))
            say(f"{folder.name}: {step.name} took {finished.row['minutes']:.1f} minutes")
            yield finished


def run_step(step: Step, folder: Path, threads: int) -> dict[str, Any]:
    """Run a step's process.

    Args:
        step: The step.
        folder: Folder of its output.
        threads: Threads of the process.

    Returns:
        What it took, and its figures as `result`.

    Raises:
        RuntimeError: If the process fails, with the end of its output.
    """
    log = folder / "output" / f"{step.name}.txt"
    marker = log.with_suffix(".begun")
    log.parent.mkdir(parents=True, exist_ok=True)
    resumed = marker.exists()
    marker.touch()
    began = time.monotonic()
    with log.open("a") as file:
        process = subprocess.Popen(
            [sys.executable, *step.command],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": python_path()},
        )
        # the only public way to the peak memory and CPU time of a single child
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"{step.name} failed; {log} ends with\n{log.read_text()[-3000:]}")
    figures = step.collect()
    # each phase of training resets the peak that the kernel keeps for the process
    peak = max(usage.ru_maxrss / 2**20, figures.pop("peak_gib", 0.0))
    return {
        "part": step.part,
        "minutes": round((time.monotonic() - began) / 60, 2),
        "cpu_minutes": round((usage.ru_utime + usage.ru_stime) / 60, 2),
        "peak_gib": round(peak, 2),
        "threads": threads,
        "resumed": resumed,
        "load": round(os.getloadavg()[0], 1),
        "device": device_name("cuda" if torch.cuda.is_available() else "cpu"),
        "torch": torch.__version__,
        "result": figures,
    }


def python_path() -> str:
    """The import path of the steps: this source tree."""
    return os.pathsep.join((str(ROOT), str(ROOT / "callbacks")))


def fit_step(
    *,
    name: str,
    part: int = 1,
    folder: Path,
    config: Path,
    model: Mapping[str, Any],
    data: Mapping[str, Any],
    trainer: Mapping[str, Any],
    collect: Callable[[], dict[str, Any]],
) -> Step:
    """A step of `lit_rlhf fit`, which resumes from its newest checkpoint.

    In the folder, it writes the finished model to `NAME` and its log to `logs/NAME`.

    Args:
        name: Name of the step.
        part: Number of the experiment's part that it belongs to.
        folder: Folder of the experiment's files.
        config: The configuration.
        model: Options of the module on top of it.
        data: Options of the datamodule on top of it.
        trainer: Options of the trainer on top of it.
        collect: Reads the figures once the process has ended.
    """
    logger = {"init_args": {"save_dir": str(folder / "logs"), "name": name}}
    changes = {
        "trainer": {"logger": logger, **trainer},
        "model": {"init_args": {**model, "output_dir": str(folder / name)}},
        "data": {"init_args": dict(data)},
    }
    overlay = folder / "configs" / f"{name}.yaml"
    # in this order: the critic starts from the first reward model
    write_text(overlay, yaml.safe_dump(changes, sort_keys=False))
    on_gpu = [CONFIGS / "overlays" / "gpu.yaml"] if torch.cuda.is_available() else []
    files = [config, overlay, CONFIGS / "overlays" / "resumable.yaml", *on_gpu]
    command = ["-m", "lit_rlhf.cli.main", "fit"]
    command += [word for file in files for word in ("--config", str(file))]
    return Step(name, part, [*command, "--ckpt_path", "last"], collect)


def read_watched_run(log: Path, curves: Iterable[str]) -> dict[str, Any]:
    """Read the log of a PPO run, and ask the collapse detector about it.

    Args:
        log: Folder of the log.
        curves: Keys of metrics; iterations without one of them are left out.

    Returns:
        The `curves` by key, the iteration at which the detector flags a collapse as `flagged_at`
        (None: never), and its `reasons`.
    """
    keys = tuple(curves)
    steps = read_logged_steps(str(log))
    rows = [step for step in steps.values() if all(key in step for key in keys)]
    verdicts = replay_steps(steps, default_monitors())
    collapsed = [
        (number, verdict)
        for number, (_, verdict) in enumerate(verdicts, 1)
        if verdict.level is Level.COLLAPSED
    ]
    return {
        "curves": {key: [round(row[key], 4) for row in rows] for key in keys},
        "flagged_at": collapsed[0][0] if collapsed else None,
        "reasons": collapsed[0][1].sentence if collapsed else "",
    }
