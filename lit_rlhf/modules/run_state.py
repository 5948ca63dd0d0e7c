"""A run as its parts see it: the base of `StageModule`, which the run's callbacks work with."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from lit_callbacks import Collapse
from lit_rlhf.data import DialogueEncoder
from lit_rlhf.modules.updates import TrainedNetwork, UpdateGuard

FinishedWeights = Literal["last", "best"]
"""Which weights of a run its finished model has."""


class BestCheckpoint(NamedTuple):
    """The best checkpoint of a run.

    Attributes:
        monitor: Key of the metric that it is the best by.
        score: The metric's value.
        updates: Number of optimizer steps that had been made, over all optimizers.
    """

    monitor: str
    score: float
    updates: int


MACHINE_METRICS = ("time/", "memory/", "throughput/")
"""Groups of metrics that tell of the machine, and not of the model."""


class RunState(LightningModule):
    """What the folders, the resume rules and the finished model of a run need of its module.

    Attributes:
        stage: Name of the stage.
        model_path: Folder or hub id of the model that the stage starts from.
        inputs: Folders or hub ids of all models that it starts from, by option.
        input_checksums: Checksums of what the run reads besides its data, by names for messages.
        allow_changes: Resume even from a checkpoint of a run with other data, models or precision;
            set it before the fit. The settings that count are in `docs/resume.md`.
        finished: Weights of the finished model: `last`, or `best` for the best checkpoint of the
            Trainer's ModelCheckpoint; set it before the fit.
        best: The checkpoint that the finished model is from, if it is not from the last weights.
        command: The command line that started the run, if there was one.
        guard: Makes updates, and skips those with numbers that are not finite.
        collapse: What a detector ended the run with, if it did.
        has_trained: Whether the current fit has begun to train.
    """

    stage: ClassVar[str]
    model_path: str
    inputs: dict[str, list[str]]
    input_checksums: dict[str, object]
    allow_changes: bool
    finished: FinishedWeights
    best: BestCheckpoint | None
    command: str | None
    guard: UpdateGuard
    collapse: Collapse | None
    has_trained: bool

    @property
    def datamodule(self) -> LightningDataModule | None:
        """The run's datamodule, if it has one. Lightning does not declare its attribute."""
        return getattr(self.trainer, "datamodule", None)

    @property
    def encoder(self) -> DialogueEncoder | None:
        """The encoder of the run's datamodule; `None` for a datamodule without one."""
        return getattr(self.datamodule, "encoder", None)

    @property
    def is_complete(self) -> bool:
        """Whether the module's own limit has ended the run, besides the Trainer's limits."""
        return False

    @property
    def finished_dir(self) -> Path:
        """Folder of the finished model."""
        raise NotImplementedError

    def trained_networks(self) -> dict[str, TrainedNetwork]:
        """Optimizer and schedule of each trained network, by its name, during a fit."""
        raise NotImplementedError

    def write_finished(self, folder: Path) -> None:
        """Write the finished networks to an empty folder, with `write_network`, on all ranks."""
        raise NotImplementedError

    def save_finished(self) -> None:
        """Save the finished networks to `finished_dir`, on rank 0 and all at once."""
        raise NotImplementedError


def last_metrics(trainer: Trainer, saved: Mapping[str, float]) -> dict[str, float]:
    """The last value of each logged metric, or else the one in a checkpoint.

    Args:
        trainer: The trainer of the run.
        saved: Metrics in the checkpoint that the run resumed from.
    """
    logged = {
        key: float(value)
        for key, value in trainer.callback_metrics.items()
        if torch.is_tensor(value) and value.numel() == 1 and "/" in key
        # without metrics of callbacks, and without what a resumed run cannot repeat
        if not key.startswith(("monitor/", *MACHINE_METRICS))
    }
    return {**saved, **logged}
