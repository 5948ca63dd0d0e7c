"""The matrix: a command, a phase and a fault, each in processes of their own.

Everything is imported once; each run is a fork of that process. Cells run in folders of their own
and share models and data, which no run may change. After its fault, the same command runs again and
has to leave the bytes of a run without a fault.
"""

import json
import os
import shutil
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import load_file, save_file

from lit_callbacks import read_run
from lit_rlhf.cli.main import main
from tests.faults.faults import FAULTS, FILES, SIGNALS
from tests.faults.moments import Moments
from tests.support.judge_server import judge_server, longer_wins
from tests.support.stages import short_run, write_data, write_models
from tests.support.tiny_tokenizers import CHATML

TIME_LIMIT = 120  # seconds of a run, after which it hangs
SAMPLING = ("--max_new_tokens", "4", "--batch_size", "2", "--seed", "3")
EVALUATE = ("evaluate", "--policies", "../root/policy", "../root/other", "--prompts")
COMMANDS: dict[str, tuple[str, ...]] = {
    "fit": ("fit", "--config", "../ppo.yaml", "--ckpt_path", "last"),
    "rollback": ("fit", "--config", "../rollback.yaml", "--ckpt_path", "last"),
    "dated": ("fit", "--config", "../dated.yaml", "--ckpt_path", "last"),
    "export": ("export", "--checkpoint", "../fit/checkpoints/batch=6.ckpt", "--output", "out"),
    "generate": (
        *("generate", "--models", "../root/policy", "--prompts", "../root/prompts.jsonl"),
        *("--output", "out.jsonl", *SAMPLING),
    ),
    "evaluate": (
        *(*EVALUATE, "../root/prompts.jsonl", "--rewards", '{"../root/reward": 1.0}'),
        *("--output", "out.json", "--responses", "out.jsonl", *SAMPLING),
    ),
    "judge": (
        *(*EVALUATE, "../root/prompts.jsonl", "--judge.model", "rule", "--output", "out.json"),
        *("--judge.base_url", "{judge}", "--responses", "out.jsonl", *SAMPLING),
    ),
}
"""What users type, and type again after a fault."""
Scalars = dict[str, list[tuple[int, str]]]
"""Points of step and value by key of a run's events."""
STRATEGIES = {"ddp": "ddp_find_unused_parameters_true", "deepspeed": "multi_deepspeed_stage_2"}
"""Names of strategies for two ranks."""


@dataclass(frozen=True)
class Cell:
    """A fault in a phase of a command.

    Attributes:
        command: A key of `COMMANDS`.
        phase: A key of `PHASES`.
        nth: Which moment of the phase.
        fault: A key of `FAULTS`.
        processes: `one`, or a key of `STRATEGIES` for two ranks, of which the second has the fault.
    """

    command: str
    phase: str
    nth: int
    fault: str
    processes: str = "one"

    @property
    def name(self) -> str:
        parts = (self.command, self.phase, str(self.nth), self.fault, self.processes)
        return "_".join(parts).replace(" ", "-")


FIT = {"load": 3, "tokenize": 20, "rollout": 20, "update": 30, "validate": 4, "finish": 1}
"""A moment in the middle of each phase of training."""
OTHERS = (
    ("rollback", "restore", 1),
    ("dated", "place", 13),
    ("export", "finish", 1),
    ("generate", "load", 1),
    ("generate", "forward", 8),
    ("evaluate", "load", 2),
    ("evaluate", "forward", 30),
    ("judge", "request", 3),
)
MORE = {"load": FILES[:-1], "finish": FILES, "forward": ("memory",), "restore": ("EIO", "memory")}
"""Faults beside signals in the phases of `OTHERS`."""


def cells() -> Iterator[Cell]:
    """The whole matrix."""
    for phase, nth in FIT.items():
        for fault in SIGNALS:
            yield Cell("fit", phase, nth, fault)
    # 4 moments of placing are those of trying where the finished model will go
    for phase, moments in (("write", (300, 2000)), ("place", (2, 5, 6, 9, 13, 18))):
        for nth in moments:
            for fault in (*SIGNALS, *FILES):
                yield Cell("fit", phase, nth, fault)
    yield Cell("fit", "place", 1, "EINVAL")
    for phase in ("load", "rollout", "update", "validate"):
        yield Cell("fit", phase, FIT[phase], "memory")
    for phase in ("rollout", "update"):
        yield Cell("fit", phase, FIT[phase], "NaN")
    for phase in ("load", "finish"):
        for fault in FILES:
            yield Cell("fit", phase, 1, fault)
    for phase in ("tokenize", "rollout", "validate"):
        yield Cell("fit", phase, FIT[phase], "full")
    for command, phase, nth in OTHERS:
        for fault in SIGNALS:
            yield Cell(command, phase, nth, fault)
        for fault in MORE.get(phase, ()):
            yield Cell(command, phase, nth, fault)
    for processes in ("ddp", "deepspeed"):
        for phase in ("rollout", "update"):
            for fault in ("TERM", "INT", "HUP", "KILL", "STOP", "memory"):
                yield Cell("fit", phase, 10, fault, processes)


