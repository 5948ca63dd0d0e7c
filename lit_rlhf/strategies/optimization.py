"""Backward and clipped step, called the same way under every strategy.

A module with several optimizers under manual optimization calls, for each of them,

    for micro_batch in micro_batches:
        backward(self, loss(micro_batch), optimizer)
    norm, applied = clipped_step(optimizer, max_norm)

and trains the same way on a single device, under DDP, and with one DeepSpeed engine per optimizer.
Under each of them gradients are averaged over ranks and never divided by the number of accumulation
steps. A rank's loss is therefore its sum over tokens divided by (global token count / number of
ranks).

Under DDP, `clipped_step` averages the gradients of the network that steps. An engine reduces in
every backward, so every rank must call `backward` equally often between two steps.
"""

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_rlhf.stats import global_sum, world_size
from lit_rlhf.strategies.engine_optimizer import EngineOptimizer, ignore_gradients

BUCKET_SIZE = 2**25
"""Largest number of elements that are reduced at a time, unless one gradient has more.

These are 128 MiB in float32.
"""


class ClippedStep(NamedTuple):
    """Result of `clipped_step`.

    Attributes:
        grad_norm: L2 norm of the gradient over ranks before clipping, 0-dim.
        applied: Whether a step was made. There is none on any rank if the norm is not finite.
    """

    grad_norm: Tensor
    applied: bool


def backward(module: LightningModule, loss: Tensor, optimizer: LightningOptimizer) -> None:
    """Accumulate a gradient for the parameters of one optimizer, and of no other.

    A loss may run through the network of another optimizer without leaving gradients there, like
    the loss of a GAN's generator through the discriminator.

    Args:
        module: The module, attached to a Trainer.
        loss: The loss, 0-dim.
        optimizer: One of `module.optimizers()`.
    """
    if module.trainer.scaler is not None:
        raise ValueError(
            "trainer.precision: expected 32-true, bf16-mixed or bf16-true, got "
            f"{module.trainer.precision}, whose loss scale would enter the gradient norm that is "
            "clipped"
        )
    strategy = module.trainer.strategy
    unsynchronized: AbstractContextManager[object] = nullcontext()
    if isinstance(strategy, ParallelStrategy):
        # `clipped_step` averages over ranks instead of DDP; for engines this does nothing
        unsynchronized = strategy.block_backward_sync()
    with _freeze_other_networks(module, optimizer), unsynchronized:
        # the same as `manual_backward`, except that the strategy gets the optimizer: with one
        # engine per optimizer it must know whose backward this is
        strategy.backward(loss, cast("Optimizer", optimizer))


def clipped_step(optimizer: LightningOptimizer, max_norm: float | None) -> ClippedStep:
    """Average the gradient of an optimizer's network over ranks, clip it by its norm, and step.

    If the norm is not finite, no rank steps, and weights and moments are unchanged. The gradient is
    cleared in any case.

    Args:
        optimizer: One of `module.optimizers()`.
        max_norm: Largest L2 norm of the gradient, positive; `None` for no clipping.
    """
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm: expected a positive number or None, got {max_norm}")
    if (engine_optimizer := _as_engine_optimizer(optimizer)) is not None:
        # the engine clips inside its step: only it knows the norm of all ranks' partitions
        engine_optimizer.clip_next_step(max_norm)
        optimizer.step()
        applied = bool(engine_optimizer.engine.was_step_applied())
        return ClippedStep(engine_optimizer.grad_norm, applied)
    parameters = _network_parameters(optimizer)
    if world_size() > 1:
        average_gradients(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = torch.nn.utils.get_total_norm(gradients)
    norm = (total.full_tensor() if isinstance(total, DTensor) else total).float()
    applied = bool(torch.isfinite(norm))
    if applied:
        if max_norm is not None:
            shared = total if isinstance(total, DTensor) else norm
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, shared)
        optimizer.step()
    optimizer.zero_grad()
    return ClippedStep(norm, applied)


@contextmanager
def _freeze_other_networks(
    module: LightningModule, optimizer: LightningOptimizer
) -> Generator[None, None, None]:
    """Keep a backward from giving gradients to what the module's other optimizers train.

    `requires_grad` is switched off around the backward, not around the forward: autograd checks it
    when it reaches a leaf, and the graph still runs through the other networks.
    """
    optimizers = module.optimizers()
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    others = [other for other in optimizers if other is not optimizer]
    if len(others) == len(optimizers):
        raise ValueError(
            f"optimizer: expected one of {type(module).__name__}.optimizers(), got another "
            f"{type(optimizer).__name__}"
        )
    frozen = [p for other in others for p in _network_parameters(other) if p.requires_grad]
    engines = [
        engine_optimizer.engine
        for other in others
        if (engine_optimizer := _as_engine_optimizer(other)) is not None
    ]
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


def _as_engine_optimizer(optimizer: object) -> EngineOptimizer | None:
    """The optimizer, or Lightning's wrapper of it, if an engine steps it; otherwise `None`."""
    return optimizer if isinstance(optimizer, EngineOptimizer) else None


def _network_parameters(optimizer: LightningOptimizer) -> list[Tensor]:
    """The parameters of the module that an optimizer trains."""
    if (engine_optimizer := _as_engine_optimizer(optimizer)) is not None:
        # its groups hold flat partitions, which no module owns
        return list(engine_optimizer.engine.module.parameters())
    return [p for group in optimizer.param_groups for p in group["params"]]


def average_gradients(parameters: Sequence[Tensor]) -> None:
    """Average the gradients of some parameters over ranks, in place and in large buckets.

    A parameter that no rank has used keeps no gradient. If only some ranks have used it, for
    instance an expert of a mixture, the gradient of the others is zero. Gradients that are
    partitioned over ranks (`DTensor`) are averaged already.
    """
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        return
    has_gradient = [int(parameter.grad is not None) for parameter in parameters]
    n_users = global_sum(torch.tensor(has_gradient, device=parameters[0].device)).tolist()
    for parameter, n_ranks in zip(parameters, n_users, strict=True):
        if n_ranks and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    bucket: list[Tensor] = []
    size = 0
    for gradient in [p.grad for p in parameters if p.grad is not None]:
        full = size + gradient.numel() > BUCKET_SIZE
        if bucket and (full or gradient.dtype != bucket[0].dtype):
            _average_bucket(bucket)
            bucket = []
            size = 0
        bucket.append(gradient)
        size += gradient.numel()
    if bucket:
        _average_bucket(bucket)


def _average_bucket(gradients: list[Tensor]) -> None:
    # divide before the sum, like DDP: a sum may be too large for the type
    flat = torch.cat([gradient.flatten() for gradient in gradients]).div_(world_size())
    distributed.all_reduce(flat)
    averages = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, average in zip(gradients, averages, strict=True):
        gradient.copy_(average.view_as(gradient))
