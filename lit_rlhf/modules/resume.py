"""Resuming a run: what a checkpoint holds besides weights, and which settings may change.

A run stores its settings in its checkpoints: its options as hyper-parameters, and the options of
data and Trainer, with checksums of what its files held, under `SETTINGS_KEY`. A run that resumes
compares its own with them. `CONSEQUENCES` says of each setting what a change means.
"""

import math
import random
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import yaml
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from lit_callbacks import count_resumed_epoch
from lit_callbacks.output import metrics_step
from lit_callbacks.trainer_attributes import log_interval
from lit_rlhf.data import DataSource, RecordDataModule
from lit_rlhf.files import code_versions
from lit_rlhf.forward import LanguageModel, Offloaded
from lit_rlhf.modules.option_names import (
    dotted_arguments,
    option_groups,
    option_names,
    plain_values,
)
from lit_rlhf.modules.options import OptimizerOptions
from lit_rlhf.modules.run_state import RunState, last_metrics
from lit_rlhf.modules.updates import TrainedNetwork

# keys of a checkpoint
SETTINGS_KEY = "resume_settings"
CONTRACT_KEY = "text_contract"
METRICS_KEY = "last_metrics"
LOGGED_KEY = "logged_batch"
VERSIONS_KEY = "versions"
RUN_KEY = "run"
VALUES_PER_TENSOR = 64
"""Values that the checksum of a frozen network takes of each of its tensors."""


class ConfiguredOptimizer(NamedTuple):
    """The configured settings of an optimizer and its schedule.

    Attributes:
        groups: Settings of each parameter group.
        peak_rates: The schedule's peak learning rate of each group.
    """

    groups: list[dict[str, Any]]
    peak_rates: list[float]


class Consequence(Enum):
    """What follows from a setting that differs from the checkpoint's."""

    APPLIES = "the configured value applies"
    NEEDS_CONSENT = "needs `--allow_changes`"
    REFUSED = "refused"


REMARKS: dict[str, dict[str, str]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text("utf-8")
)
"""Why, or from when, a change has its consequence, by consequence and by names of settings."""

CONSEQUENCES = {
    name: Consequence[change.upper()]
    for change, remarks in REMARKS.items()
    for names in remarks
    for name in names.split(", ")
}
"""Consequence of a change by name of a setting or group; the longest name that fits wins."""


class ChangedRunError(ValueError):
    """A run would resume from a checkpoint of another run."""


def find_consequence(name: str) -> Consequence | None:
    """Look up what a change of the setting `name` means; `None`: a subclass has added it."""
    return CONSEQUENCES.get(name, CONSEQUENCES.get(name.partition(".")[0]))


def describe_run(
    trainer: Trainer, data: LightningDataModule | None, checksums: Mapping[str, object]
) -> dict[str, Any]:
    """Settings of data and Trainer, and checksums of inputs and examples, as plain data.

    Args:
        trainer: The trainer of the run.
        data: Its datamodule, if it has one.
        checksums: Checksums of its inputs, by name.
    """
    settings = {"trainer.precision": str(trainer.precision), **checksums}
    if not isinstance(data, RecordDataModule):
        return settings
    options = {name: data_option(data, name) for name in option_names(type(data))}
    batch_size = options.pop("batch_size", None)
    if batch_size is None or options.get("tokens_per_batch") is not None:
        batches = {"number of ranks": trainer.world_size}
    else:
        batches = {"batch size on all ranks": batch_size * trainer.world_size}
    # Never all at once: examples of the cache are in memory only while they are read.
    examples = chain.from_iterable(
        part_examples
        for part, part_examples in data.examples.items()
        if part not in ("val", "test")
    )
    named = {f"data.{name}": value for name, value in options.items()}
    return {**settings, **named, **batches, "training examples": checksum(tensors_in(examples))}


def data_option(data: LightningDataModule, name: str) -> Any:  # noqa: ANN401 - of any type
    """An option of a datamodule as plain data."""
    part = name.removesuffix("_sources")
    sources = getattr(data, "sources", {})
    option = sources[part] if part in sources else getattr(data, name, None)
    if isinstance(option, list):
        return [v.settings() if isinstance(v, DataSource) else v for v in option]
    # a tokenizer object
    return option if isinstance(option, str | int | float | None) else type(option).__name__


