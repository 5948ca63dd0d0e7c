"""How sure a share is."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple


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
