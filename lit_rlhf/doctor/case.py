"""What the checks look at: the networks, one iteration, and what the configuration asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor

from lit_rlhf.data import PromptBatch
from lit_rlhf.doctor.findings import Finding, Status, failure
from lit_rlhf.doctor.plan import RunPlan
from lit_rlhf.forward import LanguageModel, Offloaded
from lit_rlhf.modules import PPOModule
from lit_rlhf.modules.timing import PhaseTimer
from lit_rlhf.rollout import Experience, RolloutBatch, TokenStatistics

FEW = 8  # responses that a check takes where it needs no more


class NetworkStep(NamedTuple):
    """One optimizer step of a network.

    Attributes:
        bound: The largest gradient norm that there may be; `None`: no clipping.
        before: L2 norm of the gradient before clipping.
        applied: L2 norm of the gradient that the optimizer has used; `None` if it does not tell.
    """

    bound: float | None
    before: float
    applied: float | None


class OneUpdate(NamedTuple):
    """One optimizer step of policy and critic on the same minibatch.

    Attributes:
        metrics: What `PPOModule.update` returned: computed before the step.
        steps: By network, `policy` and `critic`.
    """

    metrics: dict[str, float]
    steps: dict[str, NetworkStep]


@dataclass
class Case:
    """A run that is examined before it starts. What is `None` has not been reached.

    Attributes:
        module: The module, which is thrown away afterwards.
        data: Its datamodule.
        trainer: A Trainer for the examination alone.
        plan: What the configuration asks of the machine.
        free_memory: Bytes that the device has left before the networks are on it.
        batch: Prompts of one iteration.
        rollouts: Responses to them.
        estimates: What the networks make of the responses.
        scored: The same, if generation's own log-probs are in `estimates`, by another forward.
        scores: Raw rewards, `[B]`.
        experience: What the update learns from.
        updates: Two updates on one minibatch.
        timer: Seconds of the phases of one iteration.
        ppo_epochs: The run's; the examination makes one.
    """

    module: PPOModule
    data: LightningDataModule
    trainer: Trainer
    plan: RunPlan
    free_memory: int | None = None
    batch: PromptBatch | None = None
    rollouts: RolloutBatch | None = None
    estimates: TokenStatistics | None = None
    scored: TokenStatistics | None = None
    scores: Tensor | None = None
    experience: Experience | None = None
    updates: list[OneUpdate] | None = None
    timer: PhaseTimer = field(default_factory=PhaseTimer)
    ppo_epochs: int = 1

    def networks(self) -> dict[str, LanguageModel]:
        """All networks by what they are called in messages; with LoRA there is no reference."""
        module = self.module
        found = {"policy": module.policy, "reference": module.reference, "critic": module.critic}
        found |= {f"reward model {source.path!r}": source.model for source in module.reward.models}
        return {
            name: network.network if isinstance(network, Offloaded) else network
            for name, network in found.items()
            if network is not None
        }

    def tolerance(self, full: float, low: float) -> float:
        """What rounding may do: `full` where all is float32, `low` where anything is coarser."""
        dtypes = {p.dtype for network in self.networks().values() for p in network.parameters()}
        coarse = (
            not dtypes <= {torch.float32, torch.float64}
            or self.trainer.precision not in ("32-true", "64-true")
            or torch.get_float32_matmul_precision() != "highest"
        )
        return low if coarse else full


def first_rows(rollouts: RolloutBatch) -> RolloutBatch:
    """A few of the rollouts."""
    return RolloutBatch(
        rollouts.prompt_ids[:FEW],
        rollouts.prompt_mask[:FEW],
        rollouts.response_ids[:FEW],
        rollouts.response_mask[:FEW],
        rollouts.terminated[:FEW],
    )


class Check(NamedTuple):
    """One check.

    Attributes:
        name: A word or two.
        about: What it checks, in a line.
        run: The check itself.
        needs: Attributes of `Case` that it reads, which an earlier failure leaves `None`.
    """

    name: str
    about: str
    run: Callable[[Case], Finding]
    needs: tuple[str, ...] = ()


def checked(check: Check, case: Case) -> Finding:
    """The finding of a check; an exception inside it is a failure, whatever it is."""
    missing = [name for name in check.needs if getattr(case, name) is None]
    if missing:
        return Finding(Status.NOT_CHECKED, f"No {missing[0]} to look at, see the failures above.")
    try:
        return check.run(case)
    except Exception as error:  # of the user's models, data and functions: any kind
        return raised(error)


def raised(error: Exception) -> Finding:
    """The failure that an exception is."""
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return failure(f"{kind}{error}", "The run would end with this error: change what it names.")
