"""A module that logs a script, and helpers to watch it under a real Trainer."""

from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, cast

import lightning
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from packaging.version import Version
from torch import Tensor
from torch.utils.data import DataLoader

from lit_callbacks import Action, CollapseDetector, Level, Monitor, Verdict

Script = Mapping[str, Sequence[float | None]]

# Arguments of a fit that resumes. States are plain values; Lightning before 2.6 lacks the argument.
PLAIN = {"weights_only": True} if "weights_only" in signature(Trainer.fit).parameters else {}
REPEATS = Version(lightning.__version__) < Version("2.5")
WHY_REPEATS = "Lightning 2.4 repeats the batch at whose end a checkpoint within an epoch was saved"
resumes_at_the_next_batch = pytest.mark.skipif(REPEATS, reason=WHY_REPEATS)


class Scripted(LightningModule):
    """Logs the i-th number of each series at the i-th batch, and trains two weights with Adam.

    Args:
        script: series by key; nothing is logged for None.
        outputs: tensors that the training step returns, one list of numbers a batch by name.
        logs_step: also log the number of batches so far as `step`, the loggers' x axis.
        manual: optimize manually.
        on_epoch: log means over epochs instead of single values.
    """

    def __init__(
        self,
        script: Script,
        outputs: Mapping[str, Sequence[Sequence[float]]] | None = None,
        logs_step: bool = True,
        manual: bool = False,
        on_epoch: bool = False,
    ) -> None:
        super().__init__()
        self.script, self.outputs = script, outputs or {}
        self.logs_step, self.on_epoch = logs_step, on_epoch
        self.automatic_optimization = not manual
        self.weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
        self.batches = 0
        """Batches that this object trained on."""

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        self.batches += 1
        i = self.trainer.fit_loop.total_batch_idx
        for key, series in self.script.items():
            value = series[i]
            if value is not None:
                self.log(key, value, on_step=not self.on_epoch, on_epoch=self.on_epoch)
        if self.logs_step:
            self.log("step", i + 1.0)
        loss = self.loss(i)
        if not self.automatic_optimization:
            optimizer = cast("LightningOptimizer", self.optimizers())
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return {"loss": loss} | {k: torch.tensor(v[i]) for k, v in self.outputs.items()}

    def loss(self, i: int) -> Tensor:
        return (self.weight * torch.tensor([i + 1.0, 0.5])).square().sum()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return torch.optim.Adam(self.parameters(), lr=0.1)


class Watch(Action):
    """Keeps the verdict of every step; never acts."""

    def __init__(self) -> None:
        super().__init__()
        self.verdicts: list[Verdict] = []

    @property
    def levels(self) -> list[int]:
        return [int(verdict.level) for verdict in self.verdicts]

    def on_step(self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict) -> None:
        self.verdicts.append(verdict)

    def respond(self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict) -> None:
        return None


class RecordActs(Action):
    """Keeps the steps at which it acted."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.acts: list[int] = []

    def act(self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict) -> str:
        self.acts.append(verdict.step)
        return "counted"


def above(threshold: float, key: str = "kl", **options: Any) -> Monitor:
    """A monitor that collapses at the second reading in a row above `threshold`."""
    return Monitor(key, **{"high": threshold, "patience": 2, "horizon": 0, **options})


class Loader(DataLoader[Any]):
    """A loader whose batches are all alike, so a resumed run may start at any position in it."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def batches(count: int) -> Loader:
    """Batches of a single zero; modules tell them apart by their index."""
    return Loader(torch.zeros(count))  # type: ignore[arg-type]


def trainer(folder: Path, *callbacks: Any, **arguments: Any) -> Trainer:
    """A quiet trainer on one CPU process."""
    quiet: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False}
    quiet |= {f"enable_{x}": False for x in ("checkpointing", "progress_bar", "model_summary")}
    quiet |= {"log_every_n_steps": 1, "default_root_dir": folder}
    return Trainer(callbacks=list(callbacks), **{**quiet, **arguments})


class Saver(Checkpoint):
    """Saves after each batch. Like `ModelCheckpoint`, it runs after all other callbacks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.fit_loop.total_batch_idx + 1}.ckpt")


def fit_batches(
    folder: Path, module: Any, count: int, *callbacks: Any, done: int | None = None, **options: Any
) -> Trainer:
    """Fit `count` batches, with a checkpoint in `folder` after each one.

    With `done`, resume from the checkpoint after that number of batches.
    """
    if REPEATS and done is not None:
        pytest.skip(WHY_REPEATS)
    run = trainer(folder, Saver(folder), *callbacks, enable_checkpointing=True, **options)
    path = None if done is None else str(folder / f"{done}.ckpt")
    run.fit(module, batches(count), ckpt_path=path, **(PLAIN if path else {}))
    return run


def watching(*actions: Action) -> CollapseDetector:
    """A detector that `script_of` leads to any level at once, and back."""
    monitors = [above(10.0, key, patience=1) for key in ("kl", "size")]
    return CollapseDetector(monitors, [*actions], votes=2)


def script_of(levels: Sequence[int]) -> Script:
    """A script that gives `watching` these levels."""
    return {
        "kl": [20.0 if level >= Level.SUSPICIOUS else 1.0 for level in levels],
        "size": [20.0 if level == Level.COLLAPSED else 1.0 for level in levels],
    }
