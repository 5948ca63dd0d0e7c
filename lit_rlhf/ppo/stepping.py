"""Steps the networks that `PPO` trains: one optimizer each, with or without a Trainer."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_rlhf.checks import check_positive
from lit_rlhf.micro_batches import LossShare, NetworkUpdate, accumulate

NetworkName = Literal["policy", "critic"]


class Stepper(Protocol):
    """Makes the optimizer steps of `PPO.update`."""

    def update(self, network: NetworkName, shares: Iterable[LossShare]) -> NetworkUpdate:
        """Accumulate a network's gradient over micro-batches, and make one step with it.

        Args:
            network: Which network.
            shares: The micro-batches' shares in its loss, computed one after the other.
        """

    def end_minibatch(self, trains_policy: bool) -> None:
        """Take note that a minibatch has been learned from, for instance for learning rates.

        Args:
            trains_policy: Whether the policy was trained on it, and not the critic alone.
        """


class OptimizerStepper:
    """Steps plain optimizers of torch, on one process and at fixed learning rates.

    Args:
        optimizers: The optimizer of the policy, and of a critic with a trunk of its own.
        grad_clip: Largest L2 norm of a network's gradient; `None`: no clipping.
    """

    def __init__(
        self, optimizers: Mapping[NetworkName, Optimizer], grad_clip: float | None = 1.0
    ) -> None:
        if grad_clip is not None:
            check_positive("grad_clip", grad_clip)
        self.optimizers = optimizers
        self.grad_clip = grad_clip

    def update(self, network: NetworkName, shares: Iterable[LossShare]) -> NetworkUpdate:
        """Clip and step; skip the step if the norm of the gradient is not finite.

        Args:
            network: Which network.
            shares: The micro-batches' shares in its loss, computed one after the other.
        """
        optimizer = self.optimizers[network]
        metrics = accumulate(shares, torch.Tensor.backward)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        max_norm = torch.inf if self.grad_clip is None else self.grad_clip
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        applied = bool(torch.isfinite(norm))
        if applied:
            optimizer.step()
        optimizer.zero_grad()
        return NetworkUpdate(metrics=metrics, grad_norm=norm, applied=applied)

    def end_minibatch(self, trains_policy: bool) -> None:
        """Do nothing: the learning rates are fixed."""


class PhaseContext(Protocol):
    """Wraps each phase of an iteration, for instance to measure its time."""

    def __call__(
        self, phase: str, shape: Sequence[int], settings: Sequence[str]
    ) -> AbstractContextManager[object]:
        """The context that a phase runs in.

        Args:
            phase: Name of the phase.
            shape: Sequences and tokens of each that the phase works on, `(B, L)`.
            settings: Options to change if the phase runs out of memory.
        """


def untimed(
    phase: str, shape: Sequence[int], settings: Sequence[str]
) -> AbstractContextManager[object]:
    """The context of a phase that nobody watches.

    Args:
        phase: Name of the phase.
        shape: Sequences and tokens of each that the phase works on, `(B, L)`.
        settings: Options to change if the phase runs out of memory.
    """
    return nullcontext()


def mean_of_minibatches(history: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Average metrics, 0-dim, over the minibatches that have them.

    A minibatch without a token to learn from has no metrics of its tokens. Skipped updates have NaN
    and do not count, unless all were skipped.

    Args:
        history: Metrics by key of each minibatch.
    """
    keys = dict.fromkeys(key for metrics in history for key in metrics)
    return {
        key: torch.stack([metrics[key] for metrics in history if key in metrics]).nanmean()
        for key in keys
    }
