"""Hints on what would make a stage faster, which `lit_callbacks.PhaseSummary` prints after `fit`.

A hint returns one sentence, or `None` where it does not apply.
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer

from lit_callbacks import OTHER_PHASE, VALIDATION_PHASE, PhaseHint, PhaseReport
from lit_rlhf.modules.ppo import PPOModule
from lit_rlhf.modules.reward import RewardModule
from lit_rlhf.modules.sft import SFTModule
from lit_rlhf.modules.stage import StageModule
from lit_rlhf.modules.timing import GIB
from lit_rlhf.rewards import WeightedReward

SLOW = 0.15  # share of the time from which reward functions are too slow
LARGE = 0.3  # share of the time from which a phase is worth a hint
MOST = 0.5  # share of the time from which a phase dominates
CUT_OFF = 0.3  # share of responses that run to their limit
ROOM = 0.6  # share of the GPU's memory below which larger batches may fit


def device_memory(device: torch.device) -> float | None:
    """Memory of a GPU in GiB; `None` for other devices."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).total_memory / GIB


def unused_memory(report: PhaseReport, module: LightningModule) -> str | None:
    """The peak memory in words, if much of the GPU's was unused; else `None`."""
    total = device_memory(module.device)
    if total is None or report.peak is None or report.peak > ROOM * total:
        return None
    return f"peak memory is {report.peak:.0f} of {total:.0f} GiB"


def long_responses(report: PhaseReport, trainer: Trainer, module: LightningModule) -> str | None:
    """Rollouts dominate, and many responses run to their limit."""
    cut = float(trainer.callback_metrics.get("rollout/truncation_rate", 0.0))
    share = report.share("rollout")
    if not isinstance(module, PPOModule) or share < MOST or cut < CUT_OFF:
        return None
    return (
        f"rollout takes {share:.0%} of the time, and {cut:.0%} of the responses run to "
        f"sampling.max_new_tokens ({module.sampling.max_new_tokens}): lower it, or raise "
        "reward_shaping.missing_eos_penalty so that responses end"
    )


def small_rollout_batches(
    report: PhaseReport, trainer: Trainer, module: LightningModule
) -> str | None:
    """Rollouts dominate, and more responses could be in progress at a time."""
    if not isinstance(module, PPOModule):
        return None
    size, left = module.memory.rollout_batch_size, unused_memory(report, module)
    share = report.share("rollout")
    if share < MOST or size is None or left is None:
        return None
    return (
        f"rollout takes {share:.0%} of the time: raise memory.rollout_batch_size (now {size}); "
        f"{left}"
    )


def slow_functions(report: PhaseReport, trainer: Trainer, module: LightningModule) -> str | None:
    """Reward functions, rules and remote rewards are slow."""
    reward = getattr(module, "reward", None)
    if not isinstance(reward, WeightedReward):
        return None
    names = [spec.name for spec in reward.specs if not spec.is_model]
    share = sum(reward.seconds[name] for name in names) / max(report.seconds, 1e-9)
    if share < SLOW:
        return None
    slowest = max(names, key=lambda name: reward.seconds[name])
    return (
        f"reward functions take {share:.0%} of the time, one after the other, most of it "
        f"{slowest}: see whether it can be faster"
    )


def float32(report: PhaseReport, trainer: Trainer, module: LightningModule) -> str | None:
    """A GPU computes in float32 only."""
    if not isinstance(module, StageModule):
        return None
    plain = trainer.precision == "32-true" and module.network.dtype == "float32"
    if not plain or device_memory(module.device) is None:
        return None
    return "everything is computed in float32: add configs/overlays/bf16.yaml"


def needless_checkpointing(
    report: PhaseReport, trainer: Trainer, module: LightningModule
) -> str | None:
    """Activations are recomputed although there is memory for them."""
    left = unused_memory(report, module)
    if not isinstance(module, StageModule) or left is None:
        return None
    if not module.network.gradient_checkpointing:
        return None
    return (
        "gradient checkpointing costs about a third of the update: try without it "
        f"(network.gradient_checkpointing: false); {left}"
    )


def small_micro_batches(
    report: PhaseReport, trainer: Trainer, module: LightningModule
) -> str | None:
    """The update is split into small parts although there is memory for larger ones."""
    options: object
    match module:
        case PPOModule():
            prefix, options = "minibatches.", module.minibatches
        case SFTModule() | RewardModule():
            prefix, options = "", module
        case _:
            return None
    left, share = unused_memory(report, module), report.share("update")
    limits = [
        f"{prefix}{name} (now {limit})"
        for name in ("micro_batch_size", "micro_batch_tokens")
        if (limit := getattr(options, name)) is not None
    ]
    if share < LARGE or not limits or left is None:
        return None
    return f"update takes {share:.0%} of the time: raise {' and '.join(limits)}; {left}"


def long_validation(report: PhaseReport, trainer: Trainer, module: LightningModule) -> str | None:
    """Validation takes a large share of the time."""
    share = report.share(VALIDATION_PHASE)
    if share < LARGE:
        return None
    return (
        f"validation takes {share:.0%} of the time: raise trainer.val_check_interval, or lower "
        "trainer.limit_val_batches"
    )


def waiting(report: PhaseReport, trainer: Trainer, module: LightningModule) -> str | None:
    """A large share of the time is outside all phases."""
    share = report.share(OTHER_PHASE)
    if share < LARGE:
        return None
    return (
        f"{share:.0%} of the time is outside the phases, in data loading, logging, checkpoints and "
        "callbacks: raise data.num_workers, or log, save and sample less often"
    )


HINTS: tuple[PhaseHint, ...] = (
    long_responses,
    small_rollout_batches,
    slow_functions,
    float32,
    needless_checkpointing,
    small_micro_batches,
    long_validation,
    waiting,
)
"""All hints, in the order in which they are printed."""
