"""The finished model of a run: where it goes, its card, and which weights it has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lit_callbacks import Collapse, find_collapse
from lit_rlhf.data import PromptDataModule, RecordDataModule
from lit_rlhf.models import ModelCardInfo, replace_folder
from lit_rlhf.modules.option_names import dotted_arguments
from lit_rlhf.modules.resuming import last_metrics

if TYPE_CHECKING:
    from lit_rlhf.modules.stage import StageModule

COLLAPSE_FILE = "collapse.json"
"""File in a finished model's folder that says that a detector ended the run."""


def is_dry_run(trainer: Trainer) -> bool:
    """Whether `fast_dev_run` only tries the code out. Lightning does not declare its attribute."""
    return bool(getattr(trainer, "fast_dev_run", False))


def save_finished(module: StageModule) -> None:
    """Save the finished networks to `module.finished_dir`, on rank 0 and all at once.

    If a detector has ended the run, the last healthy weights are saved, with a file that says so;
    without healthy weights nothing is.
    """
    folder, trainer = module.finished_dir, module.trainer
    module.collapse = find_collapse(trainer)
    if module.collapse is not None:
        if module.collapse.checkpoint is None:
            rank_zero_warn(
                f"{module.stage}: stopped as {module.collapse.verdict.level.word}, and no healthy "
                f"weights were kept: {folder} is not written. With "
                "trainer.enable_checkpointing: true, StopTraining keeps them"
            )
            return
        load_healthy_weights(module, module.collapse.checkpoint)
    if trainer.is_global_zero:
        with replace_folder(folder) as partial:
            module.write_finished(partial)
            if module.collapse is not None:
                record = collapse_record(module.collapse)
                (partial / COLLAPSE_FILE).write_text(json.dumps(record, indent=1), "utf-8")
        rank_zero_info(f"{module.stage}: saved the model to {folder}")
    trainer.strategy.barrier("lit_rlhf.save_finished")


def load_healthy_weights(module: StageModule, path: Path) -> None:
    """Load the weights of a checkpoint of this run, and its metrics for the card."""
    strategy = module.trainer.strategy
    checkpoint = strategy.load_checkpoint(path, weights_only=True)
    module.on_load_checkpoint(checkpoint)
    strategy.load_model_state_dict(checkpoint, strict=module.strict_loading)


def model_card(module: StageModule) -> ModelCardInfo:
    """The model card of a run: its options, data and final metrics."""
    collapse, saved = module.collapse, module.resume.saved_metrics
    datasets, files = name_training_data(module.datamodule)
    return ModelCardInfo(
        stage=module.stage,
        base_model=module.model_path,
        config=dotted_arguments(module.hparams),
        metrics=last_metrics(module.trainer, saved) if collapse is None else saved,
        note=None if collapse is None else describe_collapse(collapse),
        datasets=datasets,
        files=files,
    )


class TrainingData(NamedTuple):
    """Hub ids of a run's training data, and names of those that are not on the hub."""

    datasets: list[str]
    files: list[str]


def name_training_data(datamodule: LightningDataModule | None) -> TrainingData:
    """Name the sources of a datamodule; those of a class of its own are not known."""
    names = TrainingData([], [])
    if not isinstance(datamodule, RecordDataModule):
        return names
    ptx = datamodule.ptx_sources if isinstance(datamodule, PromptDataModule) else []
    for source in (*datamodule.sources["train"], *ptx):
        if source.is_remote:
            names.datasets.append(source.path)
        else:
            names.files.append(source.label)
    return names


def describe_collapse(collapse: Collapse) -> str:
    """How a detector ended a run, and which weights were saved, for the model card."""
    step, (level, sentence, stopped_at) = collapse.healthy_step, collapse.verdict
    return (
        f"Training was stopped as {level.word} at step {stopped_at}: {sentence}. The weights are "
        f"those of step {step}, the last healthy ones, and so are the metrics."
    )


def collapse_record(collapse: Collapse) -> dict[str, Any]:
    """The same as plain data, for `COLLAPSE_FILE`."""
    return {
        "verdict": collapse.verdict.level.word,
        "reasons": collapse.verdict.sentence,
        "stopped_at_step": collapse.verdict.step,
        "weights_of_step": collapse.healthy_step,
    }
