"""Checkpoints for a run that may be killed at any time."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_callbacks.output import versioned_folder
from lit_callbacks.trainer_attributes import is_dry_run

SIGNALS = {
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "SIGHUP",  # a terminal was closed
    signal.SIGINT: "Ctrl-C",
}
TERMINATED_STATUS = 128 + signal.SIGTERM
"""Status that a shell reports for a process that SIGTERM ended."""
INTERRUPTED_STATUS = 128 + signal.SIGINT
"""Status that a shell reports for a process that Ctrl-C ended."""
OWN_NAME = re.compile(r"batch=\d+(-v\d+)?\.ckpt")


class ResumeCheckpoint(Checkpoint):
    """Saves a checkpoint at regular intervals, and at SIGTERM, SIGHUP and Ctrl-C.

    At a signal, the current batch or validation is finished, then a checkpoint is saved and the
    process exits with status 143, or 130 after Ctrl-C. It is enough that one of several processes
    receives the signal. A second Ctrl-C ends the run at once, without a checkpoint, like in
    Lightning.

    It counts batches under manual optimization too, and names its checkpoints `batch=N.ckpt`.

    Args:
        every_n_batches: Number of training batches (PPO iterations) between two checkpoints, at
            least 1; `None` for no limit.
        keep: Number of its checkpoints to keep; at least 2, in case the newest is damaged.
        dirpath: Folder of the checkpoints; by default the folder of Lightning's `ModelCheckpoint`.
        every_n_minutes: Minutes since the last checkpoint after which a batch ends with the next,
            positive; `None` for no limit.
    """

    def __init__(
        self,
        every_n_batches: int | None = None,
        keep: int = 2,
        dirpath: str | None = None,
        every_n_minutes: float | None = None,
    ) -> None:
        super().__init__()
        if every_n_batches is not None and every_n_batches < 1:
            raise ValueError(f"every_n_batches: expected at least 1 or None, got {every_n_batches}")
        if every_n_minutes is not None and not every_n_minutes > 0:
            raise ValueError(
                f"every_n_minutes: expected more than 0 or None, got {every_n_minutes}"
            )
        if keep < 2:
            raise ValueError(f"keep: expected at least 2, got {keep}")
        self.every_n_batches = every_n_batches
        self.every_n_minutes = every_n_minutes
        self.keep = keep
        self.dirpath = dirpath
        self._names: list[str] = []
        self._saved_batches = 0
        self._saved_at = 0.0  # by the monotonic clock
        self._received: signal.Signals | None = None
        self._exit_status: int | None = None  # set once the run is to end
        self._previous_handlers: dict[signal.Signals, Any] = {}

    @property
    def last_model_path(self) -> str:
        """Path of its newest checkpoint, empty if there is none; named as in `ModelCheckpoint`."""
        return str(Path(str(self.dirpath)) / self._names[-1]) if self._names else ""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Choose the folder, the same on all ranks.

        Args:
            trainer: The Trainer.
            pl_module: Its module.
            stage: `fit`, `validate`, `test` or `predict`.
        """
        dirpath = self.dirpath or str(default_checkpoint_dir(trainer))
        self.dirpath = trainer.strategy.broadcast(dirpath)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace the handlers of signals.

        Lightning's own handler communicates between ranks while it runs, in the middle of a batch.
        """
        count_resumed_epoch(trainer)
        resumed = trainer.ckpt_path
        folder = Path(str(self.dirpath))
        # a checkpoint from another folder names files of that folder
        if resumed is not None and Path(resumed).parent.resolve() != folder.resolve():
            self._names = []
        # the previous run may have been killed between a save and its removals
        self._remove_old(trainer)
        self._received = signal.SIGTERM if trainer.received_sigterm else None
        self._exit_status = None
        self._saved_batches = 0
        self._saved_at = time.monotonic()
        # Python sets signal handlers in the main thread only
        if threading.current_thread() is not threading.main_thread():
            return
        replaced = [signal.SIGTERM]
        # a process in the background ignores SIGINT, and a program may have its own handler
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            replaced.append(signal.SIGINT)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # `nohup` ignores it
            replaced.append(signal.SIGHUP)
        for received in replaced:
            self._previous_handlers[received] = signal.signal(received, self._handle_signal)

    def _handle_signal(self, signum: int, frame: FrameType | None) -> None:
        # saving here would interrupt a batch: the next hook on which all ranks agree does it
        self._received = signal.Signals(signum)
        note = f"\n{SIGNALS[self._received]}: the run ends after this batch, with a checkpoint."
        if signum == signal.SIGINT:
            # the second Ctrl-C raises Python's KeyboardInterrupt
            signal.signal(signal.SIGINT, self._previous_handlers.pop(signal.SIGINT))
            note += " Press it again to end the run at once, without one."
        # `print` fails if the signal has interrupted another `print`
        with suppress(OSError):
            rank_zero_only(os.write)(2, f"{note}\n".encode())

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Save if it is time, or if any rank has received a signal."""
        n_batches = trainer.fit_loop.total_batch_idx + 1
        if self.every_n_batches is not None and n_batches % self.every_n_batches == 0:
            self._save(trainer)
        agree = trainer.strategy.reduce_boolean_decision
        # the ranks' clocks differ: all ranks save as soon as the time is over on one of them
        if agree(self._received is not None or self._is_time(), all=False):
            self._save_at_signal(trainer)
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the run here if any rank received a signal during a validation within fit."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._save_at_signal(trainer)
            self._end_at_signal()

    def _is_time(self) -> bool:
        minutes = (time.monotonic() - self._saved_at) / 60
        return self.every_n_minutes is not None and minutes >= self.every_n_minutes

    def _end_at_signal(self, *_: Any) -> None:
        """End the run if a checkpoint was saved at a signal."""
        if self._exit_status == INTERRUPTED_STATUS:
            raise SystemExit(INTERRUPTED_STATUS)
        if self._exit_status is not None:
            raise SIGTERMException(TERMINATED_STATUS)

    # A batch's metrics are logged after `on_train_batch_end`. So the run ends in the next of these
    # hooks.
    on_train_batch_start = on_validation_start = _end_at_signal  # type: ignore[assignment]
    on_train_epoch_end = _end_at_signal  # type: ignore[assignment]

    def _save_at_signal(self, trainer: Trainer) -> None:
        agree = trainer.strategy.reduce_boolean_decision
        if not agree(self._received is not None, all=False):
            return
        # all ranks end with the same status, although perhaps only one has received the signal
        interrupted = agree(self._received == signal.SIGINT, all=False)
        self._exit_status = INTERRUPTED_STATUS if interrupted else TERMINATED_STATUS
        self._save(trainer)
        received = self._received or signal.SIGTERM  # by another rank
        name = SIGNALS[signal.SIGINT if interrupted else received]
        rank_zero_info(f"{name}: the run ends; its checkpoints are in {self.dirpath}")

    def _save(self, trainer: Trainer) -> None:
        n_batches = trainer.fit_loop.total_batch_idx + 1
        if self._saved_batches == n_batches or is_dry_run(trainer):
            return
        folder = Path(str(self.dirpath))
        name = f"batch={n_batches}.ckpt"
        version = 0
        while (folder / name).exists():
            version += 1
            name = f"batch={n_batches}-v{version}.ckpt"
        # add the name before saving, so that a resumed run knows the checkpoint it resumed from
        self._names.append(trainer.strategy.broadcast(name))
        trainer.save_checkpoint(folder / self._names[-1], weights_only=False)
        self._saved_batches = n_batches
        self._saved_at = time.monotonic()
        self._remove_old(trainer)

    def _remove_old(self, trainer: Trainer) -> None:
        for name in self._names[: -self.keep]:
            trainer.strategy.remove_checkpoint(Path(str(self.dirpath)) / name)
        del self._names[: -self.keep]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the previous handlers."""
        self._restore_handlers()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Restore the previous handlers, and set an exit status that is not success.

        Args:
            trainer: The Trainer.
            pl_module: Its module.
            exception: The exception that ends the run.
        """
        self._restore_handlers()
        # Lightning raises its own SIGTERMException without a status, which exits with 0
        if isinstance(exception, SIGTERMException) and exception.code is None:
            exception.code = TERMINATED_STATUS

    def _restore_handlers(self) -> None:
        for received, handler in self._previous_handlers.items():
            signal.signal(received, handler)
        self._previous_handlers.clear()

    def state_dict(self) -> dict[str, Any]:
        """Names of the checkpoints that it keeps."""
        return {"names": list(self._names)} if self._names else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the checkpoints of the run that is resumed."""
        # The callback will delete these files. A forged checkpoint could name any path, so take
        # only names that the callback gives itself.
        self._names = [name for name in state_dict["names"] if OWN_NAME.fullmatch(name)]


def count_resumed_epoch(trainer: Trainer) -> None:
    """Count the epoch that begins when a run resumes right after the last batch of an epoch.

    Call it in `on_train_start`. Lightning 2.6.6 does not count that epoch as begun, so that the
    checkpoint at its end could not be resumed: the next run would skip an epoch, or end at once.
    """
    epochs = trainer.fit_loop.epoch_progress
    # Lightning 2.4 has no such property, and counts every epoch that begins
    restarted = getattr(trainer.fit_loop, "restarted_mid_epoch", False)
    if restarted and epochs.current.ready == trainer.current_epoch:
        epochs.increment_ready()
        epochs.increment_started()


def default_checkpoint_dir(trainer: Trainer) -> Path:
    """The default folder of Lightning's `ModelCheckpoint`, which follows the first logger."""
    if not trainer.loggers:
        return Path(trainer.default_root_dir) / "checkpoints"
    return versioned_folder(trainer, trainer.loggers[0]) / "checkpoints"