def tensors_in(values: Iterable[Any]) -> Iterable[Tensor]:
    """The tensors in nested tuples and lists, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors_in(value)


def checksum(tensors: Iterable[Tensor]) -> int:
    """CRC-32 of the bytes of tensors on the CPU."""
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(tensor.numpy().tobytes(), crc)
    return crc


def weights_checksum(network: LanguageModel | Offloaded) -> int:
    """CRC-32 of a sample of each tensor of a network: all of a large one would take minutes."""
    model = network.network if isinstance(network, Offloaded) else network
    sample = []
    for tensor in model.state_dict().values():
        values = tensor.detach().flatten()
        step = max(len(values) // VALUES_PER_TENSOR, 1)
        sample.append(values[::step].cpu().double())
    return checksum(sample)


def find_changes(
    module: LightningModule, checkpoint: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Values in a checkpoint and now of the settings that differ, in the checkpoint's order.

    Skips settings of other versions. An old checkpoint holds only options; then only these are
    compared.

    Args:
        module: The module of the run.
        checkpoint: The checkpoint.
        settings: Settings of the run now, see `describe_run`.
    """
    options = checkpoint.get(module.CHECKPOINT_HYPER_PARAMS_KEY, {})
    # A tuple equals a list, whichever a checkpoint was written with.
    saved = plain_values({**dotted_arguments(options), **checkpoint.get(SETTINGS_KEY, {})})
    now = plain_values({**dotted_arguments(module.hparams), **settings})
    return {
        name: (value, now[name])
        for name, value in saved.items()
        if name in now and not name.startswith("_") and value != now[name]
    }


def describe_changes(changes: Mapping[str, tuple[Any, Any]]) -> dict[str, str]:
    """`name: saved -> configured` of each setting, by its name."""
    return {name: f"{name}: {saved!r} -> {now!r}" for name, (saved, now) in changes.items()}


def check_changes(changes: Mapping[str, tuple[Any, Any]], allowed: bool, writer: str) -> None:
    """Refuse changes that make a run another one, unless they only need consent and have it.

    Args:
        changes: Values in the checkpoint and now, by setting.
        allowed: Whether there is consent.
        writer: The version that wrote the checkpoint.
    """
    described = describe_changes(changes)
    consequences = {name: find_consequence(name) for name in changes}
    impossible = [described[n] for n, then in consequences.items() if then is Consequence.REFUSED]
    if impossible:
        raise ChangedRunError(
            "the checkpoint's weights do not fit the configured network; expected the settings of "
            f"the checkpoint, got {'; '.join(impossible)}"
        )
    others = [described[n] for n, then in consequences.items() if then is Consequence.NEEDS_CONSENT]
    if others and not allowed:
        listed = "".join(f"\n  {change}" for change in others)
        raise ChangedRunError(
            f"the checkpoint (written by {writer}) is of another run (setting: there -> here):"
            f"{listed}\nResume with the "
            "checkpoint's settings, or allow the changes: --allow_changes on the command line, "
            "module.allow_changes = True in Python"
        )


