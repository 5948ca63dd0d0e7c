"""The soak: a run of PPO that is interrupted many times, at random moments, and resumed each time.

Its end is compared with an undisturbed run, and each start is measured: a number that grows from
resume to resume is a leak.
"""

import json
import os
import random
import resource
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from lit_rlhf.cli.main import main
from lit_rlhf.modules import PPOModule
from tests.faults.matrix import write_root
from tests.faults.processes import fork, last_line, strike_later, wait
from tests.faults.results import contents, results_of_fit

COMMAND = ("fit", "--config", "../soak.yaml", "--ckpt_path", "last")
BATCHES_BETWEEN_CHECKPOINTS = 2
STATUSES = {"KILL": (-signal.SIGPROF,), "TERM": (143, -signal.SIGTERM), "": (0,)}
"""Exit statuses of a start, by what ends it; `interrupt_later` kills by the timer's signal."""


class Interruption(NamedTuple):
    """What ends a start of the run, and when.

    Attributes:
        signal: `KILL` or `TERM`; empty for a start that is left alone.
        iteration: The iteration from which on the time counts; 0 for the start of the process.
        share: Time until the signal, as a share of the processor time of an iteration, or of
            loading where `iteration` is 0.
    """

    signal: str = ""
    iteration: int = 0
    share: float = 0.0


class Durations(NamedTuple):
    """Processor time of an undisturbed run.

    Attributes:
        loading: Seconds until its first iteration.
        iteration: Seconds of a mean iteration.
    """

    loading: float
    iteration: float


class Usage(NamedTuple):
    """What a process holds at the end of an iteration.

    Attributes:
        iteration: Number of the iteration, from 1.
        memory: Resident memory, MiB.
        descriptors: Open files.
        threads: Threads of the system.
        python_threads: Threads of Python.
        seconds: Processor time since the process began.
    """

    iteration: int
    memory: int
    descriptors: int
    threads: int
    python_threads: int
    seconds: float


class Start(NamedTuple):
    """A start of the run, and what it left.

    Attributes:
        interruption: What ended it.
        status: Its exit status, negative for a signal.
        usage: What it held at the end of its last iteration; `None` if it ended before.
        files: Files in its folder, logs and checkpoints among them.
        log: Size of all files but the checkpoints' and the model's, KiB.
        temporary: Files and folders that all starts so far have left in the folder for temporary
            files.
        said: The last line of its output.
    """

    interruption: Interruption
    status: int
    usage: Usage | None
    files: int
    log: int
    temporary: int
    said: str


def plan_interruptions(seed: int, iterations: int, resumes: int) -> list[Interruption]:
    """Draw what ends each start but the last; one in five is ended while it loads.

    Args:
        seed: Gives the same interruptions each time.
        iterations: Iterations of the run, more than there are resumes.
        resumes: Number of interruptions.
    """
    generator = random.Random(seed)
    targets = sorted(generator.sample(range(1, iterations - 2), resumes))
    return [
        Interruption(
            signal=generator.choice(("KILL", "KILL", "TERM")),
            iteration=target if generator.random() < 0.8 else 0,
            share=generator.random(),
        )
        for target in targets
    ]


def interrupt_later(seconds: float, name: str) -> None:
    """Have a signal end this process after some seconds of processor time.

    Args:
        seconds: The time, more than 0.
        name: `KILL` or `TERM`.
    """
    if name == "TERM":
        strike_later(seconds, lambda: os.kill(os.getpid(), signal.SIGTERM))
    else:  # the system ends the process anywhere, in the middle of a product of matrices too
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, max(seconds, 1e-3))


