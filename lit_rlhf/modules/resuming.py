"""Settings that change between a checkpoint and the run that resumes from it.

A run stores its settings in its checkpoints: its options as hyper-parameters, and those of data and
Trainer, with checksums of what its files held, under `SETTINGS_KEY`. A run that resumes compares
its own with them. `RULES` says of each setting what a change means.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lit_rlhf.data import DataSource, RecordDataModule
from lit_rlhf.forward import LanguageModel, Offloaded
from lit_rlhf.modules.option_names import dotted_arguments, option_names

SETTINGS_KEY = "resume_settings"  # of a checkpoint
VALUES_PER_TENSOR = 64  # of a frozen network, for its checksum


class Change(Enum):
    """What happens if a setting is another one than in the checkpoint."""

    APPLIES = "the configured value applies"
    NEEDS_CONSENT = "needs `--allow_changes`"
    REFUSED = "refused"


class Rule(NamedTuple):
    """What a change of some settings means.

    Attributes:
        names: Names of settings, or of groups of them.
        change: What happens.
        remark: Why, or from when.
    """

    names: tuple[str, ...]
    change: Change
    remark: str


RULES = (
    Rule(
        ("optimizer", "policy_optimizer", "critic_optimizer"),
        Change.APPLIES,
        "from the first update; schedules stay at their position",
    ),
    Rule(
        ("reward_shaping",),
        Change.APPLIES,
        "a new `kl_coef` replaces one that has adapted; an unchanged one goes on from there",
    ),
    Rule(
        ("sampling", "responses_per_prompt", "advantages", "loss", "minibatches"),
        Change.APPLIES,
        "from the first batch",
    ),
    Rule(("max_iterations",), Change.APPLIES, "schedules are planned anew, as with `max_epochs`"),
    Rule(
        ("memory", "network", "micro_batch_size", "micro_batch_tokens", "data.num_workers"),
        Change.APPLIES,
        "the same numbers within rounding",
    ),
    Rule(
        (
            "output_dir",
            "gold_reward",
            "reward_timeout",
            "sampled_texts",
            "max_skipped_in_a_row",
            "data.val_sources",
            "data.test_sources",
        ),
        Change.APPLIES,
        "no influence on what is learned",
    ),
    Rule(
        ("network.lora_rank", "network.lora_targets", "network.load_in_4bit"),
        Change.REFUSED,
        "the weights would not fit",
    ),
    Rule(
        ("model_path", "weights of the reference"),
        Change.NEEDS_CONSENT,
        "another reference, tokenizer or start",
    ),
    Rule(("rewards", "weights of the reward models"), Change.NEEDS_CONSENT, "another objective"),
    Rule(("lm_coef",), Change.NEEDS_CONSENT, "another objective; 0 has no output layer to train"),
    Rule(
        ("critic_init", "head_seed", "critic_pretraining"),
        Change.NEEDS_CONSENT,
        "acts at the start of a run only",
    ),
    Rule(("seed",), Change.NEEDS_CONSENT, "other random numbers from here on"),
    Rule(
        (
            "trainer.precision",
            "network.dtype",
            "network.lora_alpha",
            "network.lora_dropout",
            "memory.frozen_dtype",
        ),
        Change.NEEDS_CONSENT,
        "other numbers for the same weights",
    ),
    Rule(("data",), Change.NEEDS_CONSENT, "other examples, or another order of them"),
    Rule(("training examples",), Change.NEEDS_CONSENT, "the same files with another content"),
    Rule(
        ("batch size on all ranks",),
        Change.NEEDS_CONSENT,
        "the position in the data counts batches; another number of ranks alone is no change if "
        "`data.batch_size` makes up for it",
    ),
    Rule(
        ("number of ranks",),
        Change.NEEDS_CONSENT,
        "compared with `data.tokens_per_batch` only, where a batch is a rank's",
    ),
)
"""What a change of each setting means; the longest name that fits wins."""


class ChangedSetting(NamedTuple):
    """A setting with its values in the checkpoint and now."""

    name: str
    saved: Any
    configured: Any

    def __str__(self) -> str:
        """`name: saved -> configured`."""
        return f"{self.name}: {self.saved!r} -> {self.configured!r}"


class ChangedRunError(ValueError):
    """A run would resume from a checkpoint of another run."""


def rule_of(name: str) -> Rule | None:
    """The rule for a setting; `None` for an option that a subclass has added."""
    group = name.partition(".")[0]
    for candidate in (name, group):
        for rule in RULES:
            if candidate in rule.names:
                return rule
    return None


def describe_run(
    trainer: Trainer, data: LightningDataModule | None, checksums: Mapping[str, object]
) -> dict[str, Any]:
    """Settings of data and Trainer, and checksums of the inputs, as plain data.

    Args:
        trainer: A Trainer that has set up the data.
        data: Its datamodule, if there is one.
        checksums: Checksums of the module's own inputs by name.
    """
    return {
        "trainer.precision": str(trainer.precision),
        **checksums,
        **(describe_data(data, trainer) if isinstance(data, RecordDataModule) else {}),
    }


def describe_data(data: RecordDataModule, trainer: Trainer) -> dict[str, Any]:
    """Options of a datamodule by dotted names, its batches, and a checksum of its examples."""
    options = {name: data_option(data, name) for name in option_names(type(data))}
    size, ranks = options.pop("batch_size", None), trainer.world_size
    batches = (
        {"number of ranks": ranks}
        if size is None or options.get("tokens_per_batch") is not None
        else {"batch size on all ranks": size * ranks}
    )
    # never all at once: those of the cache are in memory only while they are read
    examples = chain(data.examples.get("train", []), getattr(data, "ptx", []))
    return {
        **{f"data.{name}": value for name, value in options.items()},
        **batches,
        "training examples": checksum(tensors_in(examples)),
    }


def data_option(data: LightningDataModule, name: str) -> Any:  # noqa: ANN401 - of any type
    """An option of a datamodule as plain data."""
    part = name.removesuffix("_sources")
    sources = getattr(data, "sources", {})
    value = sources[part] if part in sources else getattr(data, name, None)
    if isinstance(value, list):
        return [v.settings() if isinstance(v, DataSource) else v for v in value]
    # a tokenizer object
    return value if isinstance(value, str | int | float | None) else type(value).__name__


def tensors_in(values: Iterable[Any]) -> Iterable[Tensor]:
    """The tensors in nested tuples and lists, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors_in(value)


