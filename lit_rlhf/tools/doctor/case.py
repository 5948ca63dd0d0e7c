"""The run that is examined, with the tensors of one iteration for the checks."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_rlhf.data import PromptBatch
from lit_rlhf.forward import LanguageModel, Offloaded
from lit_rlhf.modules import PPOModule
from lit_rlhf.ppo import NetworkName
from lit_rlhf.rollout import Experience, RolloutBatch, TokenStatistics
from lit_rlhf.tools.doctor.plan import RunPlan

NETWORKS: tuple[NetworkName, ...] = ("policy", "critic")
"""The networks that PPO trains, in the order of the module's optimizers."""
FEW = 8  # rollouts that a check reads again where it needs no more


class NetworkStep(NamedTuple):
    """An update of one network.

    Attributes:
        metrics: Metrics of the loss before the step.
        clip: Bound of the gradient's norm; `None` without clipping.
        norm: L2 norm of the gradient before clipping.
        applied_norm: L2 norm of the gradient that the optimizer used; `None` if it is not known.
    """

    metrics: dict[str, float]
    clip: float | None
    norm: float
    applied_norm: float | None


@dataclass(repr=False)
class Case:
    """A run under examination, which cannot be trained afterwards.

    Fields below `plan` are set in the course of the examination.

    Attributes:
        module: The module of the run.
        data: The data of the run.
        trainer: The Trainer of the examination.
        plan: What the run's configuration asks of the machine.
        free_memory: Bytes that the device has before the networks are on it.
        batch: Prompts of one iteration.
        rollouts: Responses to them.
        estimates: Log-probs and values as the update gets them: the policy's log-probs may come
            from generation.
        rescored: The same from a separate forward, if the policy's come from generation.
        scores: Raw rewards, `[B]`.
        experience: What the updates learn from.
        updates: Two updates of each network on one minibatch, by the network's name.
    """

    module: PPOModule
    data: LightningDataModule
    trainer: Trainer
    plan: RunPlan
    free_memory: int = field(init=False)
    batch: PromptBatch = field(init=False)
    rollouts: RolloutBatch = field(init=False)
    estimates: TokenStatistics = field(init=False)
    rescored: TokenStatistics | None = None
    scores: Tensor = field(init=False)
    experience: Experience = field(init=False)
    updates: list[dict[NetworkName, NetworkStep]] = field(init=False)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that encodes the prompts."""
        encoder = self.module.encoder
        return self.module.tokenizer if encoder is None else encoder.tokenizer

    @property
    def n_rollouts(self) -> int:
        """Number of rollouts of a rank in an iteration."""
        prompts = getattr(self.data, "batch_size", self.module.minibatches.minibatch_size)
        return int(prompts) * self.module.responses_per_prompt

    def networks(self) -> dict[str, LanguageModel]:
        """All networks by their name in messages; with LoRA there is no separate reference."""
        module = self.module
        networks = {
            "policy": module.policy,
            "reference": module.reference,
            "critic": module.critic,
            **{f"reward model {model.path!r}": model.model for model in module.reward.models},
        }
        return {
            name: network.network if isinstance(network, Offloaded) else network
            for name, network in networks.items()
            if network is not None
        }

    def tolerance(self, *, full: float, low: float) -> float:
        """Choose the largest difference that rounding explains.

        It is `full` if everything is computed in float32, else `low`.
        """
        dtypes = {p.dtype for network in self.networks().values() for p in network.parameters()}
        low_precision = (
            not dtypes <= {torch.float32, torch.float64}
            or self.trainer.precision not in ("32-true", "64-true")
            or torch.get_float32_matmul_precision() != "highest"
        )
        return low if low_precision else full
