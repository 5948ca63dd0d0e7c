"""Backward and clipped step, spelled alike under every strategy.

A module with several optimizers under manual optimization calls, for each of them,

    for part in micro_batches:
        backward(self, loss(part), optimizer)
    result = clipped_step(optimizer, max_norm)

and trains alike on a single device, under DDP, and with one DeepSpeed engine per optimizer.
Gradients are averaged over ranks under all of them and never divided by a number of accumulation
steps, so a loss is a rank's sum divided by (global count / number of ranks). Every rank must call
`backward` equally often between two steps, as each call communicates.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import NamedTuple, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer

from lit_rlhf.strategies.engine_optimizer import as_engine_optimizer, ignore_gradients


class OptimizerStep(NamedTuple):
    """What a clipped step did."""

    grad_norm: Tensor
    """L2 norm of the gradient (averaged over ranks) before clipping, 0-dim float32."""
    applied: bool
    """False where the norm was not finite: weights and moments are then as before."""


def backward(module: LightningModule, loss: Tensor, optimizer: LightningOptimizer) -> None:
    """Add the gradient of `loss` to that of the optimizer's network, and of no other optimizer's.

    So a GAN's generator loss, which runs through the discriminator, leaves nothing in it.

    Args:
        module: The LightningModule in training.
        loss: 0-dim tensor with a graph.
        optimizer: One of `module.optimizers()`: the one whose network the loss trains.

    Raises:
        ValueError: If the optimizer is not the module's, or the precision scales losses
            (`16-mixed`): gradients would be clipped scaled.
    """
    if module.trainer.scaler is not None:
        raise ValueError(
            "precision: expected 32-true, bf16-mixed or bf16-true, got "
            f"{module.trainer.precision}: its loss scale would enter the clipped gradient norm"
        )
    with gradients_for(optimizer, module):
        # what manual_backward does, except that it tells the strategy no optimizer
        module.trainer.strategy.backward(loss, cast("Optimizer", optimizer))


def clipped_step(optimizer: LightningOptimizer, max_norm: float | None) -> OptimizerStep:
    """Clip the gradient of the optimizer's network by its own norm, step, and clear it.

    Where the norm is not finite there is no step: the gradient is cleared, on all ranks alike.

    Args:
        optimizer: One of `module.optimizers()`, after its last `backward`.
        max_norm: Largest L2 norm, positive; `None` leaves the gradient alone.

    Raises:
        ValueError: If `max_norm` is not positive.
    """
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm: expected a positive number or None, got {max_norm}")
    if (engine_optimizer := as_engine_optimizer(optimizer)) is not None:
        engine_optimizer.clip_next_step(max_norm)
        optimizer.step()
        return OptimizerStep(engine_optimizer.grad_norm, engine_optimizer.step_was_applied)
    parameters = network_parameters(optimizer)
    norm = gradient_norm(parameters)
    applied = bool(torch.isfinite(norm))
    if applied:
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        optimizer.step()
    optimizer.zero_grad()
    return OptimizerStep(norm, applied)


@contextmanager
def gradients_for(
    optimizer: LightningOptimizer, module: LightningModule
) -> Generator[None, None, None]:
    """Keep the backward inside from giving gradients to what the module's other optimizers train.

    A leaf that does not require a gradient when the backward reaches it receives none.

    Raises:
        ValueError: If the optimizer is not the module's.
    """
    optimizers = module.optimizers()
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    others = [other for other in optimizers if other is not optimizer]
    if len(others) == len(optimizers):
        raise ValueError(
            f"optimizer: expected one of {type(module).__name__}.optimizers(), got another "
            f"{type(optimizer).__name__}"
        )
    frozen = [p for other in others for p in network_parameters(other) if p.requires_grad]
    engines = [o.engine for other in others if (o := as_engine_optimizer(other)) is not None]
    try:
        for parameter in frozen:
            parameter.requires_grad_(False)
        for engine in engines:
            ignore_gradients(engine, True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
        for engine in engines:
            ignore_gradients(engine, False)


def network_parameters(optimizer: LightningOptimizer) -> list[Tensor]:
    """The parameters of the module that an optimizer trains."""
    if (engine_optimizer := as_engine_optimizer(optimizer)) is not None:
        return list(engine_optimizer.engine.module.parameters())  # its groups hold partitions
    return [p for group in optimizer.param_groups for p in group["params"]]


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """L2 norm of all gradients taken together, 0-dim float32; 0 where there are none."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients).float()
