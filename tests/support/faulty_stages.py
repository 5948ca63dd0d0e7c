"""Faults put into runs of the three stages, and records of the runs batch by batch."""

from collections.abc import Collection
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor

from lit_rlhf.modules import PPOModule, RewardModule, SFTModule
from lit_rlhf.ppo import PPO, LossShare
from lit_rlhf.rollout import Experience, RolloutBatch, TokenStatistics
from tests.support.stages import ADAM_EPS, copy_state, demonstrations, nested, preferences

KINDS = ("nan", "infinite without a gradient", "gradient")


def break_loss(loss: Tensor, kind: str) -> Tensor:
    """Make `loss` NaN, infinite with a finite gradient, or finite with a gradient of NaN."""
    if kind == "nan":
        return loss * torch.nan
    if kind == "infinite without a gradient":
        return loss + torch.inf
    broken = loss * 1.0
    broken.register_hook(lambda gradient: gradient * torch.nan)
    return broken


class Faulty:
    """The loss has a fault in the batches `at`, which count from 0."""

    def __init__(self, model_path: str, at: Collection[int], kind: str, **options: Any) -> None:
        super().__init__(model_path, **options)
        self.at, self.kind, self.batches = at, kind, 0

    def forward(self, *arguments: Any) -> Any:
        output = super().forward(*arguments)  # type: ignore[misc]
        if isinstance(output, dict):
            shares, key = output, "sft/loss"
        else:
            shares, key = output.metrics, "reward/loss"
        if self.batches in self.at:
            shares[key] = break_loss(shares[key], self.kind)
        self.batches += 1
        return output


class FaultySFT(Faulty, SFTModule):
    """SFT with a faulty loss."""


class FaultyReward(Faulty, RewardModule):
    """Reward modelling with a faulty loss."""


class FaultyLosses(PPO):
    """A network's loss has a fault in its updates `at`, which count from 0 over the whole run."""

    at: Collection[int]
    break_loss: str
    kind: str
    updates: dict[str, int]

    def faulty(self, network: str, loss: Tensor) -> Tensor:
        count = self.updates[network]
        self.updates[network] += 1
        return break_loss(loss, self.kind) if network == self.broken and count in self.at else loss

    def critic_loss(self, experience: Experience, tokens: Tensor) -> LossShare:
        share = super().critic_loss(experience, tokens)
        loss = self.faulty("critic", share.loss)
        return LossShare(loss, {**share.metrics, "ppo/value_loss": loss})

    def policy_loss(self, experience: Experience, tokens: Tensor) -> LossShare:
        share = super().policy_loss(experience, tokens)
        loss = self.faulty("policy", share.loss)
        return LossShare(loss, {**share.metrics, "ppo/policy_loss": loss})


class FaultyPPO(PPOModule):
    """A run of `FaultyLosses`."""

    ppo_class = FaultyLosses
    ppo: FaultyLosses

    def __init__(self, at: Collection[int], broken: str, kind: str, **options: Any) -> None:
        super().__init__(**options)
        self.ppo.at = at
        self.ppo.broken = broken
        self.ppo.kind = kind
        self.ppo.updates = {"policy": 0, "critic": 0}


class NanEstimates(PPO):
    """One field of the estimates is NaN for one token in the iterations `at`."""

    at: Collection[int]
    field: str

    def estimate(self, rollouts: RolloutBatch) -> TokenStatistics:
        estimates = super().estimate(rollouts)
        if int(self.iteration) in self.at:
            getattr(estimates, self.field)[1, 0] = torch.nan
        return estimates


class FaultyEstimates(PPOModule):
    """A run of `NanEstimates`."""

    ppo_class = NanEstimates
    ppo: NanEstimates

    def __init__(self, at: Collection[int], field: str, **options: Any) -> None:
        super().__init__(**options)
        self.ppo.at = at
        self.ppo.field = field


class Course(Callback):
    """Records weights and buffers, moments, learning rates and metrics after each batch."""

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []
        self.moments: list[list[dict[str, Any]]] = []
        self.rates: list[list[float]] = []
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        self.states.append(copy_state(pl_module))
        self.moments.append([deepcopy(list(o.state.values())) for o in trainer.optimizers])
        self.rates.append([o.param_groups[0]["lr"] for o in trainer.optimizers])
        self.metrics.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def faulty_stage(
    stage: str, root: Path, at: Collection[int], kind: str = "nan", **options: Any
) -> tuple[LightningModule, LightningDataModule]:
    """SFT or reward modelling, four batches an epoch, with a schedule that moves."""
    kinds = {"sft": (FaultySFT, demonstrations), "reward": (FaultyReward, preferences)}
    module_class, datamodule = kinds[stage]
    schedule = {"learning_rate": 1e-2, "lr_scheduler": "linear", "warmup_ratio": 0.25}
    usual = {"optimizer": {"eps": ADAM_EPS, **schedule}}
    module = module_class(str(root / "policy"), at, kind, **nested(usual, options))
    return module, datamodule(root, batch_size=2)
