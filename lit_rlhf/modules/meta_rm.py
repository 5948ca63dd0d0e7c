"""MetaRM: a reward model learns at weights that tell the responses of a policy apart.

Section 4 of *Secrets of RLHF in Large Language Models Part II* (arXiv 2401.06080). With J the
`difference_loss` of pairs of a policy's responses, which need no labels, a step takes the gradient
of the usual loss at theta' = theta + rate * grad J(theta), and applies it to theta. To first order
in the rate, it prefers ways to lower the loss that also raise J.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn

from lit_rlhf.data import PreferenceBatch
from lit_rlhf.forward import LanguageModel, sequence_scores
from lit_rlhf.functional import difference_loss
from lit_rlhf.micro_batches import LossShare, MicroBatch, accumulate, slice_batch
from lit_rlhf.stats import world_size
from lit_rlhf.strategies import average_gradients


def check_meta_rate(
    rate: float, n_sources: int, *, strategy: Strategy, weights: Iterable[nn.Parameter]
) -> None:
    """Refuse a rate without pairs, pairs without a rate, and runs whose weights cannot be moved.

    Args:
        rate: The rate of MetaRM; 0 is off.
        n_sources: Sources of pairs of a policy's responses.
        strategy: The run's strategy.
        weights: The weights of the module.
    """
    if (rate > 0) != (n_sources > 0):
        raise ValueError(
            "model.meta_rate, data.meta_sources: expected a rate above 0 and sources, or neither, "
            f"got {rate} and {n_sources} sources"
        )
    types = {str(weight.dtype) for weight in weights if weight.requires_grad}
    precise = types <= {"torch.float32", "torch.float64"}
    if rate > 0 and not (precise and type(strategy) in (SingleDeviceStrategy, DDPStrategy)):
        raise ValueError(
            "model.meta_rate: expected one device or ddp, and float32 weights, all of which are "
            f"moved and taken back to the bit, got {type(strategy).__name__} and "
            f"{', '.join(types)}"
        )


def difference_shares(
    model: LanguageModel, batch: PreferenceBatch, parts: Iterable[MicroBatch], pairs: Tensor
) -> Iterator[LossShare]:
    """Shares of the micro-batches of pairs in J, with its metric `reward/difference_loss`.

    Args:
        model: The reward model.
        batch: Pairs of a policy's responses.
        parts: The micro-batches.
        pairs: Pairs of the whole batch, see `global_denominator`, 0-dim.
    """
    for rows, weight in parts:
        part = slice_batch(batch, rows)
        first, second = (
            sequence_scores(model, side.input_ids, side.attention_mask)
            for side in (part.chosen, part.rejected)
        )
        loss = difference_loss(first, second) * len(first) / pairs
        yield LossShare(loss, {"reward/difference_loss": loss}).scaled(weight)


@contextmanager
def meta_weights(
    shares: Iterable[LossShare],
    rate: float,
    optimizer: LightningOptimizer,
    backward: Callable[[Tensor], object],
) -> Iterator[dict[str, Tensor]]:
    """The weights theta' inside the context, which yields the metrics of `shares`.

    The weights are afterwards what they were, to the bit.

    Args:
        shares: Shares in J, see `difference_shares`.
        rate: The rate.
        optimizer: The optimizer of the weights.
        backward: Adds the gradient of a loss to the gradient of the weights.
    """
    metrics = accumulate(shares, backward)
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    if world_size() > 1:
        average_gradients(weights)
    weights = [p for p in weights if p.grad is not None]  # the output layer has none
    original_weights = [p.detach().clone() for p in weights]
    try:
        with torch.no_grad():
            for weight in weights:
                weight.add_(cast(Tensor, weight.grad), alpha=rate)
        optimizer.zero_grad()
        yield metrics
    finally:
        with torch.no_grad():
            for weight, unmoved in zip(weights, original_weights, strict=True):
                weight.copy_(unmoved)
