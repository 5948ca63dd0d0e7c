"""Statistics that describe a sample: confidence intervals and the diversity of text.

Notation: `B` batch, `T` response tokens.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from lit_rlhf.functional.checks import check_dims, check_integer, check_mask


class Interval(NamedTuple):
    """Both ends of a confidence interval."""

    low: float
    high: float


def wilson_interval(hits: float, trials: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a share (Wilson 1927, J. Am. Stat. Assoc. 22, 209).

    Unlike the share plus and minus 1.96 standard errors it stays within [0, 1], and has a width
    when all or no trials are hits.

    Args:
        hits: Trials that succeeded; one may count as half.
        trials: All of them, at least 1.
        confidence: How often the interval holds the true share, in (0, 1).

    Raises:
        ValueError: If a number is out of its range.
    """
    if trials < 1 or not 0 <= hits <= trials:
        raise ValueError(
            f"hits: expected a number from 0 to trials, and trials >= 1, got {hits} and {trials}"
        )
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence: expected a number in (0, 1), got {confidence}")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = hits / trials
    center = share + z**2 / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2))
    scale = 1 + z**2 / trials
    return Interval(max(0.0, (center - half) / scale), min(1.0, (center + half) / scale))


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
