"""Sums and moments over the ranks of a distributed run; without one, over this process.

Every rank has to call these together, as it is with collectives.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor, distributed

from lit_rlhf.functional import Moments, masked_moments, merged_moments


def is_distributed() -> bool:
    """Whether this process belongs to a process group."""
    return distributed.is_available() and distributed.is_initialized()


def global_sum(tensor: Tensor) -> Tensor:
    """Sum of a tensor over all ranks.

    Args:
        tensor: Numbers, any shape, the same on every rank; it is left as it is.

    Returns:
        A new tensor like `tensor`, without a graph.

    Raises:
        ValueError: If `tensor` is bool.
    """
    if tensor.dtype == torch.bool:
        raise ValueError("tensor: expected a numeric dtype, got torch.bool")
    total = tensor.detach().clone()
    if is_distributed():
        distributed.all_reduce(total)
    return total


def global_masked_moments(values: Tensor, mask: Tensor) -> Moments:
    """Mean, population variance and count of the kept values of all ranks.

    Args:
        values: Floating-point, any shape, which may differ between ranks.
        mask: Bool, shape of `values`; it may be empty on some ranks.

    Returns:
        0-dim float64 numbers, the same to the bit on every rank.

    Raises:
        ValueError: If `values` is not floating-point, or `mask` not bool or of another shape.
    """
    moments = masked_moments(values, mask)
    if not is_distributed():
        return moments
    packed = torch.stack(moments)
    of_ranks = [torch.empty_like(packed) for _ in range(distributed.get_world_size())]
    distributed.all_gather(of_ranks, packed)
    return reduce(merged_moments, (Moments(*numbers.unbind()) for numbers in of_ranks))
