"""Win, tie and lose rates of one policy against another, and mean scores, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from rich import box
from rich.table import Table

from lit_rlhf.functional import Interval

RESAMPLES = 2000


CONFIDENCE = 0.95


class Outcomes(NamedTuple):
    """How often a policy won, tied and lost against the baseline.

    Attributes:
        win: Share of prompts with a higher score than the baseline's, by more than the margin.
        tie: Share of prompts with scores within the margin of each other.
        lose: Share of prompts with a lower score, by more than the margin.
        win_interval: Interval of `win`. That of a share of 0 or 1 has no width.
        tie_interval: Interval of `tie`.
        lose_interval: Interval of `lose`.
        n: Number of prompts.
    """

    win: float
    tie: float
    lose: float
    win_interval: Interval
    tie_interval: Interval
    lose_interval: Interval
    n: int


class HeadToHead(NamedTuple):
    """One policy against the baseline, by one judge.

    Attributes:
        policy: Name of the policy.
        by: Who decided: a reward's name, or the criterion of a language-model judge.
        outcomes: What came out; `None` if there was not one valid verdict.
    """

    policy: str
    by: str
    outcomes: Outcomes | None


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


def outcome_rates(
    scores: ArrayLike, baseline: ArrayLike, margin: float = 0.0, seed: int = 0
) -> Outcomes:
    """Win, tie and lose rates of one policy against another, prompt by prompt.

    Their intervals are the percentile bootstrap's over prompts.

    Args:
        scores: The policy's scores, `[N]`.
        baseline: The other policy's scores of the same prompts, `[N]`.
        margin: Largest difference that still is a tie, in units of the score.
        seed: Of the resampling.

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
    happened = np.stack(
        [difference > margin, np.abs(difference) <= margin, difference < -margin], axis=1
    ).astype(np.float64)
    win, tie, lose = happened.mean(axis=0).tolist()
    win_interval, tie_interval, lose_interval = bootstrap_intervals(happened, seed)
    return Outcomes(win, tie, lose, win_interval, tie_interval, lose_interval, len(ours))


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
    interval = bootstrap_intervals(values[:, None], seed)[0]
    std = values.std(ddof=1) if len(values) > 1 else 0.0
    return ScoreSummary(float(values.mean()), *interval, float(std))


def bootstrap_intervals(values: NDArray[np.float64], seed: int = 0) -> list[Interval]:
    """95 % intervals of the means over the first axis: the percentile bootstrap.

    Args:
        values: `[N, K]`; the `K` columns are resampled together.
        seed: Of the resampling.

    Returns:
        `K` intervals.
    """
    generator = np.random.default_rng(seed)
    n = len(values)
    means = [values[generator.integers(n, size=n)].mean(axis=0) for _ in range(RESAMPLES)]
    tail = (1 - CONFIDENCE) / 2
    ends = np.quantile(means, [tail, 1 - tail], axis=0)
    return [Interval(low, high) for low, high in ends.T.tolist()]


def _scores(values: ArrayLike, name: str) -> NDArray[np.float64]:
    scores = np.asarray(values, dtype=np.float64)
    if scores.ndim != 1 or len(scores) == 0:
        raise ValueError(f"{name}: expected shape [N] with N >= 1, got {scores.shape}")
    if not np.isfinite(scores).all():
        raise ValueError(f"{name}: expected finite numbers, got {scores[~np.isfinite(scores)][0]}")
    return scores


def outcomes_table(rows: Sequence[HeadToHead], baseline: str) -> Table:
    """A row for each policy under each judge: win, tie and lose with their intervals."""
    table = Table(
        box=box.HORIZONTALS,
        padding=(0, 1),
        title=f"against {baseline}, % of prompts [95 % interval]",
    )
    for heading in ("by", "policy"):
        table.add_column(heading, overflow="fold")
    for heading in ("win", "tie", "lose", "prompts"):
        table.add_column(heading, justify="right")
    for row in rows:
        result = row.outcomes
        cells = ("-", "-", "-", "0")
        if result is not None:
            cells = (
                share_with_interval(result.win, *result.win_interval),
                share_with_interval(result.tie, *result.tie_interval),
                share_with_interval(result.lose, *result.lose_interval),
                str(result.n),
            )
        table.add_row(row.by, row.policy, *cells)
    return table


def share_with_interval(share: float, low: float, high: float) -> str:
    """A share and its interval in per cent."""
    return f"{100 * share:.0f} [{100 * low:.0f}, {100 * high:.0f}]"
