"""The folders that a run writes to: locked while it runs, checked before and during it."""

import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import distributed

from lit_callbacks import default_checkpoint_dir
from lit_callbacks.trainer_attributes import is_dry_run
from lit_rlhf.files import (
    FolderLocks,
    hash_files,
    hash_model,
    lock_path,
    try_replacement,
    undo_interrupted_replacement,
)
from lit_rlhf.models import check_replaceable
from lit_rlhf.modules.run_state import RunState
from lit_rlhf.modules.schedules import NO_BATCHES
from lit_rlhf.paths import is_or_contains


class RunFolders(Callback):
    """Locks the folders that a run writes to, until it ends, and has the finished model saved.

    It is a callback, because a LightningModule is not told of exceptions.

    Attributes:
        hashes: Hashes of the models that the run starts from, by names for their card.
    """

    def __init__(self) -> None:
        self._locks = FolderLocks()
        self._training = False
        self.hashes: dict[str, Any] = {}
        self._weights: dict[Path, Any] = {}  # hashes of the models' files

    def lock(self, trainer: Trainer, finished: Path) -> None:
        """Lock the folders of the finished model, of logs and of checkpoints.

        Whether the finished model's can be replaced is tried now, and not found out at the end.
        """
        self._training = False
        self._locks.acquire([finished, *training_folders(trainer)])
        undo_interrupted_replacement(finished.resolve())
        try_replacement(finished.resolve(), "output_dir")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that all ranks see the folders of the run and of its models, and hash these.

        Args:
            trainer: The trainer of the run.
            pl_module: Its module.
            stage: What Lightning sets up for.
        """
        if stage != "fit" or is_dry_run(trainer):
            return
        module = cast(RunState, pl_module)
        if trainer.world_size > 1:
            check_shared_folders(trainer, module.finished_dir, module.inputs)
        if trainer.is_global_zero:  # now: another run may replace them meanwhile
            paths = sorted({path for paths in module.inputs.values() for path in paths})
            hashes = {f"SHA-256 of {Path(path).name}": hash_model(path) for path in paths}
            self.hashes = {name: digest for name, digest in hashes.items() if digest}
            files = (file.resolve() for path in paths for file in Path(path).glob("*.safetensors"))
            self._weights = {file: hash_files(file) for file in files}

    def check_mapped(self) -> None:
        """Refuse weights that were written over while this process has them mapped into memory.

        Frozen weights on a CPU change with their file, but not if another one takes its name.
        """
        maps = Path("/proc/self/maps")  # only Linux has it
        mapped = maps.read_text("utf-8") if maps.exists() else ""
        for file, expected in self._weights.items():
            if f" {file}\n" in mapped and hash_files(file) != expected:
                raise ValueError(
                    f"{file}: expected the weights that the run started from, got others, which "
                    "were written over them while the run read from the file: start again, and "
                    "replace a model by renaming a folder or file"
                )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that an interruption leaves an unfinished stage from now on."""
        self._training = True

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the finished model, unless the fit was a trial.

        `on_train_end` would be too early: Lightning calls it at the end of every trial of a Tuner
        too, but not for a run that resumes from its very end, where a kill came between the last
        step and the saving.
        """
        module = cast(RunState, pl_module)
        if is_dry_run(trainer):
            return
        if not module.has_trained and trainer.ckpt_path is None:
            raise ValueError(NO_BATCHES)
        module.save_finished()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Release the locks.

        Args:
            trainer: The trainer of the run.
            pl_module: Its module.
            stage: What Lightning was set up for.
        """
        self._locks.release()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Release the locks, and leave the mark of an interrupted run if it has trained.

        Args:
            trainer: The trainer of the run.
            pl_module: Its module.
            exception: What ended the run.
        """
        if self._training:
            self._locks.interrupt()
        else:
            self._locks.release()


def check_finished_dir(
    trainer: Trainer, finished: Path, inputs: Mapping[str, Sequence[str]]
) -> None:
    """Check that a finished model can be saved, and that the run starts from finished ones.

    The folder will be replaced, so it may not contain a model that the run starts from, a folder
    that it writes to while it trains, or content that no stage has saved.

    Args:
        trainer: The trainer of the run.
        finished: Folder of the finished model.
        inputs: Folders or hub ids of the models that the run starts from, by option.
    """
    must_stay = {f"{name} ({path})": Path(path) for name, paths in inputs.items() for path in paths}
    must_stay |= {f"the run's own folder {path}": path for path in training_folders(trainer)}
    with suppress(FileNotFoundError):
        finished.stat()  # fails for a link to itself, and below a file
    for name, path in must_stay.items():
        if is_or_contains(finished, path):
            raise ValueError(
                f"output_dir: expected a folder for the finished model only, got {finished}, "
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


def check_shared_folders(
    trainer: Trainer, finished: Path, inputs: Mapping[str, Sequence[str]]
) -> None:
    """Check on every rank that it sees what rank 0 sees in the folders of a run that is locked.

    Args:
        trainer: The trainer of the run.
        finished: Folder of the finished model.
        inputs: Folders or hub ids of the models that the run starts from, by option.

    Raises:
        ValueError: On all ranks, with the hosts and folders that differ.
    """
    runs = [str(path) for path in (finished, *training_folders(trainer))]
    models = [path for paths in inputs.values() for path in paths]
    host = socket.gethostname()
    # loggers of other ranks may have other folders, which they do not write to
    runs, models, first, expected = trainer.strategy.broadcast(
        (runs, models, host, _folder_contents(runs=runs, models=models))
    )
    contents = _folder_contents(runs=runs, models=models)
    differing = [path for path in contents if contents[path] != expected[path]]
    by_rank: list[Any] = [None] * trainer.world_size
    distributed.all_gather_object(by_rank, (host, differing))
    if differing_by_host := {name: paths for name, paths in by_rank if paths}:
        listed = "; ".join(
            f"host {name}: {', '.join(paths)}" for name, paths in differing_by_host.items()
        )
        raise ValueError(
            "model_path, output_dir, trainer: expected folders with the same files on all nodes, "
            f"on a file system that they share, got others than on host {first} of rank 0 "
            f"at {listed}"
        )


def _folder_contents(*, runs: Sequence[str], models: Sequence[str]) -> dict[str, object]:
    """Holders of the locks of the run's folders, and names and sizes of the models' files."""
    contents: dict[str, object] = {}
    for path in runs:
        mark = lock_path(Path(path))
        # by its folder, since a network's file system may remember that there was no such file
        there = mark.parent.is_dir() and mark in mark.parent.iterdir()
        contents[path] = mark.read_text(encoding="utf-8") if there else ""
    for path in models:
        files = (file for file in Path(path).glob("*") if file.is_file())
        contents[path] = sorted((file.name, file.stat().st_size) for file in files)
    return contents


def training_folders(trainer: Trainer) -> list[Path]:
    """Folders of logs and checkpoints that the run writes to while it trains."""
    logs = [versioned_log_folder(trainer)] if trainer.loggers else []
    return [*logs, *checkpoint_folders(trainer)]


def versioned_log_folder(trainer: Trainer) -> Path:
    """The folder of a run's first logger, which has the run's name and version."""
    return default_checkpoint_dir(trainer).parent


def checkpoint_folders(trainer: Trainer) -> list[Path]:
    """The folders of a trainer's checkpoint callbacks, each once, in the order of the callbacks."""
    default = default_checkpoint_dir(trainer)
    folders = (getattr(c, "dirpath", None) or default for c in trainer.checkpoint_callbacks)
    return list(dict.fromkeys(map(Path, folders)))


def log_folder(trainer: Trainer) -> Path:
    """`Trainer.log_dir`, for one rank only: that property communicates between ranks."""
    logger = trainer.logger
    folder = logger and (logger.log_dir or logger.save_dir)
    return Path(folder or trainer.default_root_dir)