def write_root(folder: Path) -> None:
    """Models, data, and a configuration of PPO: 6 iterations, a checkpoint after each."""
    root = folder / "root"
    root.mkdir()
    write_models(write_data(root))
    shutil.copytree(root / "policy", root / "other")
    weights = load_file(root / "policy/model.safetensors")
    noise = torch.Generator().manual_seed(0)
    moved = {name: w + 0.1 * torch.randn(w.shape, generator=noise) for name, w in weights.items()}
    save_file(moved, root / "other/model.safetensors", metadata={"format": "pt"})
    (root / "other/lit_rlhf.json").unlink()  # it lists the other weights
    config = short_run(root)
    config["data"]["init_args"]["val_sources"] = [{"path": str(root / "prompts.jsonl")}]
    trainer = config["trainer"]
    logger = {"save_dir": ".", "name": "logs", "version": "run"}
    trainer |= {
        "limit_val_batches": 1,
        "num_sanity_val_steps": 0,
        "logger": {"class_path": "TensorBoardLogger", "init_args": logger},
    }
    (checkpoints,) = trainer["callbacks"]
    checkpoints["init_args"]["dirpath"] = "checkpoints"
    timeline = {"prompts": ["a\u2028b", "c"], "every_n_batches": 2}
    trainer["callbacks"].append(
        {"class_path": "lit_callbacks.SampleTimeline", "init_args": timeline}
    )
    (folder / "ppo.yaml").write_text(json.dumps(config))
    write_dated(folder, config)
    monitor = {"key": "rollout/kl", "high": 0.3, "patience": 1, "horizon": 0}
    back = {"times": 1, "every_n_steps": 1, "keep": ["iteration"]}
    detector = {
        "monitors": [{"class_path": "lit_callbacks.Monitor", "init_args": monitor}],
        "actions": [{"class_path": "lit_callbacks.RollBack", "init_args": back}],
    }
    rolls_back = {"class_path": "lit_callbacks.CollapseDetector", "init_args": detector}
    trainer["callbacks"].append(rolls_back)
    (folder / "rollback.yaml").write_text(json.dumps(config))


def write_dated(folder: Path, config: dict[str, Any]) -> None:
    """A configuration of SFT with a chat template that asks for date and time.

    Args:
        folder: Where the configuration goes, beside the data.
        config: The configuration of PPO, for what is alike.
    """
    root = folder / "root"
    template = "{{ strftime_now('%c %f') }}" + CHATML
    (root / "dated.jinja").write_text(template)
    (checkpoints, _) = config["trainer"]["callbacks"]
    trainer = {**config["trainer"], "callbacks": [checkpoints], "limit_val_batches": 0}
    data = {
        "train_sources": [{"path": str(root / "demonstrations.jsonl")}],
        "chat_template": str(root / "dated.jinja"),
        "batch_size": 4,
    }
    dated = {
        "seed_everything": 1,
        "trainer": {**trainer, "max_epochs": 3},
        "model": {
            "class_path": "SFTModule",
            "init_args": {"model_path": str(root / "policy"), "output_dir": "model"},
        },
        "data": {"class_path": "DemonstrationDataModule", "init_args": data},
    }
    (folder / "dated.yaml").write_text(json.dumps(dated))


def fork(folder: Path, log: str, work: Callable[[], None], lead: bool = True) -> int:
    """Do `work` in a process of its own, in `folder`, leading a session; return its id."""
    folder.mkdir(exist_ok=True)
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        if lead:
            os.setsid()
        # whatever started this process: `nohup` ignores the one, and a shell's `&` the other
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        output = os.open(folder / log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        work()
        status = 0
    except SystemExit as ended:  # as the interpreter does it
        if ended.code is not None and not isinstance(ended.code, int):
            os.write(2, f"{ended.code}\n".encode())
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        status = 130
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        with suppress(OSError):  # nobody may read it
            sys.stdout.flush()
        os._exit(status)


def on_two_ranks(work: Callable[[int], None], log: str) -> NoReturn:
    """Do `work(rank)` in two processes, and end with the status of the first, or of the second."""
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(asked.getsockname()[1])}
    os.environ |= {**meeting, "NODE_RANK": "0", "DS_ACCELERATOR": "cpu"}

    def rank(number: int) -> Callable[[], None]:
        def run() -> None:
            os.environ["LOCAL_RANK"] = str(number)
            work(number)

        return run

    ranks = [fork(Path(), name, rank(n), False) for n, name in enumerate((log, f"second_{log}"))]
    second, first = wait(ranks[1]), wait(ranks[0])
    status = first or second
    raise SystemExit(status if status >= 0 else 128 - status)


