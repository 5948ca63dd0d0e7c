"""The matrix: a command, a phase and a fault, each in processes of their own.

Everything is imported once; each run is a fork of that process. Cells run in folders of their own
and share models and data, which no run may change. After its fault, the same command runs again and
has to leave the bytes of a run without a fault.
"""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from lit_rlhf.cli.main import main
from tests.faults.faults import FAULTS, FILES, SIGNALS
from tests.faults.moments import Moments
from tests.faults.processes import fork, last_line, on_two_ranks, session, strike_later, wait
from tests.faults.results import contents, results
from tests.support.judge_server import judge_server, longer_wins
from tests.support.stages import short_run, write_data, write_models
from tests.support.tiny_tokenizers import CHATML

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
STRATEGIES = {
    "ddp": "ddp_find_unused_parameters_true",
    "deepspeed": "multi_deepspeed_stage_2",
    "fsdp2": "fsdp2",
}
"""Names of strategies for two ranks."""


@dataclass(frozen=True)
class Cell:
    """A fault in a phase of a command.

    Attributes:
        command: A key of `COMMANDS`.
        phase: A key of `PHASES`, or `random` for any moment.
        nth: Which moment of the phase, or the seed of a random one.
        fault: A key of `FAULTS`.
        processes: `one`, or a key of `STRATEGIES` for two ranks, of which the second has the fault.
        surroundings: A key of `SURROUNDINGS`; empty for an empty folder.
    """

    command: str
    phase: str
    nth: int
    fault: str
    processes: str = "one"
    surroundings: str = ""

    @property
    def name(self) -> str:
        parts = [self.command, self.phase, str(self.nth), self.fault, self.processes]
        if self.surroundings:
            parts.append(self.surroundings)
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


def cells(seed: int) -> Iterator[Cell]:
    """The whole matrix.

    Args:
        seed: Of the random moments.
    """
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
    for surroundings in SURROUNDINGS:
        for phase in ("load", "update"):
            yield Cell("fit", phase, FIT[phase], "KILL", surroundings=surroundings)
    generator = random.Random(seed)
    for command in COMMANDS:
        for fault in ("KILL", "KILL", "TERM"):
            yield Cell(command, "random", generator.randrange(10**6), fault)
    for processes in STRATEGIES:
        for phase in ("rollout", "update"):
            for fault in ("TERM", "INT", "HUP", "KILL", "STOP", "memory"):
                yield Cell("fit", phase, 10, fault, processes)


def plant_files() -> None:
    """Put into the current folder what somebody else's folder may hold, to be read or run."""
    for name in ("gmpy2", "h2", "kernels", "wandb", "yaml", "sitecustomize"):
        planted = f"from pathlib import Path; Path({name!r} + '.ran').touch()"
        Path(f"{name}.py").write_text(planted)
    Path("latin.yaml").write_bytes(b"seed_everything: \xe9")
    for name, make in (("dangling", lambda p: p.symlink_to("nowhere")), ("fifo", os.mkfifo)):
        if not os.path.lexists(f"{name}.yaml"):
            make(Path(f"{name}.yaml"))


def link_folders() -> None:
    """Have logs and checkpoints in other folders, to which there are links."""
    for name in ("logs", "checkpoints"):
        Path(f"other_{name}").mkdir(exist_ok=True)
        if not os.path.lexists(name):
            Path(name).symlink_to(f"other_{name}")


SURROUNDINGS: dict[str, Callable[[], None]] = {"hostile": plant_files, "linked": link_folders}
"""What prepares the current folder before a run, by name."""


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


class Matrix:
    """Runs cells below a folder, after one run of each command without a fault."""

    def __init__(self, folder: Path, runs: Sequence[tuple[str, str]], judge: str) -> None:
        self.folder, self.judge = folder, judge
        if wait(fork(folder, "root.log", lambda: write_root(folder))):
            raise RuntimeError((folder / "root.log").read_text())
        self.expected: dict[tuple[str, str], dict[str, Any]] = {}
        self.seconds: dict[str, float] = {}  # processor time of the undisturbed run of a command
        for command, processes in dict.fromkeys((("fit", "one"), *runs)):  # export needs that fit
            name = command if processes == "one" else processes
            before = os.times()
            self.run(Cell(command, "finish", 0, "TERM", processes), folder / name, "log")
            if processes == "one":
                after = os.times()
                self.seconds[command] = (
                    after.children_user
                    + after.children_system
                    - before.children_user
                    - before.children_system
                )
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

        struck = (folder / "struck").resolve()  # a configuration is parsed in its own folder

        def strike() -> None:
            struck.touch()
            FAULTS[cell.fault].strike()

        def on_rank(rank: int) -> None:
            has_fault = fault and rank == (cell.processes != "one")
            if cell.phase != "random":
                Moments(cell.phase, cell.nth if has_fault else 0, strike)
            elif has_fault:  # in the last fifth, a run that is faster than the first may be over
                share = random.Random(cell.nth).uniform(0, 0.8)
                strike_later(share * self.seconds[cell.command], strike)
            if cell.surroundings:
                SURROUNDINGS[cell.surroundings]()
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
            message = last_line(log)
            struck = (folder / "struck").exists()
            if not struck and cell.phase != "random":
                return f"never came to the {cell.phase}"
            lost = cell.processes != "one" and cell.fault in ("KILL", "memory")
            statuses = (1,) if lost else fault.statuses  # what the other rank ends with
            if not struck:  # the run was over before the random moment
                statuses = (0,)
            if status not in statuses:
                return f"status {status}, expected {statuses}: {message}"
            if lost:
                message = fault.message
            elif "Traceback" in log.read_text(errors="replace"):
                return f"a traceback: {message}"
            if fault.message not in message:
                return f"expected {fault.message!r} in: {message}"
            if cell.fault == "NaN":  # what was skipped stays skipped
                return "a model was saved" if (folder / "model").exists() else ""
            if status != 0:
                log = folder / "again"
                self.run(cell, folder, log.name)
            expected = self.expected[cell.command, cell.processes]
            made = results(cell.command, folder)
            if names := [n for n in {**expected, **made} if expected.get(n) != made.get(n)]:
                return f"other results than without the fault: {', '.join(names)}"
            if left := [path.name for path in folder.rglob("*.partial")]:
                return f"left behind: {left}"
            if ran := [path.stem for path in folder.glob("*.ran")]:
                return f"ran planted files: {ran}"
            for name, before in self.shared.items():
                if contents(self.folder / name) != before:
                    return f"changed {name}/"
        except TimeoutError:
            return f"hangs: {last_line(log)}"
        except (AssertionError, OSError, KeyError) as error:
            return str(error) or type(error).__name__
        return ""


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
