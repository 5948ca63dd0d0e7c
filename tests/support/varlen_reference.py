"""The result of `torch.nn.attention.varlen.varlen_attn`, row by row and in any dtype."""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional


def reference_varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
) -> Tensor:
    """torch's function; it refuses what the kernel would refuse or compute wrongly."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert query.dtype == key.dtype == value.dtype
    assert all(states.stride(-1) == 1 for states in (query, key, value))
    assert query.shape[1] == key.shape[1] or enable_gqa
    q_offsets, k_offsets = cu_seq_q.tolist(), cu_seq_k.tolist()
    lengths = [end - start for start, end in pairwise(k_offsets)]
    assert max(lengths) <= max_k
    if seqused_k is not None:
        assert seqused_k.dtype == torch.int32
        assert not torch.is_grad_enabled()
        assert all(used <= room for used, room in zip(seqused_k.tolist(), lengths, strict=True))
        lengths = seqused_k.tolist()
    outputs = []
    for row, n_keys in enumerate(lengths):
        queries = query[q_offsets[row] : q_offsets[row + 1]]
        keys = slice(k_offsets[row], k_offsets[row] + n_keys)
        assert len(queries) <= max_q
        # the last query is at the last key
        places = torch.arange(len(queries))[:, None] + n_keys - len(queries)
        distance = places - torch.arange(n_keys)
        before, after = window_size
        mask = (distance <= before) | (before < 0)
        mask &= (distance >= -after) | (after < 0)
        rows = (states.transpose(0, 1) for states in (queries, key[keys], value[keys]))
        options = {"attn_mask": mask, "scale": scale, "enable_gqa": enable_gqa}
        outputs.append(functional.scaled_dot_product_attention(*rows, **options).transpose(0, 1))
    return torch.cat(outputs)
