"""Checkpoints for a run that may be killed at any time."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

EXIT_STATUS = 128 + signal.SIGTERM  # what a shell says of a process that SIGTERM ended


class ResumeCheckpoint(Checkpoint):
    """Saves a checkpoint every so many batches, and when the run is told to end with SIGTERM.

    Schedulers send SIGTERM some time before they take a machine away. The batch or validation that
    is under way is finished, then a checkpoint is saved and the process ends with status 143. Of
    several processes one has to get the signal.

    It counts batches, also under manual optimization, where Lightning's ModelCheckpoint counts the
    steps of all optimizers together. Its checkpoints are `batch=N.ckpt`, N batches into the run.

    Args:
        every_n_batches: Training batches (PPO iterations) from one checkpoint to the next; `None`
            saves at SIGTERM only.
        keep: Number of its checkpoints to keep, the newest. At least 2, so that there is another
            one should the newest be damaged.
        dirpath: Their folder; by default the one that ModelCheckpoint takes by default.

    Raises:
        ValueError: If a number is too small.
    """

    def __init__(
        self, every_n_batches: int | None = None, keep: int = 2, dirpath: str | None = None
    ) -> None:
        super().__init__()
        if every_n_batches is not None and every_n_batches < 1:
            raise ValueError(f"every_n_batches: expected at least 1 or None, got {every_n_batches}")
        if keep < 2:
            raise ValueError(f"keep: expected at least 2, got {keep}")
        self.every_n_batches = every_n_batches
        self.keep = keep
        self.dirpath = dirpath
        self._names: list[str] = []
        self._saved_batches = 0
        self._told_to_end = False
        self._ending = False
        self._handler_before: Any = None

    @property
    def last_model_path(self) -> str:
        """Its newest checkpoint, empty where there is none; named as ModelCheckpoint names it."""
        return str(Path(str(self.dirpath)) / self._names[-1]) if self._names else ""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Settle on the folder, the same on all ranks."""
        dirpath = self.dirpath or str(checkpoint_folder(trainer))
        self.dirpath = trainer.strategy.broadcast(dirpath)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take SIGTERM over from Lightning, which ends the run without a checkpoint.

        On several ranks its handler also communicates, wherever in their own exchanges they are.
        """
        count_resumed_epoch(trainer)
        self._remove_old(trainer)  # what a kill has left between a save and its removals
        self._told_to_end = trainer.received_sigterm
        self._ending = False
        self._saved_batches = 0
        if threading.current_thread() is threading.main_thread():
            self._handler_before = signal.signal(signal.SIGTERM, self._take_note)

    def _take_note(self, signum: int, frame: FrameType | None) -> None:
        self._told_to_end = True

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Save if it is time, or if any rank was told to end."""
        n_batches = trainer.fit_loop.total_batch_idx + 1
        if self.every_n_batches is not None and n_batches % self.every_n_batches == 0:
            self._save(trainer)
        self._save_if_told_to_end(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the run here if any rank was told to during a validation within fit."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._save_if_told_to_end(trainer)
            self._end_if_saved()

    # A batch's metrics are logged after `on_train_batch_end`; these are the hooks that may be next.

    def on_train_batch_start(self, *_: Any) -> None:
        """End the run if it was told to."""
        self._end_if_saved()

    def on_validation_start(self, *_: Any) -> None:
        """End the run if it was told to."""
        self._end_if_saved()

    def on_train_epoch_end(self, *_: Any) -> None:
        """End the run if it was told to."""
        self._end_if_saved()

    def _save_if_told_to_end(self, trainer: Trainer) -> None:
        self._ending = trainer.strategy.reduce_boolean_decision(self._told_to_end, all=False)
        if self._ending:
            self._save(trainer)
            rank_zero_info(f"SIGTERM: the run ends; its checkpoints are in {self.dirpath}")

    def _end_if_saved(self) -> None:
        if self._ending:
            raise SIGTERMException(EXIT_STATUS)

    def _save(self, trainer: Trainer) -> None:
        n_batches = trainer.fit_loop.total_batch_idx + 1
        # Lightning does not declare `fast_dev_run`
        if self._saved_batches == n_batches or getattr(trainer, "fast_dev_run", False):
            return
        folder = Path(str(self.dirpath))
        # added before saving, so that a resumed run knows the checkpoint that it resumed from
        self._names.append(trainer.strategy.broadcast(free_name(folder, f"batch={n_batches}")))
        trainer.save_checkpoint(folder / self._names[-1], weights_only=False)
        self._saved_batches = n_batches
        self._remove_old(trainer)

    def _remove_old(self, trainer: Trainer) -> None:
        for name in self._names[: -self.keep]:
            trainer.strategy.remove_checkpoint(Path(str(self.dirpath)) / name)
        del self._names[: -self.keep]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give SIGTERM back."""
        self._give_back()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Give SIGTERM back; a run that it ended does not exit as one that is done."""
        self._give_back()
        if isinstance(exception, SIGTERMException) and exception.code is None:
            exception.code = EXIT_STATUS

    def _give_back(self) -> None:
        if self._handler_before is not None:
            signal.signal(signal.SIGTERM, self._handler_before)
            self._handler_before = None

    def state_dict(self) -> dict[str, Any]:
        """Names of the checkpoints that it keeps."""
        return {"names": list(self._names)} if self._names else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the checkpoints of the run that is resumed."""
        self._names = list(state_dict["names"])


def count_resumed_epoch(trainer: Trainer) -> None:
    """Count the epoch that begins when a run resumes behind the last batch of the one before.

    For `on_train_start`. Lightning (2.6.6) does not count it as begun, so that the checkpoint at
    the end of that epoch could not be resumed: the next run would skip an epoch, or end at once.
    """
    epochs = trainer.fit_loop.epoch_progress
    if trainer.fit_loop.restarted_mid_epoch and epochs.current.ready == trainer.current_epoch:
        epochs.increment_ready()
        epochs.increment_started()


def checkpoint_folder(trainer: Trainer) -> Path:
    """Where Lightning's ModelCheckpoint saves if nobody tells it: by the first logger, if any."""
    if not trainer.loggers:
        return Path(trainer.default_root_dir) / "checkpoints"
    logger = trainer.loggers[0]
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    root = logger.save_dir or trainer.default_root_dir
    return Path(root) / str(logger.name) / version / "checkpoints"


def free_name(folder: Path, stem: str) -> str:
    """`stem.ckpt`, with a number where a checkpoint of another run has that name."""
    name, version = f"{stem}.ckpt", 0
    while (folder / name).exists():
        version += 1
        name = f"{stem}-v{version}.ckpt"
    return name
