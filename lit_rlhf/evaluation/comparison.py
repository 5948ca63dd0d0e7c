"""Comparing scores of responses to the same prompts: outcomes per prompt, and how sure a mean is.

Plain numpy on `[N]` arrays, one entry for each of `N` prompts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 2000
CONFIDENCE = 0.95


class Outcomes(NamedTuple):
    """How often a policy won, tied and lost against the baseline.

    Attributes:
        win: Share of prompts with a higher score than the baseline's, by more than the margin.
        tie: Share of prompts with scores within the margin of each other.
        lose: Share of prompts with a lower score, by more than the margin.
    """

    win: float
    tie: float
    lose: float


class ScoreSummary(NamedTuple):
    """A policy's scores under one reward.

    Attributes:
        mean: Mean over prompts.
        low: Lower end of the mean's 95 % interval.
        high: Upper end of it.
        std: Sample standard deviation over prompts; 0 for a single prompt.
    """

    mean: float
    low: float
    high: float
    std: float


def outcomes(scores: ArrayLike, baseline: ArrayLike, margin: float = 0.0) -> Outcomes:
    """Win, tie and lose rates of one policy against another, prompt by prompt.

    Args:
        scores: The policy's scores, `[N]`.
        baseline: The other policy's scores of the same prompts, `[N]`.
        margin: Largest difference that still is a tie, in units of the score.

    Raises:
        ValueError: If the shapes differ, there is no prompt, a score is not finite, or the margin
            is negative.
    """
    ours, theirs = _scores(scores, "scores"), _scores(baseline, "baseline")
    if ours.shape != theirs.shape:
        raise ValueError(
            f"baseline: expected {len(ours)} scores, one for each of scores, got {len(theirs)}"
        )
    if not margin >= 0:
        raise ValueError(f"margin: expected a number >= 0, got {margin}")
    difference = ours - theirs
    win = float(np.mean(difference > margin))
    lose = float(np.mean(difference < -margin))
    tie = float(np.mean(np.abs(difference) <= margin))
    return Outcomes(win, tie, lose)


def score_summary(scores: ArrayLike, seed: int = 0) -> ScoreSummary:
    """Mean score with its 95 % interval: the percentile bootstrap over prompts.

    The same seed draws the same prompts for every policy.

    Args:
        scores: One score for each prompt, `[N]`.
        seed: Of the resampling.

    Raises:
        ValueError: If there is no score, or one is not finite.
    """
    values = _scores(scores, "scores")
    n_prompts = len(values)
    generator = np.random.default_rng(seed)
    means = [values[generator.integers(n_prompts, size=n_prompts)].mean() for _ in range(RESAMPLES)]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    std = values.std(ddof=1) if n_prompts > 1 else 0.0
    return ScoreSummary(float(values.mean()), float(low), float(high), float(std))


def _scores(values: ArrayLike, name: str) -> NDArray[np.float64]:
    scores = np.asarray(values, dtype=np.float64)
    if scores.ndim != 1 or len(scores) == 0:
        raise ValueError(f"{name}: expected shape [N] with N >= 1, got {scores.shape}")
    if not np.isfinite(scores).all():
        raise ValueError(f"{name}: expected finite numbers, got {scores[~np.isfinite(scores)][0]}")
    return scores