def checksum(tensors: Iterable[Tensor]) -> int:
    """CRC-32 of the bytes of tensors on the CPU."""
    value = 0
    for tensor in tensors:
        value = zlib.crc32(tensor.numpy().tobytes(), value)
    return value


def weights_checksum(network: LanguageModel | Offloaded) -> int:
    """CRC-32 of a sample of each tensor of a network, which tells trained networks apart.

    All values of a large network would take minutes.
    """
    model = network.network if isinstance(network, Offloaded) else network
    sample = []
    for tensor in model.state_dict().values():
        values = tensor.detach().flatten()
        step = max(len(values) // VALUES_PER_TENSOR, 1)
        sample.append(values[::step].cpu().double())
    return checksum(sample)


def find_changes(
    module: LightningModule, checkpoint: Mapping[str, Any], settings: Mapping[str, Any]
) -> list[ChangedSetting]:
    """Settings that differ between a checkpoint and a run, in the order of the checkpoint.

    Settings that either lacks are left out: those of other versions, and all but the options in a
    checkpoint that holds no more.

    Args:
        module: The module that resumes.
        checkpoint: Lightning's checkpoint.
        settings: What `describe_run` says about the run now.
    """
    options = checkpoint.get(module.CHECKPOINT_HYPER_PARAMS_KEY, {})
    saved = plain({**dotted_arguments(options), **checkpoint.get(SETTINGS_KEY, {})})
    now = plain({**dotted_arguments(module.hparams), **settings})
    return [
        ChangedSetting(name, value, now[name])
        for name, value in saved.items()
        if name in now and not name.startswith("_") and value != now[name]
    ]


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as JSON has them: a tuple equals a list, whichever a checkpoint was written with."""
    result: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return result


def check_changes(changes: Iterable[ChangedSetting], allowed: bool) -> None:
    """Refuse changes that make a run another one.

    Args:
        changes: Settings that differ from those of the checkpoint.
        allowed: Whether the user allows changes that need consent.

    Raises:
        ChangedRunError: If there is one that is refused, or that needs consent and has none. The
            error lists them.
    """
    rules = [(change, rule_of(change.name)) for change in changes]
    impossible = [c for c, rule in rules if rule and rule.change is Change.REFUSED]
    if impossible:
        raise ChangedRunError(
            "the checkpoint's weights do not fit the configured network; expected the settings of "
            f"the checkpoint, got {'; '.join(map(str, impossible))}"
        )
    others = [c for c, rule in rules if rule and rule.change is Change.NEEDS_CONSENT]
    if others and not allowed:
        listed = "".join(f"\n  {change}" for change in others)
        raise ChangedRunError(
            f"the checkpoint is of another run (setting: there -> here):{listed}\nResume with the "
            "checkpoint's settings, or allow the changes: --allow_changes on the command line, "
            "module.allow_changes = True in Python"
        )


class OptimizerSettings(NamedTuple):
    """Settings of an optimizer and its schedule as they are configured, before a resume.

    Attributes:
        groups: Settings of the parameter groups.
        base_lrs: Peak learning rates of the groups.
    """

    groups: list[dict[str, Any]]
    base_lrs: list[float]


def optimizer_settings(
    optimizer: Optimizer | LightningOptimizer, schedule: LRScheduler
) -> OptimizerSettings:
    """The settings of an optimizer and its schedule now."""
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return OptimizerSettings(groups, [float(rate) for rate in schedule.base_lrs])


def apply_optimizer_settings(
    optimizer: Optimizer | LightningOptimizer,
    schedule: LRScheduler,
    configured: OptimizerSettings,
    fields: set[str],
) -> None:
    """Set what is configured, after a checkpoint's state has replaced it.

    The schedule stays at its position. Peak learning rates that a callback has lowered are kept
    unless `learning_rate` has changed.

    Args:
        optimizer: The optimizer, with the checkpoint's state.
        schedule: Its schedule, with the checkpoint's state.
        configured: What both had before.
        fields: Fields of `OptimizerOptions` that have changed.
    """
    rates = {"lr", "initial_lr"}
    for group, settings in zip(optimizer.param_groups, configured.groups, strict=True):
        group |= {key: value for key, value in settings.items() if key not in rates}
        if "learning_rate" in fields:
            group["initial_lr"] = settings["initial_lr"]
    if not isinstance(schedule, LambdaLR):  # a subclass may build any
        return
    bases = configured.base_lrs if "learning_rate" in fields else schedule.base_lrs
    factors = [factor(schedule.last_epoch) for factor in schedule.lr_lambdas]
    lrs = [base * factor for base, factor in zip(bases, factors, strict=True)]
    schedule.load_state_dict({**schedule.state_dict(), "base_lrs": [*bases], "_last_lr": lrs})
    for group, lr in zip(optimizer.param_groups, lrs, strict=True):
        group["lr"] = lr
