"""The folders that a run writes to, and its finished model: its card, and which weights it has."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import distributed

from lit_callbacks import default_checkpoint_dir, find_collapse
from lit_rlhf.data import DataSource, RecordDataModule
from lit_rlhf.files import FolderLocks, hash_files, hash_model, lock_path, write_manifest
from lit_rlhf.models import ModelCardInfo, check_replaceable, replace_folder
from lit_rlhf.modules.option_names import dotted_arguments
from lit_rlhf.modules.resuming import last_metrics
from lit_rlhf.modules.updates import require_finite_weights
from lit_rlhf.stats import fail_together

if TYPE_CHECKING:
    from lit_rlhf.modules.stage import StageModule


class RunFolders(Callback):
    """Locks the folders that a run writes to, until it ends, and saves the finished model.

    A callback, since a LightningModule does not hear of exceptions.
    """

    def __init__(self) -> None:
        self._locks = FolderLocks()
        self._training = False
        self.hashes: dict[str, Any] = {}  # of the models that the run starts from
        self._weights: dict[Path, Any] = {}  # hashes of their files

    def lock(self, trainer: Trainer, finished: Path) -> None:
        """Lock the folders of the finished model, of logs and of checkpoints."""
        self._training = False
        self._locks.acquire([finished, *folders_during(trainer)])

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that all ranks see the folders of the run and of its models, and hash these."""
        if stage != "fit" or is_dry_run(trainer):
            return
        module = cast("StageModule", pl_module)
        if trainer.world_size > 1:
            check_shared_folders(trainer, module.finished_dir, module.inputs)
        if trainer.is_global_zero:  # now, as another run may replace them meanwhile
            paths = sorted({path for paths in module.inputs.values() for path in paths})
            hashes = {f"SHA-256 of {Path(path).name}": hash_model(path) for path in paths}
            self.hashes = {name: found for name, found in hashes.items() if found}
            files = (file.resolve() for path in paths for file in Path(path).glob("*.safetensors"))
            self._weights = {file: hash_files(file) for file in files}

    def check_mapped(self) -> None:
        """Refuse weights that were written over while this process has them mapped into memory.

        Frozen weights on a CPU change with their file, but not if another one takes its name.
        """
        maps = Path("/proc/self/maps")  # of Linux
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
        module = cast("StageModule", pl_module)
        ended = module.resume.trained or trainer.ckpt_path is not None
        if ended and not is_dry_run(trainer):
            save_finished(module)

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

    `inputs` are folders or hub ids of the models that the run starts from, by option. The folder
    will be replaced, so it may not contain one of them, a folder that the run writes to while it
    trains, or content that no stage has saved.
    """
    kept = {f"{name} ({path})": Path(path) for name, paths in inputs.items() for path in paths}
    kept |= {f"the run's own folder {path}": path for path in folders_during(trainer)}
    with suppress(FileNotFoundError):
        finished.stat()  # fails for a link to itself, and below a file
    target = finished.resolve()
    for name, path in kept.items():
        if target in (path.resolve(), *path.resolve().parents):
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

    Raises:
        ValueError: On all ranks, with the hosts and folders that differ.
    """
    runs = [str(path) for path in (finished, *folders_during(trainer))]
    models = [path for paths in inputs.values() for path in paths]
    host = socket.gethostname()
    # loggers of other ranks may have other folders, which they do not write to
    runs, models, first, expected = trainer.strategy.broadcast(
        (runs, models, host, _folder_contents(runs, models))
    )
    seen = _folder_contents(runs, models)
    differing = [path for path in seen if seen[path] != expected[path]]
    by_rank: list[Any] = [None] * trainer.world_size
    distributed.all_gather_object(by_rank, (host, differing))
    if found := {name: paths for name, paths in by_rank if paths}:
        listed = "; ".join(f"host {name}: {', '.join(paths)}" for name, paths in found.items())
        raise ValueError(
            "model_path, output_dir, trainer: expected folders with the same files on all nodes, "
            f"on a file system that they share, got others than on host {first} of rank 0 "
            f"at {listed}"
        )


