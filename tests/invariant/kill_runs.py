"""Runs of PPO that are killed at chosen moments and resumed, each in a process of its own.

The tests call `python -m tests.invariant.kill_runs FOLDER SCENARIO`. Processes are forked from that
one, which has everything imported, so that each takes about a second. A run passes many moments:
every forward pass of the policy, every optimizer's step, every write to a checkpoint. Nothing
depends on time: a process that is to die at its n-th moment says so and waits there for SIGKILL.
"""

import importlib
import json
import os
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import PreTrainedModel

import lit_rlhf.modules.stage
from lit_rlhf.cli.main import main
from lit_rlhf.modules import PPOModule
from tests.modules.stages import short_run, write_data, write_models

COMMAND = ("fit", "--config", "../ppo.yaml", "--ckpt_path", "last")
MOMENTS = {"rollout": 3, "update": 3, "write": 2, "place": 2, "finish": 1}
"""How many moments of each kind to choose. A checkpoint is written, then put into its place."""
LANES = 2  # runs at the same time


def noisy_reward(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Draws from every global generator that a checkpoint keeps."""
    return [random.random() + np.random.random() + float(torch.rand(())) for _ in responses]  # noqa: NPY002


def write_root(folder: Path) -> None:
    """Models, data and a configuration: 2 epochs of 3 iterations, a checkpoint after each."""
    root = folder / "root"
    root.mkdir()
    write_models(write_data(root))
    cosine = {"lr_scheduler": "cosine_with_min_lr"}
    config = short_run(
        root,
        rewards={str(root / "reward"): 1.0, "tests.invariant.kill_runs:noisy_reward": 0.5},
        policy_optimizer=cosine,
        critic_optimizer=cosine,
    )
    config["trainer"] |= {"limit_val_batches": 0, "enable_progress_bar": False}
    (folder / "ppo.yaml").write_text(json.dumps(config))


class Moments:
    """Counts the moments of this process' run and calls `at` in the one with number `chosen`."""

    def __init__(self, chosen: int | None = None, at: Callable[[], None] = lambda: None) -> None:
        self.chosen, self.at = chosen, at
        self.kinds: list[str] = []
        self.training = False

    def passed(self, kind: str) -> None:
        self.kinds.append(kind)
        if len(self.kinds) - 1 == self.chosen:
            self.at()

    def before(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with a moment before each call."""

        def called(*args: Any, **kwargs: Any) -> Any:
            self.passed(kind)
            return function(*args, **kwargs)

        return called

    def watch(self) -> None:
        """Patch this process, which is forked for one run, so that moments are passed."""

        def trunk_called(module: torch.nn.Module, *_: Any) -> None:
            trunk = isinstance(module, PreTrainedModel) and module.base_model is module
            if trunk and self.training:  # networks are tried out when they are loaded, too
                self.passed("update" if torch.is_grad_enabled() else "rollout")

        start = PPOModule.on_train_start

        def started(module: PPOModule) -> None:
            self.training = True
            start(module)

        stage: Any = PPOModule
        stage.on_train_start = started
        torch.nn.modules.module.register_module_forward_pre_hook(trunk_called)
        register_optimizer_step_pre_hook(lambda *_: self.passed("update"))
        save: Callable[..., None] = torch.save

        class Announced:
            def __init__(self, file: Any, moments: Moments) -> None:
                self.write = moments.before("write", file.write)
                self.flush = file.flush

        serialization: Any = torch
        serialization.save = lambda content, file: save(content, Announced(file, self))
        io: Any = TorchCheckpointIO
        io.remove_checkpoint = self.before("place", io.remove_checkpoint)
        for owner, name in ((os, "fsync"), (Path, "replace")):
            setattr(owner, name, self.before("place", getattr(owner, name)))
        base: Any = lit_rlhf.modules.stage
        base.save_model_folder = self.before("finish", base.save_model_folder)


def forked(folder: Path, name: str, work: Callable[[], None]) -> int:
    """Do `work` in a process of its own, in `folder`; its id. Its output goes to `name.log`."""
    folder.mkdir(exist_ok=True)
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(folder)
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        work()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 71
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def status_of(child: int) -> int:
    """Exit status of a process, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fit(moments: Moments) -> None:
    """The command that users repeat until it ends well."""
    moments.watch()
    main(COMMAND)


def whole(folder: Path) -> list[str]:
    """Run without interruption; the kinds of its moments."""

    def work() -> None:
        moments = Moments()
        fit(moments)
        Path("moments.json").write_text(json.dumps(moments.kinds))

    assert status_of(forked(folder, "whole", work)) == 0, (folder / "whole.log").read_text()
    kinds: list[str] = json.loads((folder / "moments.json").read_text())
    return kinds


def killed(folder: Path, name: str, moment: int) -> int:
    """Run until a moment and die there of SIGKILL."""
    reading, writing = os.pipe()

    def wait_for_death() -> None:
        os.write(writing, b"!")
        while True:
            signal.pause()

    child = forked(folder, name, lambda: fit(Moments(moment, wait_for_death)))
    os.close(writing)
    if os.read(reading, 1):  # nothing where the run ended before
        os.kill(child, signal.SIGKILL)
    os.close(reading)
    return status_of(child)


def terminated(folder: Path, name: str, moment: int) -> int:
    """Run and get SIGTERM at a moment."""
    tell = lambda: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    return status_of(forked(folder, name, lambda: fit(Moments(moment, tell))))


def resumed(folder: Path) -> int:
    """Run to the end."""
    return status_of(forked(folder, "resumed", lambda: fit(Moments())))


def left(folder: Path) -> list[str]:
    """What is in the folder of checkpoints."""
    return sorted(path.name for path in (folder / "checkpoints").glob("*"))


def chosen(kinds: list[str], seed: int) -> list[int]:
    """Random moments of every kind."""
    rng, moments = random.Random(seed), []
    for kind, count in MOMENTS.items():
        of_kind = [moment for moment, other in enumerate(kinds) if other == kind]
        moments += sorted(rng.sample(of_kind, count))
    return moments


class Scenarios:
    """What is done to runs; results by run, whose folder keeps what it left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        assert status_of(forked(folder, "root", lambda: write_root(folder))) == 0
        self.kinds = whole(folder / "whole")

    def once(self, name: str, seed: int) -> dict[str, Any]:
        """Each run is interrupted once: by SIGKILL, and two of them by SIGTERM too."""
        moments = chosen(self.kinds, seed)
        interruptions = [
            *((killed, f"{name}_kill_{moment}", moment) for moment in moments),
            *((terminated, f"{name}_term_{moment}", moment) for moment in moments[:6:3]),
        ]

        def half(lane: int) -> Callable[[], None]:
            def work() -> None:
                results = {}
                for interrupt, run, moment in interruptions[lane::LANES]:
                    statuses = [interrupt(self.folder / run, "interrupted", moment)]
                    results[run] = {"kind": self.kinds[moment], **self.outcome(run, statuses)}
                Path(f"{lane}.json").write_text(json.dumps(results))

            return work

        folder = self.folder / f"{name}_lanes"
        lanes = [forked(folder, f"lane_{lane}", half(lane)) for lane in range(LANES)]
        assert [status_of(lane) for lane in lanes] == LANES * [0], folder
        found = [json.loads((folder / f"{lane}.json").read_text()) for lane in range(LANES)]
        return {run: result for results in found for run, result in results.items()}

    def outcome(self, run: str, statuses: list[int]) -> dict[str, Any]:
        """What an interrupted run left, and how it ended after it was resumed."""
        folder = self.folder / run
        return {"statuses": statuses, "left": left(folder), "resumed": resumed(folder)}

    def ten(self) -> dict[str, Any]:
        """The runs of the default tests."""
        return self.once("ten", seed=0)

    def many(self) -> dict[str, Any]:
        """More moments, and runs that are killed again and again before they may end."""
        results: dict[str, Any] = {}
        for seed in (1, 2, 3):
            results |= self.once(f"seed_{seed}", seed)
        rng = random.Random(4)
        for number in range(3):
            run = f"again_{number}"
            # an iteration has about 900 moments, so that each of the five finishes one
            moments = [rng.randrange(920, 1060) for _ in range(5)]
            statuses = [killed(self.folder / run, "interrupted", moment) for moment in moments]
            results[run] = {"kind": "any", **self.outcome(run, statuses)}
        return results


if __name__ == "__main__":
    # what the reward's name imports is this module, not a second copy of it
    sys.modules.setdefault("tests.invariant.kill_runs", sys.modules["__main__"])
    if find_spec("deepspeed"):
        importlib.import_module("deepspeed")  # else every process does so when it saves its model
    scenarios, scenario = Scenarios(Path(sys.argv[1])), sys.argv[2]
    results = getattr(scenarios, scenario)()
    (Path(sys.argv[1]) / "results.json").write_text(json.dumps(results))