def wait(child: int) -> int:
    """Wait for the end of a process, waking it if it stops; its status, negative for a signal.

    Raises:
        TimeoutError: If it hangs; it is killed.
    """
    for _ in range(TIME_LIMIT * 50):
        ended, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
        if ended and os.WIFSTOPPED(status):
            os.kill(child, signal.SIGCONT)
        elif ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise TimeoutError


def session(leader: int) -> list[str]:
    """Names of the processes that a session still has."""
    left = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, fields = stat.read_text().partition("(")[2].rpartition(")")
        except OSError:  # ended meanwhile
            continue
        if fields.split()[3] == str(leader) and fields.split()[0] != "Z":
            left.append(name)
    return left


def contents(folder: Path) -> dict[str, int]:
    """Sizes and times of all files, which tell whether anything was changed."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in files}


def results(command: str, folder: Path) -> dict[str, Any]:
    """What a command has made, apart from times of writing."""
    if command in ("fit", "rollback", "dated"):
        newest = folder / "checkpoints/batch=6.ckpt"
        files: dict[str, Any] = files_of(folder / "model")
        files["checkpoints"] = sorted(path.name for path in newest.parent.iterdir())
        files |= logged(folder / "logs/run")
        if newest.is_file():  # DeepSpeed's are folders
            saved = torch.load(newest, weights_only=True)
            parts = ("state_dict", "optimizer_states", "lr_schedulers", "random_state")
            files |= {name: plain(saved[name]) for name in parts}
        return files
    files = files_of(folder / "out")
    for path in folder.glob("*out.jsonl*"):
        files[path.name] = path.read_bytes()
    if (folder / "out.json").exists():
        files["report"] = json.loads((folder / "out.json").read_text(), object_hook=without_cost)
    return files


def files_of(folder: Path) -> dict[str, Any]:
    """All files of a model: weights, tokenizer, contract, card and manifest."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def logged(folder: Path) -> dict[str, Any]:
    """Scalars of a run's events that do not measure time or memory, and its samples."""
    curves = read_run("run", folder).curves
    measured = ("time/", "memory/", "throughput/")
    scalars: Scalars = {
        key: [(point.step, repr(point.value)) for point in curve.points]
        for key, curve in curves.items()
        if not key.startswith(measured)
    }
    samples = folder / "samples.jsonl"
    return {"scalars": scalars, "samples": samples.read_bytes() if samples.exists() else b""}


def without_lost_step(expected: Scalars, made: Scalars) -> Scalars:
    """What was expected, less what is missing, if all that is missing is of one step.

    Lightning logs the values of a step after its callbacks have saved a checkpoint of it, and
    validates later still. A run that was interrupted in between resumes behind that step.

    Args:
        expected: Scalars of a run without a fault.
        made: Scalars of the run that was interrupted, and resumed.
    """
    missing = {
        (key, point)
        for key, points in expected.items()
        for point in points
        if point not in made.get(key, [])
    }
    if len({step for _, (step, _) in missing}) > 1:
        return expected
    left = {
        key: [point for point in points if (key, point) not in missing]
        for key, points in expected.items()
    }
    return {key: points for key, points in left.items() if points}


def without_cost(report: dict[str, Any]) -> dict[str, Any]:
    """A part of a report without requests and tokens, of which a second run needs fewer."""
    cost = ("from_cache", "requests", "prompt_tokens", "completion_tokens")
    return {key: value for key, value in report.items() if key not in cost}