def _folder_contents(runs: Sequence[str], models: Sequence[str]) -> dict[str, object]:
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


def folders_during(trainer: Trainer) -> list[Path]:
    """Folders of logs and checkpoints that the run writes to while it trains."""
    logs = [default_checkpoint_dir(trainer).parent] if trainer.loggers else []
    return [*logs, *checkpoint_folders(trainer)]


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


def is_dry_run(trainer: Trainer) -> bool:
    """Whether `fast_dev_run` only tries the code out. Lightning does not declare its attribute."""
    return bool(getattr(trainer, "fast_dev_run", False))


def save_finished(module: StageModule) -> None:
    """Save the finished networks to `module.finished_dir`, on rank 0 and all at once.

    If a detector has ended the run, the last healthy weights are saved, and the card says so;
    without healthy weights nothing is.
    """
    folder, trainer = module.finished_dir, module.trainer
    if unused := module.resume.unused_changes():
        rank_zero_info(
            f"{module.stage}: no batch was left to train, so that {', '.join(unused)} had no effect"
        )
    module.collapse = find_collapse(trainer)
    if module.collapse is not None:
        if module.collapse.checkpoint is None:
            rank_zero_warn(
                f"{module.stage}: stopped as {module.collapse.verdict.level.word}, and no healthy "
                f"weights were kept: {folder} is not written. With "
                "trainer.enable_checkpointing: true, StopTraining keeps them"
            )
            return
        content = trainer.strategy.load_checkpoint(module.collapse.checkpoint, weights_only=True)
        module.on_load_checkpoint(content)  # with the metrics for the card
        trainer.strategy.load_model_state_dict(content, strict=module.strict_loading)
    else:
        module.guard.check_end(trainer)
    require_finite_weights(module, module.stage, str(folder))
    # the other ranks only take part in gathering networks, and write nothing
    target = replace_folder(folder) if trainer.is_global_zero else nullcontext(folder)
    action = f"save the model to {folder}"
    with fail_together(action), ExitStack() as stack:
        with fail_together(action):  # before any rank waits for another's weights
            if not all(weight.requires_grad for weight in module.parameters()):
                module.folders.check_mapped()
            partial = stack.enter_context(target)
        module.write_finished(partial)
        if module.collapse is None and trainer.is_global_zero:
            write_manifest(partial, {"command": module.command})
    rank_zero_info(f"{module.stage}: saved the model to {folder}")


def model_card(module: StageModule) -> ModelCardInfo:
    """The model card of a run: its options, data and final metrics."""
    collapse, saved, ended = module.collapse, module.resume.saved_metrics, None
    if collapse is not None:
        ended = {
            "verdict": collapse.verdict.level.word,
            "reasons": collapse.verdict.sentence,
            "stopped_at_step": collapse.verdict.step,
            "weights_of_step": collapse.healthy_step,
        }
    # Settings that differ from the checkpoint's had no effect if no batch was left to train.
    unused = module.resume.unused_changes()
    of_others = any(name.startswith("data.") for name in unused)
    sources = [] if of_others else training_sources(module.datamodule)
    return ModelCardInfo(
        stage=module.stage,
        base_model=module.model_path,
        config={**dotted_arguments(module.hparams), **unused},
        metrics=last_metrics(module.trainer, saved) if collapse is None else saved,
        inputs=module.folders.hashes | module.resume.checksums(module),
        updates=module.trainer.global_step if collapse is None else None,
        collapse=ended,
        datasets=[source.path for source in sources if source.is_remote],
        files=[source.label for source in sources if not source.is_remote],
    )


def training_sources(datamodule: LightningDataModule | None) -> list[DataSource]:
    """Training data of a datamodule; empty for a user's class, whose data are not known."""
    if not isinstance(datamodule, RecordDataModule):
        return []
    return [s for part, of in datamodule.sources.items() if part not in ("val", "test") for s in of]
