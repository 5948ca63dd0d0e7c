"""Confidence intervals of shares, errors of ratios, and the best of n samples."""

import math
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from lit_rlhf.checks import check_count, check_number
from lit_rlhf.tensor_checks import check_floating

__all__ = [
    "Interval",
    "best_of_n",
    "best_of_n_kl",
    "ratio_error",
    "wilson_interval",
]


class Interval(NamedTuple):
    """A confidence interval.

    Attributes:
        low: Lower end.
        high: Upper end, at least `low`.
    """

    low: float
    high: float


def wilson_interval(successes: float, trials: int, *, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a share (Wilson 1927, J. Am. Stat. Assoc. 22, 209).

    (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n), where p is the share of
    successes in n trials and z the quantile of the normal distribution.

    Unlike the normal approximation (share +- 1.96 standard errors) it stays within [0, 1] and does
    not shrink to a point when all or none of the trials succeed.

    Args:
        successes: Trials that succeeded, from 0 to `trials`. A tie may count as half a success.
        trials: All trials, at least 1.
        confidence: Probability that the interval covers the true share, in (0, 1).

    Returns:
        The interval, within [0, 1].

    Examples:
        >>> low, high = wilson_interval(8, 10)
        >>> round(low, 3), round(high, 3)
        (0.49, 0.943)
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(
            "successes: expected a number from 0 to trials, and trials >= 1, got "
            f"{successes} and {trials}"
        )
    check_number("confidence", confidence, "a number in (0, 1)", lambda p: 0 < p < 1)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = successes / trials
    center = share + z**2 / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2))
    scale = 1 + z**2 / trials
    # rounding can leave [0, 1] by a last digit at a share of 0 or 1
    return Interval(max(0.0, (center - half) / scale), min(1.0, (center + half) / scale))


def ratio_error(numerators: Tensor, denominators: Tensor) -> float:
    """Standard error of a ratio of sums over independent units, such as a loss per token.

    sqrt(k / (k - 1) * sum of (y_i - R x_i)^2) / sum of x_i, where unit i of k has the numerator
    y_i and the denominator x_i, and R is the ratio of the sums (Cochran 1977, Sampling Techniques,
    section 6.4).

    Args:
        numerators: One number of each unit, for instance the summed loss of a dialogue, `[k]`.
        denominators: The same of what it is divided by, for instance its tokens, `[k]`.

    Returns:
        The error in the units of the ratio; infinite for a single unit.

    Examples:
        >>> ratio_error(torch.tensor([2.0, 6.0]), torch.tensor([2.0, 2.0]))  # a mean of 1 and 3
        1.0
    """
    check_floating(1, numerators=numerators, denominators=denominators)
    n_units = len(numerators)
    if n_units < 2:
        return math.inf
    total = denominators.double().sum()
    ratio = numerators.double().sum() / total
    squares = (numerators.double() - ratio * denominators.double()).square().sum()
    return float((n_units / (n_units - 1) * squares).sqrt() / total)


def best_of_n(proxies: Tensor, values: Tensor, n: int) -> Tensor:
    """Expected value of the best by `proxies` of `n` samples, over all subsets of `N` samples.

    The unbiased estimate of Nakano et al. 2021 (arXiv 2112.09332, Appendix I): of `N` samples in
    ascending order, the i-th (from 1) is the best of C(i - 1, n - 1) of the C(N, n) subsets. Equal
    scores share their weights.

    Args:
        proxies: Scores that choose the best sample, `[B, N]`.
        values: What is measured of the sample that was chosen, for instance another judge's score,
            `[B, N]`.
        n: Samples to choose from, 1 to `N`.

    Returns:
        Expected value for each row, `[B]` float64, in the units of `values`.

    Examples:
        >>> proxies, values = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.0, 0.3, 0.9]])
        >>> round(float(best_of_n(proxies, values, 2)), 4)  # 0.3 of one pair, 0.9 of two
        0.7
    """
    check_floating(2, proxies=proxies, values=values)
    n_samples = proxies.shape[-1]
    if not 1 <= n <= n_samples:
        raise ValueError(f"n: expected a number from 1 to {n_samples} samples, got {n}")
    chances = torch.tensor(
        [0.0, *(math.comb(i, n) / math.comb(n_samples, n) for i in range(1, n_samples + 1))],
        dtype=torch.float64,
    )  # that the best is among the i lowest
    below = (proxies.unsqueeze(-1) > proxies.unsqueeze(-2)).sum(-1)
    up_to = (proxies.unsqueeze(-1) >= proxies.unsqueeze(-2)).sum(-1)
    weights = (chances[up_to] - chances[below]) / (up_to - below)
    return (weights * values.double()).sum(-1)


def best_of_n_kl(n: int) -> float:
    """KL(best of n || policy) between the best of `n` samples and the policy: log n - (n - 1) / n.

    An upper bound where scores can be equal (Beirami et al. 2024, arXiv 2401.01879).

    Args:
        n: Samples to choose from, at least 1.

    Returns:
        KL, nats per response, at least 0.

    Examples:
        >>> best_of_n_kl(1)
        0.0
    """
    check_count("n", n)
    return math.log(n) - (n - 1) / n
