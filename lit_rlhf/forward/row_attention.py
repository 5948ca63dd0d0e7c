"""Attention over rows of tokens, each way where it is the fastest.

A CPU's own attention multiplies one head of one row at a time, which short rows do not repay, and
is slow in bfloat16. Notation: `S` rows, `A` heads of size `D`, `K` heads of keys and values (`A` is
a multiple of `K`), `N` queries and `C` keys of a row.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from lit_rlhf.forward.attention import AttentionInputs

SHORT = 128
"""Longest rows that are multiplied all at once on a CPU."""


def causal_attention(inputs: AttentionInputs) -> Tensor:
    """Causal attention of rows that start at their first token, `[S, A, N, D]`; `C` is `N`.

    What follows a row's end is padding that no token before it sees.
    """
    query, key, value, scale, dropout, window = inputs
    length, dtype = query.shape[2], value.dtype  # under autocast the others come in float32
    on_cpu, exact = query.device.type == "cpu", dtype.itemsize >= 4
    if on_cpu and exact and length <= SHORT and not dropout:
        return at_once(query, key, value, causal_bias(length, window or length, dtype), scale)
    # a CPU's backward is several times slower in bfloat16 than in float32
    computed = torch.float32 if on_cpu and not exact and torch.is_grad_enabled() else dtype
    narrow = window is not None and window < length
    mask = band(length, window, query.device) if narrow and window is not None else None
    with torch.autocast(query.device.type, enabled=False):
        output = functional.scaled_dot_product_attention(
            query.to(computed),
            key.to(computed),
            value.to(computed),
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )
    return output.to(dtype)


def next_attention(inputs: AttentionInputs, seen: Tensor) -> Tensor:
    """Attention of one token of each row to the keys of a cache, `[S, A, 1, D]`; no gradients.

    Args:
        inputs: `N` is 1.
        seen: Which keys a token sees, one at least, `[S, 1, 1, C]` bool.
    """
    query, key, value, scale, dropout, _ = inputs
    if query.device.type == "cpu" and key.shape[2] <= SHORT:
        bias = as_bias(seen, torch.promote_types(value.dtype, torch.float32))
        return at_once(query, key, value, bias, scale)
    # heads that share a key stand as queries of one head: no copies of keys and values
    grouped = query.reshape(len(query), key.shape[1], -1, query.shape[3])
    output = functional.scaled_dot_product_attention(
        grouped.to(value.dtype), key, value, attn_mask=seen, dropout_p=dropout, scale=scale
    )
    return output.view(query.shape)


def at_once(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float | None) -> Tensor:
    """softmax(q k^T scale + bias) v of all heads of all rows in two products, in float32 or better.

    Args:
        query: `[S, A, N, D]`.
        key: `[S, K, C, D]`.
        value: As `key`.
        bias: Added to the scores, `[S or 1, 1, N, C]`, float32 or better.
        scale: Of the scores; `None`: `1 / sqrt(D)`.

    Returns:
        `[S, A, N, D]` in the type of `value`.
    """
    n_rows, n_heads, n_queries, size = query.shape
    n_groups, n_keys = key.shape[1:3]
    computed = torch.promote_types(value.dtype, torch.float32)
    shared = n_heads // n_groups
    shape = (n_rows, n_groups, shared * n_queries, n_keys)
    with torch.autocast(query.device.type, enabled=False):
        scores = torch.baddbmm(
            bias.repeat(1, 1, shared, 1).expand(shape).flatten(0, 1),
            query.to(computed).reshape(n_rows * n_groups, shared * n_queries, size),
            key.to(computed).flatten(0, 1).transpose(1, 2),
            alpha=size**-0.5 if scale is None else scale,
        )
        output = scores.softmax(-1).bmm(value.to(computed).flatten(0, 1))
    return output.view(query.shape).to(value.dtype)


def as_bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a key is seen (bool) and minus infinity elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)


@lru_cache(maxsize=SHORT)
def causal_bias(length: int, window: int, dtype: torch.dtype) -> Tensor:
    """The bias of rows of a length on a CPU, `[1, 1, L, L]`; every layer and forward asks again."""
    with torch.inference_mode(False):  # what is made inside is of no use to training
        return as_bias(band(length, window, torch.device("cpu")), dtype)[None, None]


def band(length: int, window: int, device: torch.device) -> Tensor:
    """Which earlier token each token sees through a window, `[L, L]` bool."""
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions[None, :]
    return (distance >= 0) & (distance < window)