def plain(value: object) -> object:
    """Nested values with lists in place of tensors, which `==` compares."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


class Matrix:
    """Runs cells below a folder, after one run of each command without a fault."""

    def __init__(self, folder: Path, runs: Sequence[tuple[str, str]], judge: str) -> None:
        self.folder, self.judge = folder, judge
        if wait(fork(folder, "root.log", lambda: write_root(folder))):
            raise RuntimeError((folder / "root.log").read_text())
        self.expected: dict[tuple[str, str], dict[str, Any]] = {}
        for command, processes in dict.fromkeys((("fit", "one"), *runs)):  # export needs that fit
            name = command if processes == "one" else processes
            self.run(Cell(command, "finish", 0, "TERM", processes), folder / name, "log")
            self.expected[command, processes] = results(command, folder / name)
        self.shared = {name: contents(folder / name) for name in ("root", "fit")}

    def run(self, cell: Cell, folder: Path, log: str, fault: bool = False) -> int:
        """Run the command of a cell; return its status.

        Raises:
            AssertionError: If a run without the fault fails, or if it leaves processes behind.
            TimeoutError: If the run hangs.
        """
        words = [word.replace("{judge}", self.judge) for word in COMMANDS[cell.command]]
        if cell.processes != "one":
            words += ["--trainer.strategy", STRATEGIES[cell.processes], "--trainer.devices", "2"]
            words += ["--data.batch_size", "1"]

        def strike() -> None:
            Path("struck").touch()
            FAULTS[cell.fault].strike()

        def on_rank(rank: int) -> None:
            struck = fault and rank == (cell.processes != "one")
            Moments(cell.phase, cell.nth if struck else 0, strike)
            main(words)

        def work() -> None:
            if cell.processes == "one":
                on_rank(0)
            else:
                on_two_ranks(on_rank, log)

        child = fork(folder, log, work)
        try:
            status = wait(child)
            for _ in range(50):  # processes that end with their parent need a moment
                if not (left := session(child)):
                    break
                time.sleep(0.1)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        assert not left, f"orphans: {', '.join(left)}"
        assert fault or status == 0, f"ended with {status}: {last_line(folder / log)}"
        return status

    def check(self, cell: Cell) -> str:
        """What is wrong in a cell; empty if it is green."""
        folder, fault = self.folder / cell.name, FAULTS[cell.fault]
        log = folder / "log"
        try:
            status = self.run(cell, folder, log.name, fault=True)
            said = last_line(log)
            if not (folder / "struck").exists():
                return f"never came to the {cell.phase}"
            lost = cell.processes != "one" and cell.fault in ("KILL", "memory")
            statuses = (1,) if lost else fault.statuses  # what the other rank ends with
            if status not in statuses:
                return f"status {status}, expected {statuses}: {said}"
            if lost:
                said = fault.message
            elif "Traceback" in log.read_text(errors="replace"):
                return f"a traceback: {said}"
            if fault.message not in said:
                return f"expected {fault.message!r} in: {said}"
            if cell.fault == "NaN":  # what was skipped stays skipped
                return "a model was saved" if (folder / "model").exists() else ""
            if status != 0:
                log = folder / "again"
                self.run(cell, folder, log.name)
            expected = self.expected[cell.command, cell.processes]
            made = results(cell.command, folder)
            if cell.phase == "finish":
                # the checkpoint that this resumes from is older than the last validation
                with_metrics = ("README.md", "lit_rlhf.json")
                made = {n: value for n, value in made.items() if not n.endswith(with_metrics)}
                expected = {n: v for n, v in expected.items() if not n.endswith(with_metrics)}
            if "scalars" in expected:
                expected = expected | {
                    "scalars": without_lost_step(expected["scalars"], made["scalars"])
                }
            if names := [n for n in {**expected, **made} if expected.get(n) != made.get(n)]:
                return f"other results than without the fault: {', '.join(names)}"
            if left := [path.name for path in folder.rglob("*.partial")]:
                return f"left behind: {left}"
            for name, before in self.shared.items():
                if contents(self.folder / name) != before:
                    return f"changed {name}/"
        except TimeoutError:
            return f"hangs: {last_line(log)}"
        except (AssertionError, OSError, KeyError) as error:
            return str(error) or type(error).__name__
        return ""


def last_line(log: Path) -> str:
    """The last thing that a run said."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].rpartition("\r")[2] if lines else "(nothing)"


def run_matrix(folder: Path, wanted: Sequence[Cell], lanes: int) -> dict[Cell, str]:
    """Run cells in parallel lanes, and return what is wrong in each."""
    with judge_server(longer_wins) as server:
        runs = [(cell.command, cell.processes) for cell in wanted]
        matrix = Matrix(folder, runs, server.base_url)

        def lane(number: int) -> Callable[[], None]:
            def work() -> None:
                with Path(f"../lane_{number}.jsonl").open("w") as file:
                    for index in range(number, len(wanted), lanes):
                        line = json.dumps([index, matrix.check(wanted[index])])
                        print(line, file=file, flush=True)

            return work

        children = [fork(folder / f"lane_{n}", "log", lane(n)) for n in range(lanes)]
        if any([os.waitpid(child, 0)[1] for child in children]):
            raise RuntimeError((folder / "lane_0/log").read_text())
    lines = [line for n in range(lanes) for line in (folder / f"lane_{n}.jsonl").open()]
    return {wanted[index]: wrong for index, wrong in sorted(map(json.loads, lines))}
