"""Checkpoint files that are whole under their name, and checked before they are used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lit_rlhf.strategies.checkpoint_search import file_problem, refusal
from lit_rlhf.strategies.placement import (
    partial_path,
    put_in_place,
    remove,
    remove_partials,
    write,
)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint file aside and moves it into place; refuses a damaged one.

    A write that is interrupted, or finds the disk full, leaves the checkpoint that has the name as
    it was, and at most a hidden file `.NAME.partial`, which the next save in that folder deletes.
    Give it to any Trainer: `Trainer(plugins=[AtomicCheckpointIO()])`. Paths with a scheme
    (`s3://`) are left to Lightning.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: object = None
    ) -> None:
        """Write `checkpoint` to `path`, on disk when this returns.

        Raises:
            TypeError: If `storage_options` is given.
            OSError: If it cannot be written, for instance as the disk is full.
        """
        if is_remote(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        if storage_options is not None:
            raise TypeError("storage_options: not supported for checkpoints in local files")
        path = Path(path)
        partial = partial_path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_partials(path.parent)
        try:
            write(checkpoint, partial)
            put_in_place(path)
        except OSError as error:
            raise OSError(
                error.errno,
                f"checkpoint {path} could not be written: {error.strerror}; those that were there "
                "before are as they were",
            ) from error
        finally:
            remove(partial)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[[Any, str], Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read the checkpoint at `path`, as plain data unless `weights_only` is False.

        Raises:
            FileNotFoundError: If there is none.
            ValueError: If it is damaged; the message offers the newest sound one beside it.
        """
        weights_only = weights_only is not False
        if is_remote(path):
            return super().load_checkpoint(path, map_location, weights_only)
        path = Path(path)
        if not path.exists():
            raise FileNotFoundError(f"checkpoint {path}: does not exist")
        if path.is_dir():
            raise ValueError(
                f"checkpoint {path}: a folder, as the multi-engine strategy writes; resume it with "
                "that strategy"
            )
        problem = file_problem(path)
        if problem is not None:
            raise refusal(path, problem)
        try:
            checkpoint: dict[str, Any] = torch.load(path, map_location, weights_only=weights_only)
        except RuntimeError as error:  # of torch's reader, for damage in what zip does not check
            raise refusal(path, f"is damaged: {error}") from error
        return checkpoint


def use_atomic_checkpoints(trainer: Trainer) -> None:
    """Let a Trainer whose strategy writes checkpoints in Lightning's plain way write them safely.

    A strategy with a way of its own, and a plugin that the user chose, stay.
    """
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()


def is_remote(path: str | Path) -> bool:
    """Whether a path names a file system other than this machine's."""
    return "://" in str(path)
