"""The gate and the criterion. Both stand before any reward model of this experiment is trained.

The set-up is Gao et al.'s (arXiv 2210.10760) and Coste et al.'s (arXiv 2310.02743): a gold reward
model labels the pairs that the proxies learn from. Its score, less what length is worth to it, is
the truth by definition, see `labels`.

The gate, before any PPO with a proxy: its agreement with the truth on the test pairs is at least
0.62, and its correlation with the truth within the test prompts at least 0.2. Otherwise the answer
is more pairs, and not other rates.

The criterion:

1. With 300 pairs, vanilla PPO's gold peaks and falls below its peak and below SFT's, by paired
   intervals, in 3 of 3 seeds.
2. With 1,000 pairs the peak is higher and later.
3. PPO-max ends above vanilla PPO and above SFT.

Canned share and distinct bigrams are shown beside. A gain by monotony does not count: the variety
is within 20 % of SFT's, or it is said.

How these words are measured: "gold" is the truth. A run's course has the 96 held-out prompts at
iterations 0, 20, 40, 60, 80 and 100, one response each by the same random numbers; the peak is the
highest mean. The run peaks if this is neither the first nor the last point. The fall from the peak
is the paired difference of the last point and the peak; what is above or below SFT or another
policy at the end is the paired difference over the same prompts with eight responses each. A
difference counts if its 95 % interval, a bootstrap over prompts, leaves out 0. Parts 2 and 3 hold
if they hold in each seed, part 3 with both sizes. Variety is the share of distinct bigrams. If the
gate asks for more pairs, the sizes are multiplied alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.known_truth.criterion import Difference, paired_difference

VERSION = "1, 2026-11-28"
LEAST_AGREEMENT = 0.62
LEAST_CORRELATION = 0.2
LEAST_VARIETY = 0.8
"""Share of SFT's distinct bigrams that a policy keeps, at least."""

Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Gate:
    """How well a proxy knows the truth near SFT.

    Attributes:
        agreement: Share of test pairs that it orders as the truth does; a tie counts half.
        correlation: Correlation with the truth within prompts.
    """

    agreement: float
    correlation: float

    @property
    def is_open(self) -> bool:
        """Whether PPO may begin."""
        return self.agreement >= LEAST_AGREEMENT and self.correlation >= LEAST_CORRELATION


def agreement(chosen: Scores, rejected: Scores) -> float:
    """Share of pairs whose chosen response scores higher; a tie counts half.

    Args:
        chosen: Scores of the responses that the truth prefers, `[N]`.
        rejected: Scores of the others, `[N]`.
    """
    return float(np.mean((np.sign(chosen - rejected) + 1) / 2))


def correlation_within(first: Scores, second: Scores) -> float:
    """Correlation of deviations from each prompt's mean, over all prompts together.

    Args:
        first: Scores of each prompt's responses, `[N, S]`.
        second: Other scores of the same responses, `[N, S]`.
    """
    a, b = (scores - scores.mean(1, keepdims=True) for scores in (first, second))
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))


@dataclass(frozen=True)
class Course:
    """The truth of a policy over a run.

    Attributes:
        iterations: Iteration of each point, `P` of them, ascending.
        truth: Truth of its responses to the held-out prompts, `[P, N]`.
    """

    iterations: tuple[int, ...]
    truth: Scores

    @property
    def peak(self) -> int:
        """Place of the point with the highest mean."""
        return int(self.truth.mean(1).argmax())

    @property
    def peak_iteration(self) -> int:
        """Iteration of the peak."""
        return self.iterations[self.peak]

    @property
    def peak_mean(self) -> float:
        """Mean truth at the peak."""
        return float(self.truth[self.peak].mean())

    @property
    def fall(self) -> Difference:
        """Paired difference of the last point and the peak."""
        return paired_difference(self.truth[-1], self.truth[self.peak])


@dataclass(frozen=True)
class Run:
    """A seed's runs with one size of the proxy's data.

    Attributes:
        vanilla: Course of vanilla PPO.
        ends: Truth of `sft`, `ppo_vanilla` and `ppo_max` at the end, `[N, S]` each.
    """

    vanilla: Course
    ends: Mapping[str, Scores]

    def difference(self, first: str, second: str) -> Difference:
        """Paired difference of two policies at the end."""
        return paired_difference(self.ends[first], self.ends[second])


def falls(run: Run) -> bool:
    """Part 1: vanilla PPO peaks and falls below its peak and below SFT."""
    peaks = 0 < run.vanilla.peak < len(run.vanilla.iterations) - 1
    below_sft = run.difference("ppo_vanilla", "sft").high < 0
    return peaks and run.vanilla.fall.high < 0 and below_sft


def peaks_later(few: Run, many: Run) -> bool:
    """Part 2: with more pairs vanilla PPO's peak is higher and later."""
    is_higher = many.vanilla.peak_mean > few.vanilla.peak_mean
    return is_higher and many.vanilla.peak_iteration > few.vanilla.peak_iteration


def improves(run: Run) -> bool:
    """Part 3: PPO-max ends above vanilla PPO and above SFT."""
    return all(run.difference("ppo_max", other).low > 0 for other in ("ppo_vanilla", "sft"))


def keeps_variety(distinct: float, sft: float) -> bool:
    """Whether a policy keeps its variety.

    Args:
        distinct: Its share of distinct bigrams.
        sft: SFT's.
    """
    return distinct >= LEAST_VARIETY * sft


def judge(few: Mapping[int, Run], many: Mapping[int, Run]) -> dict[str, bool]:
    """Whether each part of the criterion holds in all seeds.

    Args:
        few: Runs by seed with the smaller proxies.
        many: Runs of the same seeds with the larger ones.
    """
    return {
        "1 falls": all(falls(run) for run in few.values()),
        "2 higher and later": all(peaks_later(few[seed], many[seed]) for seed in few),
        "3 PPO-max improves": all(improves(run) for runs in (few, many) for run in runs.values()),
    }
