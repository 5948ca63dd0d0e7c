"""Win, tie and lose rates of one policy against another, and mean scores, with 95 % intervals.

Shares have Wilson's interval, mean scores the percentile bootstrap's.

Notation: `N` prompts.
"""

from collections.abc import Sequence
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
    """Rates at which a policy wins, ties and loses against the baseline on `n` prompts.

    It wins or loses where the scores differ by more than a margin. Intervals are Wilson's, 95 %.
    """

    win: float
    tie: float
    lose: float
    win_interval: Interval
    tie_interval: Interval
    lose_interval: Interval
    n: int


HeadToHeads = tuple[str, dict[str, Outcomes | None]]
"""A reward or a judge's criterion, and each policy's outcomes against the baseline by it.

They are `None` without a single valid verdict.
"""


class ScoreSummary(NamedTuple):
    """Mean over prompts of a policy's scores under one reward, with its 95 % bootstrap interval.

    `std` is the sample standard deviation over prompts; 0 for a single prompt.
    """

    mean: float
    low: float
    high: float
    std: float


def outcome_rates(scores: ArrayLike, baseline: ArrayLike, margin: float = 0.0) -> Outcomes:
    """Win, tie and lose rates of one policy against another by their scores `[N]` or `[N, S]`.

    Scores that differ by `margin` at most are a tie. Of `S` samples, those of the same place are
    compared, and a prompt counts as one trial of the intervals.
    """
    ours, theirs = _check_scores(scores, "scores", 2), _check_scores(baseline, "baseline", 2)
    if ours.shape != theirs.shape:
        raise ValueError(
            f"baseline: expected {len(ours)} scores, one for each of scores, got {len(theirs)}"
        )
    check_not_negative("margin", margin)
    difference = (ours - theirs).reshape(len(ours), -1)
    n = len(difference)
    wins = float((difference > margin).mean(axis=1).sum())
    losses = float((difference < -margin).mean(axis=1).sum())
    ties = max(n - wins - losses, 0.0)
    win, tie, lose = (
        wilson_interval(count, n, confidence=_CONFIDENCE) for count in (wins, ties, losses)
    )
    return Outcomes(wins / n, ties / n, losses / n, win, tie, lose, n)


def score_summary(scores: ArrayLike, seed: int = 0) -> ScoreSummary:
    """Mean score with its 95 % percentile bootstrap interval over prompts.

    Equal seeds resample the same prompts, so the intervals of policies on the same prompts are
    comparable. NumPy's global generator is not used.
    """
    values = _check_scores(scores, "scores")
    generator = np.random.default_rng(seed)
    n = len(values)
    # one resample at a time: all of them at once would take _RESAMPLES times the memory of values
    means = [values[generator.integers(n, size=n)].mean() for _ in range(_RESAMPLES)]
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail]).tolist()
    std = values.std(ddof=1) if n > 1 else 0.0
    return ScoreSummary(float(values.mean()), low, high, float(std))


def outcomes_table(judged: Sequence[HeadToHeads], baseline: str) -> Table:
    """Build a terminal table with a row per policy and criterion, with cells like `50 [44, 56]`."""
    title = f"against {baseline}, % of prompts [95 % interval]"
    headings = ("by", "policy", "win", "tie", "lose", "n")
    table = make_table(title, *headings, n_names=2, no_wrap=True)
    rows = [(by, *one) for by, outcomes in judged for one in outcomes.items()]
    for by, policy, result in rows:
        cells = ["-", "-", "-", "0"]
        if result is not None:
            win, tie, lose, *intervals, n = result
            shares = zip((win, tie, lose), intervals, strict=True)
            cells = [f"{100 * s:.0f} [{100 * i.low:.0f}, {100 * i.high:.0f}]" for s, i in shares]
            cells.append(str(n))
        table.add_row(by, policy, *cells)
    return table


def _check_scores(values: ArrayLike, name: str, dims: int = 1) -> NDArray[np.float64]:
    scores = np.asarray(values, dtype=np.float64)
    if not 1 <= scores.ndim <= dims or len(scores) == 0:
        raise ValueError(f"{name}: expected shape [N] with N >= 1, got {scores.shape}")
    if not np.isfinite(scores).all():
        raise ValueError(f"{name}: expected finite numbers, got {scores[~np.isfinite(scores)][0]}")
    return scores
