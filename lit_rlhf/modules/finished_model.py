"""The finished model of a run: which weights it has, and its card."""

import math
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lit_callbacks import HELD_OUT_KEY, find_collapse, log_text, logger_step
from lit_rlhf.data import DataSource, RecordDataModule
from lit_rlhf.files import write_manifest
from lit_rlhf.finite import require_finite_weights
from lit_rlhf.models import ModelCardInfo, replace_folder
from lit_rlhf.modules.held_out import describe_held_out
from lit_rlhf.modules.option_names import dotted_arguments
from lit_rlhf.modules.resume import Resume
from lit_rlhf.modules.run_folders import RunFolders
from lit_rlhf.modules.run_state import BestCheckpoint, RunState, last_metrics
from lit_rlhf.stats import fail_together


def save_finished(module: RunState, resume: Resume, folders: RunFolders) -> None:
    """Save the finished networks to `module.finished_dir`, on rank 0 and all at once.

    If a detector has ended the run, the last healthy weights are saved, and the card says so;
    without healthy weights nothing is. With `module.finished` best, the weights of the best
    checkpoint are saved.

    Args:
        module: The module of the run.
        resume: What it resumed from.
        folders: Its folders.
    """
    folder = module.finished_dir
    trainer = module.trainer
    if unused := resume.unused_changes():
        rank_zero_info(
            f"{module.stage}: no batch was left to train, so that {', '.join(unused)} had no effect"
        )
    module.collapse = find_collapse(trainer)
    module.best = None
    if module.collapse is not None:
        if module.collapse.checkpoint is None:
            rank_zero_warn(
                f"{module.stage}: stopped as {module.collapse.verdict.level.word}, and no healthy "
                f"weights were kept: {folder} is not written. With "
                "trainer.enable_checkpointing: true, StopTraining keeps them"
            )
            return
        load_weights(module, module.collapse.checkpoint)
    else:
        module.guard.check_end(trainer)
        if module.finished == "best":
            module.best = load_best(module)
    require_finite_weights(module, module.stage, str(folder))
    # the other ranks only take part in gathering networks, and write nothing
    target = replace_folder(folder) if trainer.is_global_zero else nullcontext(folder)
    action = f"save the model to {folder}"
    with fail_together(action), ExitStack() as stack:
        with fail_together(action):  # before any rank waits for another's weights
            if not all(weight.requires_grad for weight in module.parameters()):
                folders.check_mapped()
            partial = stack.enter_context(target)
        module.write_finished(partial)
        if module.collapse is None and trainer.is_global_zero:
            write_manifest(partial, {"command": module.command})
    report_held_out(module, resume)
    rank_zero_info(f"{module.stage}: saved the model to {folder}")


def load_weights(module: RunState, path: str | Path) -> dict[str, Any]:
    """Load weights of a run that has ended, and the metrics for their card.

    Args:
        module: The module of the run.
        path: A checkpoint of the run.

    Returns:
        The checkpoint's content.
    """
    module.has_trained = True  # a run from its very end does not train, and resumes nothing now
    strategy = module.trainer.strategy
    content = strategy.load_checkpoint(path, weights_only=True)
    module.on_load_checkpoint(content)
    strategy.load_model_state_dict(content, strict=module.strict_loading)
    return content


def find_best_keeper(trainer: Trainer) -> ModelCheckpoint:
    """Find the callback that keeps the best checkpoint of a run.

    Args:
        trainer: The trainer of the run.

    Raises:
        ValueError: If not exactly one callback does.
    """
    keepers = [
        callback
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint) and callback.monitor and callback.save_top_k
    ]
    if len(keepers) != 1:
        names = [f"{type(keeper).__name__} of {keeper.monitor}" for keeper in keepers]
        raise ValueError(
            "finished: expected one ModelCheckpoint in trainer.callbacks that monitors a metric, "
            f"with best, got {' and '.join(names) or 'none'}"
        )
    return keepers[0]