class Resume(Callback):
    """Keeps in checkpoints what an exact resume needs, and restores it.

    A callback for the hooks of a fit; `state` and `load` are called by the module, whose weights
    are loaded before a callback sees a checkpoint.

    Attributes:
        saved_metrics: The last metrics of the checkpoint that was loaded.
    """

    def __init__(self) -> None:
        self.saved_metrics: dict[str, float] = {}
        self._settings: dict[str, Any] | None = None  # the run's, for its checkpoints
        self._changes: dict[str, tuple[Any, Any]] = {}  # since the checkpoint
        self._configured: list[ConfiguredOptimizer] = []
        self._random_state: dict[str, Any] = {}
        self._loader_states: list[dict[str, Any]] = []
        self._logged_batch: dict[str, Any] = {}

    def changed_names(self) -> set[str]:
        """Dotted names of the settings that differ from the checkpoint's."""
        return set(self._changes)

    def state(self, module: RunState) -> dict[str, Any]:
        """Random generators, text contract, settings and last metrics for a checkpoint."""
        contract = None if module.encoder is None else asdict(module.encoder.contract)
        return {
            "random_state": random_state(module.device),
            SETTINGS_KEY: self._run_settings(module),
            METRICS_KEY: last_metrics(module.trainer, self.saved_metrics),
            LOGGED_KEY: logged_batch(module.trainer),
            VERSIONS_KEY: code_versions(),
            RUN_KEY: run_id(module),
            **({} if contract is None else {CONTRACT_KEY: contract}),
        }

    def save(self, module: RunState, checkpoint: dict[str, Any]) -> None:
        """Add to a checkpoint what an exact resume needs, a validation that is due among it."""
        checkpoint |= self.state(module)
        trainer = module.trainer
        loops = checkpoint.get("loops")
        if loops and trainer.training and is_validation_due(trainer, is_last=module.is_complete):
            announce_validation(loops["fit_loop"])

    def load(self, module: RunState, checkpoint: Mapping[str, Any]) -> None:
        """Keep the random state and the position in the data until training starts.

        Refuses a checkpoint of another run, unless `module.allow_changes` is on.
        """
        if self._is_resuming(module):
            for part in ("optimizer_states", "loops"):  # Lightning would go on without
                if not checkpoint.get(part):
                    raise ValueError(
                        f"checkpoint: expected one to resume from, got one without {part}. Start a "
                        "new run from its model (lit_rlhf export)"
                    )
            for key in (SETTINGS_KEY, module.CHECKPOINT_HYPER_PARAMS_KEY):
                if key not in checkpoint:
                    rank_zero_warn(f"the checkpoint has no {key}, so their changes cannot be told")
            self._changes = find_changes(module, checkpoint, self._run_settings(module))
            version = checkpoint.get(VERSIONS_KEY, {}).get("lit-rlhf", "before 0.1.0")
            check_changes(self._changes, module.allow_changes, f"lit_rlhf {version}")
        self.saved_metrics = checkpoint.get(METRICS_KEY, {})
        self._random_state = checkpoint.get("random_state", {})
        self._logged_batch = checkpoint.get(LOGGED_KEY, {})
        fit_loop = checkpoint.get("loops", {}).get("fit_loop", {})
        self._loader_states = fit_loop.get("state_dict", {}).get("combined_loader", [])

    def _is_resuming(self, module: RunState) -> bool:
        """Whether a checkpoint is loaded in order to resume a fit.

        `load_from_checkpoint`, evaluation, callbacks and the Tuner load one, too.
        """
        try:
            trainer = module.trainer
        except RuntimeError:  # there is none
            return False
        return trainer.state.fn == TrainerFn.FITTING and not module.has_trained

    def _run_settings(self, module: RunState) -> dict[str, Any]:
        """Settings of data and Trainer that a run which resumes is compared with, as plain data."""
        trainer = module.trainer
        settings = self._settings or describe_run(
            trainer, module.datamodule, module.input_checksums
        )
        # Only during a fit are the examples training's.
        self._settings = settings if trainer.state.fn == TrainerFn.FITTING else None
        return settings

    def checksums(self, module: RunState) -> dict[str, Any]:
        """Checksums of what the run reads, by name."""
        names = {*module.input_checksums, "training examples"}
        settings = self._run_settings(module)
        return {name: value for name, value in settings.items() if name in names}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the configured learning rates, which a checkpoint's state replaces later."""
        cast(RunState, pl_module).has_trained = False  # trials of a Tuner end before this hook
        self._settings = None  # an earlier fit's
        self._configured = [
            ConfiguredOptimizer(
                groups=[
                    {key: value for key, value in group.items() if key != "params"}
                    for group in network.optimizer.param_groups
                ],
                peak_rates=[float(rate) for rate in network.schedule.base_lrs],
            )
            for network in cast(RunState, pl_module).trained_networks().values()
        ]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore random state and position in the data from a checkpoint, and apply changes.

        The metrics of the checkpoint's batch are logged again: a run that was killed as soon as the
        checkpoint was saved has not logged them.

        Lightning (2.6.6) restores the position when it sets up the loader. But a schedule that asks
        for `trainer.estimated_stepping_batches` has it set up before the checkpoint is read.
        """
        check_validation_interval(trainer)
        loader: Any = trainer.train_dataloader
        if len(self._loader_states) == 1 and hasattr(loader, "load_state_dict"):
            loader.load_state_dict(self._loader_states[0])
        count_resumed_epoch(trainer)
        module = cast(RunState, pl_module)
        self._apply_changes(module)
        restore_random_state(self._random_state, pl_module.device)
        if self._logged_batch:
            for logger in trainer.loggers:
                logger.log_metrics(**self._logged_batch)
        self._loader_states = []
        self._random_state = {}
        self._logged_batch = {}
        module.has_trained = True

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the random state: rewards may draw from it, and a resumed run may not validate."""
        self._training_state = random_state(pl_module.device)
        # Lightning (2.6.6) counts the batch twice in which a validation was interrupted; each later
        # checkpoint would seem to be from within a validation.
        trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.reset_on_restart()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the random state of training, before a checkpoint is saved."""
        restore_random_state(self._training_state, pl_module.device)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Tell of the changes, which have an effect from the first batch.

        Args:
            trainer: The trainer of the run.
            pl_module: Its module.
            batch: The batch.
            batch_idx: Its number.
        """
        for change in describe_changes(self._changes).values():
            rank_zero_info(f"resumed with another value, {change}")
        self._changes = {}

    def unused_changes(self) -> dict[str, Any]:
        """Values in the checkpoint of settings that differ, as long as no batch was trained."""
        return {name: saved for name, (saved, _) in self._changes.items()}

    def _apply_changes(self, module: RunState) -> None:
        """Put configured values in place of those that a checkpoint has restored.

        Options that the module reads from its attributes are the configured ones anyway.
        """
        names = self.changed_names()
        groups = [
            name
            for name, default in option_groups(type(module)).items()
            if isinstance(default, OptimizerOptions)
        ]
        trained = [*module.trained_networks().values()]
        # a critic on the policy's trunk has no own optimizer
        networks = zip(groups[: len(trained)], trained, self._configured, strict=True)
        for group, network, configured in networks:
            fields = {name.removeprefix(f"{group}.") for name in names if name.startswith(group)}
            if fields:
                apply_optimizer_settings(network, configured, fields)