def measure(iteration: int) -> Usage:
    """What this process holds now, at the end of an iteration."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    resources = resource.getrusage(resource.RUSAGE_SELF)
    return Usage(
        iteration=iteration,
        memory=pages * os.sysconf("SC_PAGE_SIZE") // 2**20,
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
        python_threads=threading.active_count(),
        seconds=resources.ru_utime + resources.ru_stime,
    )


def follow_iterations(usage_file: Path, before: Callable[[int], None]) -> None:
    """Have this process measure itself after each iteration.

    Args:
        usage_file: Gets a JSON line per iteration.
        before: Is called with the number of an iteration when it begins.
    """
    train = PPOModule.training_step

    def followed(module: PPOModule, *arguments: Any) -> None:
        iteration = module.trainer.fit_loop.total_batch_idx + 1
        before(iteration)
        train(module, *arguments)
        with usage_file.open("a") as file:
            file.write(json.dumps(measure(iteration)) + "\n")

    owner: Any = PPOModule
    owner.training_step = followed


class Soak:
    """The undisturbed run and the interrupted one, side by side in a folder.

    Args:
        folder: An empty folder.
        iterations: Iterations of PPO of each run.
    """

    def __init__(self, folder: Path, iterations: int) -> None:
        self.folder = folder
        self.iterations = iterations
        if wait(fork(folder, "root.log", self.write_configuration)):
            raise RuntimeError((folder / "root.log").read_text())

    def write_configuration(self) -> None:
        """Write models, data, and the configuration: PPO with a validation every three batches."""
        write_root(self.folder)
        config = json.loads((self.folder / "ppo.yaml").read_text())
        config["trainer"]["max_epochs"] = -1
        config["model"]["init_args"]["max_iterations"] = self.iterations
        checkpoints, _ = config["trainer"]["callbacks"]
        checkpoints["init_args"]["every_n_batches"] = BATCHES_BETWEEN_CHECKPOINTS
        (self.folder / "soak.yaml").write_text(json.dumps(config))

    def start(self, name: str, interruption: Interruption, durations: Durations) -> Start:
        """Start a run, or resume it; return when the process has ended.

        Args:
            name: The run's folder.
            interruption: What ends it.
            durations: Of the undisturbed run.
        """
        folder = self.folder / name
        usage_file = self.folder / f"{name}_usage.jsonl"
        usage_file.write_text("")
        temporary = self.folder / f"{name}_temporary"
        temporary.mkdir(exist_ok=True)

        def work() -> None:
            os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
            waits = interruption.signal != ""
            if waits and interruption.iteration == 0:
                interrupt_later(interruption.share * durations.loading, interruption.signal)
                waits = False

            def before(iteration: int) -> None:
                nonlocal waits
                if waits and iteration >= interruption.iteration:
                    interrupt_later(interruption.share * durations.iteration, interruption.signal)
                    waits = False

            follow_iterations(usage_file, before)
            main(COMMAND)

        status = wait(fork(folder, "log", work))
        lines = usage_file.read_text().splitlines()
        files = [path for path in folder.rglob("*") if path.is_file()]
        saved = ("checkpoints", "model")
        log = [path for path in files if path.relative_to(folder).parts[0] not in saved]
        return Start(
            interruption=interruption,
            status=status,
            usage=Usage(*json.loads(lines[-1])) if lines else None,
            files=len(files),
            log=sum(path.stat().st_size for path in log) // 1024,
            temporary=len(list(temporary.rglob("*"))),
            said=last_line(folder / "log"),
        )

    def measure_undisturbed(self) -> tuple[Start, Durations]:
        """Run without an interruption."""
        start = self.start("undisturbed", Interruption(), Durations(0, 0))
        lines = (self.folder / "undisturbed_usage.jsonl").read_text().splitlines()
        first, last = (Usage(*json.loads(line)) for line in (lines[0], lines[-1]))
        iteration = (last.seconds - first.seconds) / (last.iteration - first.iteration)
        return start, Durations(loading=first.seconds - iteration, iteration=iteration)


def find_differences(soak: Soak) -> list[str]:
    """What is wrong with the interrupted run's results, in words."""
    expected, interrupted = (
        results_of_fit(soak.folder / name, soak.iterations) for name in ("undisturbed", "run")
    )
    scalars, points = expected.pop("scalars"), interrupted.pop("scalars")
    wrong = [
        name for name in {**expected, **interrupted} if expected.get(name) != interrupted.get(name)
    ]
    others = [key for key in {**scalars, **points} if points.get(key) != scalars.get(key)]
    wrong += [f"other values of {key}" for key in others]
    wrong += [f"left behind: {path.name}" for path in soak.folder.rglob("*.partial")]
    return wrong


def format_starts(starts: Iterable[tuple[str, Start]]) -> str:
    """A table in Markdown of some starts by name."""
    lines = [
        "| start | ended by | iteration | memory, MiB | open files | threads | files | log, KiB | "
        "temporary |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, start in starts:
        usage = start.usage
        held = (
            [usage.iteration, usage.memory, usage.descriptors, usage.threads]
            if usage
            else ["-"] * 4
        )
        cells = [name, start.interruption.signal or "its end", *held]
        cells += [start.files, start.log, start.temporary]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def run_soak(folder: Path, *, seed: int, iterations: int, resumes: int) -> list[str]:
    """Run both runs, print the table, and return what is wrong.

    Args:
        folder: An empty folder.
        seed: Of the interruptions.
        iterations: Iterations of PPO.
        resumes: Interruptions, fewer than iterations.
    """
    soak = Soak(folder, iterations)
    undisturbed, durations = soak.measure_undisturbed()
    if undisturbed.status:
        return [f"the undisturbed run ended with {undisturbed.status}: {undisturbed.said}"]
    before = contents(folder / "root")
    starts: list[Start] = []
    for interruption in (*plan_interruptions(seed, iterations, resumes), Interruption()):
        starts.append(soak.start("run", interruption, durations))
        print(format_starts([(str(len(starts)), starts[-1])]).splitlines()[-1], file=sys.stderr)
    table = [("undisturbed", undisturbed), *((str(n), s) for n, s in enumerate(starts, 1))]
    (folder / "soak.md").write_text(format_starts(table) + "\n")
    (folder / "soak.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
    wrong = [
        f"start {number} ended with {start.status}: {start.said}"
        for number, start in enumerate(starts, 1)
        if start.status not in STATUSES[start.interruption.signal]
    ]
    if contents(folder / "root") != before:
        wrong.append("changed root/")
    return [*wrong, *find_differences(soak)]