def load_best(module: RunState) -> BestCheckpoint | None:
    """Load the best checkpoint of a run; leave the last weights if none was kept.

    Args:
        module: The module of the run.

    Returns:
        What was loaded; `None` if no checkpoint was kept.
    """
    keeper = find_best_keeper(module.trainer)
    if not keeper.best_model_path:
        rank_zero_warn(
            f"{module.stage}: {type(keeper).__name__} kept no checkpoint by {keeper.monitor}, so "
            "that the finished model has the last weights"
        )
        return None
    content = load_weights(module, keeper.best_model_path)
    score = keeper.best_model_score
    best = BestCheckpoint(
        monitor=str(keeper.monitor),
        score=math.nan if score is None else float(score),
        updates=content["global_step"],
    )
    rank_zero_info(
        f"{module.stage}: the finished model is the best checkpoint, {keeper.best_model_path}, "
        f"with {best.monitor} {best.score:.4g}"
    )
    return best


def report_held_out(module: RunState, resume: Resume) -> None:
    """Tell terminal and loggers how good the finished model is on held-out data.

    Args:
        module: The module of the run.
        resume: What it resumed from.
    """
    trainer = module.trainer
    line = describe_held_out(module.stage, finished_metrics(module, resume), trainer)
    if line is not None:
        rank_zero_info(f"{module.stage}, held out: {line}")
        log_text(trainer, HELD_OUT_KEY, line, logger_step(trainer))
    elif (
        isinstance(module.datamodule, RecordDataModule)
        and "val" not in module.datamodule.examples
        and trainer.limit_val_batches
    ):
        rank_zero_info(
            f"{module.stage}: no data were held out, so that nothing says how good the model is; "
            "data.val_fraction: 0.05 holds some out"
        )


def finished_metrics(module: RunState, resume: Resume) -> dict[str, float]:
    """The last metrics of the finished weights.

    Args:
        module: The module of the run.
        resume: What it resumed from.
    """
    # the weights are older than the last metrics
    if module.collapse is not None or module.best is not None:
        return resume.saved_metrics
    return last_metrics(module.trainer, resume.saved_metrics)


def model_card(module: RunState, resume: Resume, folders: RunFolders) -> ModelCardInfo:
    """The model card of a run: its options, data and final metrics.

    Args:
        module: The module of the run.
        resume: What it resumed from.
        folders: Its folders.
    """
    collapse = module.collapse
    metrics = finished_metrics(module, resume)
    ended = None
    if collapse is not None:
        ended = {
            "verdict": collapse.verdict.level.word,
            "reasons": collapse.verdict.sentence,
            "stopped_at_step": collapse.verdict.step,
            "weights_of_step": collapse.healthy_step,
        }
    best = module.best
    updates = module.trainer.global_step if best is None else best.updates
    # Settings that differ from the checkpoint's had no effect if no batch was left to train.
    unused = resume.unused_changes()
    data_differ = any(name.startswith("data.") for name in unused)
    sources = [] if data_differ else training_sources(module.datamodule)
    return ModelCardInfo(
        stage=module.stage,
        base_model=module.model_path,
        config={**dotted_arguments(module.hparams), **unused},
        metrics=metrics,
        held_out=describe_held_out(module.stage, metrics, module.trainer),
        inputs=folders.hashes | resume.checksums(module),
        updates=updates if collapse is None else None,
        collapse=ended,
        best=None if best is None else best._asdict(),
        datasets=[source.path for source in sources if source.is_remote],
        files=[source.label for source in sources if not source.is_remote],
    )


def training_sources(datamodule: LightningDataModule | None) -> list[DataSource]:
    """Training data of a datamodule; empty for a user's class, whose data are not known."""
    if not isinstance(datamodule, RecordDataModule):
        return []
    return [
        source
        for part, sources in datamodule.sources.items()
        if part not in ("val", "test")
        for source in sources
    ]
