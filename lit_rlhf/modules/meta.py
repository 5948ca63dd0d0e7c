"""MetaRM: a reward model learns at weights that tell the responses of a policy apart.

Section 4 of *Secrets of RLHF in Large Language Models Part II* (arXiv 2401.06080). With J the
`difference_loss` of pairs of a policy's responses, which need no labels, a step takes the gradient
of the usual loss at theta' = theta + rate * grad J(theta), and applies it to theta. To the first
order in the rate, it so prefers ways to lower the loss that raise J.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor

from lit_rlhf.data import PreferenceDataModule
from lit_rlhf.forward import sequence_scores
from lit_rlhf.functional import difference_loss
from lit_rlhf.modules.updates import slice_batch, split_batch, trained_networks
from lit_rlhf.stats import global_denominator, world_size
from lit_rlhf.strategies import average_gradients, backward

if TYPE_CHECKING:
    from lit_rlhf.modules.reward import RewardModule


def check_meta(module: RewardModule) -> None:
    """Refuse a rate without pairs, pairs without a rate, and runs whose weights cannot be moved."""
    rate, data = module.meta_rate, module.datamodule
    sources = data.meta_sources if isinstance(data, PreferenceDataModule) else []
    if (rate > 0) != bool(sources):
        raise ValueError(
            "model.meta_rate, data.meta_sources: expected a rate above 0 and sources, or neither, "
            f"got {rate} and {len(sources)} sources"
        )
    strategy = type(module.trainer.strategy)
    types = {str(p.dtype) for p in module.parameters() if p.requires_grad}
    precise = types <= {"torch.float32", "torch.float64"}
    if rate > 0 and not (precise and strategy in (SingleDeviceStrategy, DDPStrategy)):
        raise ValueError(
            "model.meta_rate: expected one device or ddp, and float32 weights, all of which are "
            f"moved and taken back to the bit, got {strategy.__name__} and {', '.join(types)}"
        )


@contextmanager
def meta_weights(module: RewardModule, size: int, batch_idx: int) -> Iterator[dict[str, Tensor]]:
    """The weights theta' inside the context, by `size` pairs of responses; theta without a rate.

    Yields this rank's share of the metric `reward/difference_loss`, if there is one. The weights
    are afterwards what they were, to the bit.
    """
    data, (optimizer, _) = module.datamodule, trained_networks(module)[0]
    if not module.meta_rate or not isinstance(data, PreferenceDataModule):
        yield {}
        return
    drawn = data.draw_meta_pairs(size, module.current_epoch, batch_idx)
    batch = move_data_to_device(drawn, module.device)
    pairs = global_denominator(size, module.device)
    lengths = batch.chosen.attention_mask.sum(1) + batch.rejected.attention_mask.sum(1)
    total, limits = torch.zeros_like(pairs), (module.micro_batch_size, module.micro_batch_tokens)
    for rows, weight in split_batch(module.model, lengths, *limits):
        sides = slice_batch(batch, rows)[:2]
        first, second = (sequence_scores(module.model, *side[:2]) for side in sides)
        share = weight * difference_loss(first, second) * len(first) / pairs
        backward(module, share, optimizer)
        total += share.detach()
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    if world_size() > 1:
        average_gradients(weights)
    weights = [p for p in weights if p.grad is not None]  # the output layer has none
    before = [p.detach().clone() for p in weights]
    try:
        with torch.no_grad():
            for parameter in weights:
                parameter.add_(cast(Tensor, parameter.grad), alpha=module.meta_rate)
        optimizer.zero_grad()
        yield {"reward/difference_loss": total}
    finally:
        with torch.no_grad():
            for parameter, kept in zip(weights, before, strict=True):
                parameter.copy_(kept)
