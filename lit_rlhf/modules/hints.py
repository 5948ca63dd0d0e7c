"""What would make a stage faster, in sentences at the end of fit (`lit_callbacks.PhaseSummary`)."""

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

SLOW = 0.15  # share of the time that reward functions should stay below
LARGE = 0.3  # share of the time from which a phase is worth a word
MOST = 0.5  # share from which it is what to look at first
CUT_OFF = 0.3  # share of responses that run to their limit
ROOM = 0.6  # share of the GPU's memory below which a phase may well take more


def device_memory(device: torch.device) -> float | None:
    """Memory of a GPU in GiB; `None` for other devices."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).total_memory / GIB


def room(report: PhaseReport, module: LightningModule) -> str | None:
    """How much memory the fit has left unused, in words; `None` where it was little or unknown."""
    total = device_memory(module.device)
    if total is None or report.peak is None or report.peak > ROOM * total:
        return None
    return f"peak memory is {report.peak:.0f} of {total:.0f} GiB"


def long_responses(report: PhaseReport, trainer: Trainer, module: LightningModule) -> str | None:
    """Rollouts take most of the time, and many run to their limit."""
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
    """Rollouts take most of the time in batches that could be larger."""
    if not isinstance(module, PPOModule):
        return None
    size, left = module.memory.rollout_batch_size, room(report, module)
    share = report.share("rollout")
    if share < MOST or size is None or left is None:
        return None
    return (
        f"rollout takes {share:.0%} of the time: raise memory.rollout_batch_size (now {size}); "
        f"{left}"
    )


def slow_functions(report: PhaseReport, trainer: Trainer, module: LightningModule) -> str | None:
    """Reward functions, rules and services take long."""
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
    """A GPU computes in float32."""
    if not isinstance(module, StageModule):
        return None
    plain = trainer.precision == "32-true" and module.network.dtype == "float32"
    if not plain or device_memory(module.device) is None:
        return None
    return "everything is computed in float32: add configs/overlays/bf16.yaml"


def needless_checkpointing(
    report: PhaseReport, trainer: Trainer, module: LightningModule
) -> str | None:
    """Activations are recomputed though there is room for them."""
    left = room(report, module)
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
    """The update goes in small parts though there is room."""
    match module:
        case PPOModule():
            name, size = "minibatches.micro_batch_size", module.minibatches.micro_batch_size
        case SFTModule() | RewardModule():
            name, size = "micro_batch_size", module.micro_batch_size
        case _:
            return None
    left, share = room(report, module), report.share("update")
    if share < LARGE or size is None or left is None:
        return None
    return f"update takes {share:.0%} of the time: raise {name} (now {size}); {left}"


def long_validation(report: PhaseReport, trainer: Trainer, module: LightningModule) -> str | None:
    """Validation takes a large part."""
    share = report.share(VALIDATION_PHASE)
    if share < LARGE:
        return None
    return (
        f"validation takes {share:.0%} of the time: raise trainer.val_check_interval, or lower "
        "trainer.limit_val_batches"
    )


def waiting(report: PhaseReport, trainer: Trainer, module: LightningModule) -> str | None:
    """Much lies outside all phases."""
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
"""All of them; each returns a sentence, or `None` where it has nothing to say."""