def logged_batch(trainer: Trainer) -> dict[str, Any]:
    """What Lightning logs of a batch as soon as its callbacks have seen its end.

    Returns:
        The arguments of `Logger.log_metrics`; empty if Lightning logs nothing, or has logged it.
    """
    every = log_interval(trainer)
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.total  # declared as its base class
    is_logged = batches.completed == batches.processed
    # 0: Lightning logs no batch
    if is_logged or every == 0 or (batches.ready % every and not trainer.should_stop):
        return {}
    logged = {
        key: float(value)
        for key, value in trainer.logged_metrics.items()
        if not key.startswith("val/")
    }
    step = metrics_step(trainer)
    if logged.pop("step", None) is None:
        logged["epoch"] = trainer.current_epoch
    return {"metrics": logged, "step": step}


def is_validation_due(trainer: Trainer, is_last: bool) -> bool:
    """Whether Lightning validates after the current batch, by the number of batches.

    Args:
        trainer: The trainer of the run.
        is_last: Whether the module ends the run after this batch, at which Lightning validates.
    """
    fit_loop = trainer.fit_loop
    every_n_epochs = trainer.check_val_every_n_epoch
    n_batches = fit_loop.batch_idx + 1
    if every_n_epochs is None:  # the interval is over all epochs
        n_batches = fit_loop.total_batch_idx + 1
    elif (trainer.current_epoch + 1) % every_n_epochs:
        return False
    # `None`: by time; infinite: at the end of data without a length
    interval = trainer.val_check_batch
    is_at_interval = interval is not None and n_batches % interval == 0
    is_at_end = interval == math.inf and fit_loop.epoch_loop.batch_progress.is_last_batch
    return trainer.enable_validation and (is_at_interval or is_at_end or is_last)


def check_validation_interval(trainer: Trainer) -> None:
    """Refuse to validate by time on several ranks, which would wait for each other forever.

    Each would decide by its own clock whether a validation is due (Lightning 2.6.6).
    """
    is_by_time = trainer.enable_validation and trainer.val_check_batch is None
    if is_by_time and trainer.world_size > 1:
        raise ValueError(
            "trainer.val_check_interval: expected a number of batches, or a share of an epoch, "
            f"with {trainer.world_size} processes, got a time: their clocks differ"
        )


