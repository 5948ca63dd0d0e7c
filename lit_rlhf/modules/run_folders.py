"""The folders that a run writes to: checked and locked before it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_callbacks import default_checkpoint_dir
from lit_rlhf.files import FolderLocks, lock_path
from lit_rlhf.models import check_replaceable


class RunFolders(Callback):
    """Locks the folders that a run writes to, until it ends.

    A callback, since a LightningModule does not hear of exceptions.
    """

    def __init__(self) -> None:
        self._locks = FolderLocks()
        self._training = False

    def lock(self, trainer: Trainer, finished: Path) -> None:
        """Lock the folder of the finished model and those of logs and checkpoints.

        Raises:
            RuntimeError: If another run writes to one of them.
        """
        self._training = False
        self._locks.acquire([finished, *folders_during(trainer)])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that an interruption leaves an unfinished stage from now on."""
        self._training = True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Release the locks."""
        self._locks.release()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Release the locks, and leave the mark of an interrupted run if it has trained."""
        if self._training:
            self._locks.interrupt()
        else:
            self._locks.release()


def check_finished_dir(
    trainer: Trainer, finished: Path, inputs: Mapping[str, Sequence[str]]
) -> None:
    """Check that a finished model can be saved, and that the run starts from finished ones.

    Args:
        trainer: The Trainer.
        finished: Folder of the finished model. It will be replaced.
        inputs: By option, folders or hub ids of the models that the run starts from.

    Raises:
        ValueError: If the folder is or contains a model that the run starts from, or a folder that
            it writes to during training; if it has content that no stage has saved; or if the run
            that writes one of the models has not ended.
    """
    kept = {f"{name} ({path})": Path(path) for name, paths in inputs.items() for path in paths}
    kept |= {f"the run's own folder {path}": path for path in folders_during(trainer)}
    target = finished.resolve()
    for name, path in kept.items():
        if target in (path.resolve(), *path.resolve().parents):
            raise ValueError(
                f"output_dir: expected a folder for the finished model alone, got {finished}, "
                f"which is or contains {name}; the finished model would replace it"
            )
    try:
        check_replaceable(finished)
    except ValueError as error:
        raise ValueError(f"output_dir: {error}") from error
    for name, paths in inputs.items():
        for path in filter(Path.is_dir, map(Path, paths)):
            mark = lock_path(path)
            if mark.is_file():
                raise ValueError(
                    f"{name}: expected a finished model, got {path}, which a run writes to, or "
                    f"wrote to when it was interrupted: {mark.read_text(encoding='utf-8')}. Let "
                    f"that run finish. If the model there is the one you want, delete {mark}"
                )


def folders_during(trainer: Trainer) -> list[Path]:
    """Folders of logs and checkpoints that the run writes to while it trains."""
    default = default_checkpoint_dir(trainer)
    checkpoints = [
        Path(getattr(callback, "dirpath", None) or default)
        for callback in trainer.checkpoint_callbacks
    ]
    return [*([default.parent] if trainer.loggers else []), *checkpoints]


def log_folder(trainer: Trainer) -> Path:
    """`Trainer.log_dir`, for one rank alone: that property communicates between ranks."""
    logger = trainer.logger
    folder = logger and (logger.log_dir or logger.save_dir)
    return Path(folder or trainer.default_root_dir)
