"""Win, tie and lose rates of one policy against another, and mean scores, with 95 % intervals.

Shares have Wilson's interval, mean scores the percentile bootstrap's.

Notation: `N` prompts.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from rich.table import Table

from lit_rlhf.checks import check_not_negative
from lit_rlhf.functional import Interval, wilson_interval
from lit_rlhf.tools.evaluation.output import make_table

_RESAMPLES = 2000
_CONFIDENCE = 0.95


class Outcomes(NamedTuple):
    """Rates at which a policy wins, ties and loses against the baseline.

    It wins or loses where the scores differ by more than a margin. Intervals are Wilson's, 95 %.

    Attributes:
        win: Share of prompts on which the policy wins, in [0, 1].
        tie: Share of ties.
        lose: Share of prompts on which the policy loses.
        win_interval: Interval of `win`.
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


class HeadToHeads(NamedTuple):
    """Each policy against the baseline, judged by one reward or one criterion.

    Attributes:
        judge: Name of the reward or of the criterion.
        outcomes: Rates of each policy by its name; `None` without a single valid verdict.
    """

    judge: str
    outcomes: Mapping[str, Outcomes | None]


class ScoreSummary(NamedTuple):
    """Mean over prompts of a policy's scores under one reward, with its 95 % bootstrap interval.

    Attributes:
        mean: Mean over prompts.
        low: Lower end of the interval.
        high: Upper end of the interval.
        std: Sample standard deviation over prompts; 0 for a single prompt.
    """

    mean: float
    low: float
    high: float
    std: float


def outcome_rates(scores: ArrayLike, baseline: ArrayLike, margin: float = 0.0) -> Outcomes:
    """Compute win, tie and lose rates of one policy against another.

    With `S` samples per prompt, samples at the same place are compared, and each prompt counts as
    one trial of the intervals.

    Args:
        scores: Scores of the policy, `[N]` or `[N, S]`, finite.
        baseline: Scores of the other policy on the same prompts, of the same shape.
        margin: Largest difference of two scores that is a tie, at least 0.
    """
    policy_scores = _check_scores(scores, "scores", max_dims=2)
    baseline_scores = _check_scores(baseline, "baseline", max_dims=2)
    if policy_scores.shape != baseline_scores.shape:
        raise ValueError(
            f"baseline: expected {len(policy_scores)} scores, one for each of scores, got "
            f"{len(baseline_scores)}"
        )
    check_not_negative("margin", margin)
    difference = (policy_scores - baseline_scores).reshape(len(policy_scores), -1)
    n_prompts = len(difference)
    wins = float((difference > margin).mean(axis=1).sum())
    losses = float((difference < -margin).mean(axis=1).sum())
    ties = max(n_prompts - wins - losses, 0.0)
    return Outcomes(
        win=wins / n_prompts,
        tie=ties / n_prompts,
        lose=losses / n_prompts,
        win_interval=wilson_interval(wins, n_prompts, confidence=_CONFIDENCE),
        tie_interval=wilson_interval(ties, n_prompts, confidence=_CONFIDENCE),
        lose_interval=wilson_interval(losses, n_prompts, confidence=_CONFIDENCE),
        n=n_prompts,
    )


def score_summary(scores: ArrayLike, seed: int = 0) -> ScoreSummary:
    """Average scores over prompts, with a 95 % percentile bootstrap interval.

    Args:
        scores: One score for each prompt, `[N]`.
        seed: Decides which prompts are drawn again. With the same seed the intervals of policies
            on the same prompts are comparable. NumPy's global generator is not used.
    """
    values = _check_scores(scores, "scores")
    generator = np.random.default_rng(seed)
    n_scores = len(values)
    # one resample at a time: all of them at once would take _RESAMPLES times the memory of values
    means = [values[generator.integers(n_scores, size=n_scores)].mean() for _ in range(_RESAMPLES)]
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail]).tolist()
    std = values.std(ddof=1) if n_scores > 1 else 0.0
    return ScoreSummary(mean=float(values.mean()), low=low, high=high, std=float(std))


def outcomes_table(judged: Sequence[HeadToHeads], baseline: str) -> Table:
    """Build a terminal table with a row per policy and criterion, with cells like `50 [44, 56]`.

    Args:
        judged: Who judged, and how often each policy won.
        baseline: Name of the policy that all others are compared with.
    """
    table = make_table(
        f"against {baseline}, % of prompts [95 % interval]",
        ["by", "policy", "win", "tie", "lose", "n"],
        n_names=2,
        no_wrap=True,
    )
    for judge, outcomes in judged:
        for policy, rates in outcomes.items():
            if rates is None:
                cells = ["-", "-", "-", "0"]
            else:
                cells = [
                    _format_rate(rates.win, rates.win_interval),
                    _format_rate(rates.tie, rates.tie_interval),
                    _format_rate(rates.lose, rates.lose_interval),
                    str(rates.n),
                ]
            table.add_row(judge, policy, *cells)
    return table


def _format_rate(share: float, interval: Interval) -> str:
    return f"{100 * share:.0f} [{100 * interval.low:.0f}, {100 * interval.high:.0f}]"


def _check_scores(values: ArrayLike, name: str, *, max_dims: int = 1) -> NDArray[np.float64]:
    scores = np.asarray(values, dtype=np.float64)
    if not 1 <= scores.ndim <= max_dims or len(scores) == 0:
        raise ValueError(f"{name}: expected shape [N] with N >= 1, got {scores.shape}")
    if not np.isfinite(scores).all():
        raise ValueError(f"{name}: expected finite numbers, got {scores[~np.isfinite(scores)][0]}")
    return scores
