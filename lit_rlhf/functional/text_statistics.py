"""How varied sampled text is. Notation: `B` batch, `T` response tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rlhf.functional.checks import check_dims, check_integer, check_mask


def distinct_n(token_ids: Tensor, mask: Tensor, n: int = 2) -> Tensor:
    """Distinct n-grams over all n-grams of a batch of responses (Li et al., arXiv 1510.03055).

    An n-gram lies within one response; all responses share one set of distinct ones, so responses
    that resemble each other lower the number as repetition does.

    Args:
        token_ids: `[B, T]` integers.
        mask: The responses' tokens, `[B, T]` bool. An n-gram across a gap does not count.
        n: Tokens per n-gram, at least 1.

    Returns:
        0-dim float32 in [0, 1]; 0 if no response has `n` tokens.

    Raises:
        ValueError: For a wrong shape, dtype or range.
    """
    check_dims("token_ids", token_ids, 2)
    check_integer("token_ids", token_ids)
    check_mask(mask, token_ids.shape)
    if n < 1:
        raise ValueError(f"n: expected an integer >= 1, got {n}")
    if token_ids.shape[1] < n:
        return torch.zeros((), device=token_ids.device)
    kept = mask.unfold(1, n, 1).all(-1)
    ngrams = token_ids.unfold(1, n, 1)[kept]
    if len(ngrams) == 0:
        return torch.zeros((), device=token_ids.device)
    return torch.tensor(len(torch.unique(ngrams, dim=0)) / len(ngrams), device=token_ids.device)