def announce_validation(fit_loop: dict[str, Any]) -> None:
    """Have a run that resumes from a checkpoint begin with the validation after its last batch.

    Lightning (2.6.6) saves at the end of a batch a state from which it goes on behind the
    validation, at the end of an epoch even behind the hooks of that end. From a state within the
    first batch of a validation it validates, and then ends the epoch.

    Args:
        fit_loop: State of the fit loop in the checkpoint; is changed.
    """
    batches = fit_loop["epoch_loop.batch_progress"]
    if batches["total"]["completed"] != batches["total"]["processed"] - 1:
        return  # not saved at the end of a batch
    for count in (batches["total"], batches["current"]):
        count["completed"] = count["processed"]
    validated = fit_loop["epoch_loop.val_loop.batch_progress"]
    n_before = validated["total"]["completed"]
    for name, completed in (("total", n_before), ("current", 0)):
        validated[name] = {
            "ready": completed + 1,
            "started": completed + 1,
            "processed": completed,
            "completed": completed,
        }


def end_with_validation(trainer: Trainer) -> bool:
    """Have a resumed run that has no batch left to train make the validation that is due.

    Returns:
        Whether one is due.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    is_due: bool = epoch_loop.val_loop.restarted_mid_evaluation
    if is_due:
        # To Lightning (2.6.6) it then is the one at the end of data without a length.
        trainer.val_check_batch = math.inf
        epoch_loop.batch_progress.is_last_batch = True
    return is_due


def run_id(module: RunState) -> str:
    """Identity of a run among others in a folder of checkpoints: its folder for the model."""
    return str(module.finished_dir.resolve())


def fill_buffers(module: nn.Module, saved: dict[str, Any]) -> dict[str, Any]:
    """Add buffers that an older version's state dict lacks, with their start values."""
    # by identity, since a module may save them under other names
    buffers = {id(buffer) for buffer in module.buffers()}
    added = {
        name: value.detach()
        for name, value in module.state_dict(keep_vars=True).items()
        if id(value) in buffers and name not in saved
    }
    if added:
        rank_zero_info(
            f"the checkpoint was written without {', '.join(added)}: starting from "
            f"{', '.join(str(value.tolist()) for value in added.values())}"
        )
    return {**saved, **added}


def apply_optimizer_settings(
    network: TrainedNetwork, configured: ConfiguredOptimizer, fields: set[str]
) -> None:
    """Set configured values again, after a checkpoint's state has replaced them.

    The schedule stays at its position. Peak learning rates that a callback has lowered are kept
    unless `learning_rate` has changed.

    Args:
        network: The network's optimizer and schedule, with the checkpoint's state.
        configured: Their configured settings.
        fields: Fields of `OptimizerOptions` that have changed.
    """
    optimizer = network.optimizer
    schedule = network.schedule
    rates = {"lr", "initial_lr"}
    for group, settings in zip(optimizer.param_groups, configured.groups, strict=True):
        group |= {key: value for key, value in settings.items() if key not in rates}
        if "learning_rate" in fields:
            group["initial_lr"] = settings["initial_lr"]
    if not isinstance(schedule, LambdaLR):  # a subclass may build any
        return
    bases = configured.peak_rates if "learning_rate" in fields else schedule.base_lrs
    factors = [factor(schedule.last_epoch) for factor in schedule.lr_lambdas]
    lrs = [base * factor for base, factor in zip(bases, factors, strict=True)]
    schedule.load_state_dict({**schedule.state_dict(), "base_lrs": [*bases], "_last_lr": lrs})
    for group, lr in zip(optimizer.param_groups, lrs, strict=True):
        group["lr"] = lr


def random_state(device: torch.device) -> dict[str, Any]:
    """States of the global random generators of torch (CPU and `device`), NumPy and Python.

    Dropout draws from torch's; a reward function may draw from any of them.
    """
    legacy: Any = np.random.get_state()  # noqa: NPY002
    name, keys, *position_and_gaussian = legacy
    state = {
        "cpu": torch.get_rng_state(),
        "python": random.getstate(),
        # a plain tensor: `weights_only` does not allow arrays
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *position_and_gaussian),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Set the global random generators, including `device`'s, from a result of `random_state`."""
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if "python" in state:
        random.setstate(state["python"])
    if "numpy" in state:
        name, keys, *position_and_gaussian = state["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *position_and_gaussian))  # noqa: NPY002
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
