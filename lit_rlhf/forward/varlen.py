"""Attention over rows of tokens that lie back to back, in one CUDA kernel.

`torch.nn.attention.varlen` needs neither padding nor a mask nor a call per length. Notation: `n`
rows, `N` queries of all rows, `C` keys of all rows, `A` heads of size `D`, `K` heads of keys and
values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_rlhf.forward.attention import AttentionInputs

FLASH_CAPABILITY = (8, 0)
"""Oldest CUDA devices that flash attention runs on: Ampere."""

MAX_HEAD_SIZE, HEAD_SIZE_MULTIPLE = 256, 8
"""Largest head that flash attention knows, and what the size of a head is a multiple of."""


class RowOffsets(NamedTuple):
    """Where rows begin among tokens that lie back to back.

    Attributes:
        offsets: First token of each row, and the number of tokens, `[n+1]` int32.
        longest: Length of the longest row.
    """

    offsets: Tensor
    longest: int


def supports_varlen(value: Tensor) -> bool:
    """Whether `varlen_attention` computes attention with these values, `[..., D]`."""
    size = value.shape[-1]
    return (
        value.device.type == "cuda"
        and value.dtype in (torch.bfloat16, torch.float16)
        and size <= MAX_HEAD_SIZE
        and size % HEAD_SIZE_MULTIPLE == 0
        and _find_kernel() is not None
        and torch.cuda.get_device_capability(value.device) >= FLASH_CAPABILITY
    )


def varlen_attention(
    inputs: AttentionInputs, queries: RowOffsets, keys: RowOffsets, n_keys: Tensor | None = None
) -> Tensor:
    """Causal attention within each row, whose last query is at the row's last key.

    Args:
        inputs: The states by token, not by head: `query` `[N, A, D]`, `key` and `value`
            `[C, K, D]`. There is no dropout.
        queries: Rows of the queries.
        keys: Rows of the keys, or the room for them.
        n_keys: Keys that each row has, `[n]` int32, without gradients; `None` if they fill its
            room.

    Returns:
        `[N, A, D]`, in the dtype of the values.
    """
    query, key, value, scale, _, window = inputs
    kernel = _find_kernel()
    assert kernel is not None
    before = -1 if window is None else window - 1
    # one query per row attends to all of its keys: without a window there is nothing to mask, and
    # flash attention then takes the heads that share a key together
    after = -1 if window is None and queries.longest == 1 else 0
    output: Tensor = kernel(
        query.to(value.dtype),  # under autocast, rotary embeddings leave float32
        key.to(value.dtype),
        value,
        queries.offsets,
        keys.offsets,
        queries.longest,
        keys.longest,
        scale=scale,
        window_size=(before, after),
        enable_gqa=True,
        seqused_k=n_keys,
    )
    return output


@cache
def _find_kernel() -> Callable[..., Any] | None:
    """Torch's function, or `None` before torch 2.13, where it is missing or knows less."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters.keys()
    return varlen_attn if {"window_size", "enable_gqa", "seqused_k"} <= known else None
