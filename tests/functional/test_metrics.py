"""Wilson's interval, errors of ratios and the best of n, against their definitions."""

import math
from itertools import combinations

import pytest
import torch

from lit_rlhf.functional import best_of_n, best_of_n_kl, ratio_error, wilson_interval


def test_the_ends_of_the_interval_are_where_the_share_is_just_not_rejected() -> None:
    # by definition: the share lies z standard errors away from each end, with the error at that end
    low, high = wilson_interval(7, 20)
    for end in (low, high):
        error = math.sqrt(end * (1 - end) / 20)
        assert abs(7 / 20 - end) / error == pytest.approx(1.959964, rel=1e-6)
    assert low < 7 / 20 < high


def test_the_interval_of_all_or_no_successes_has_a_width_within_0_and_1() -> None:
    z2 = 1.959963985**2
    assert wilson_interval(10, 10) == pytest.approx((10 / (10 + z2), 1.0))
    assert wilson_interval(0, 10) == pytest.approx((0.0, z2 / (10 + z2)))
    for trials in range(1, 200):
        assert wilson_interval(trials, trials).high <= 1.0
        assert wilson_interval(0, trials).low >= 0.0
    with pytest.raises(ValueError, match="trials >= 1, got 0 and 0"):
        wilson_interval(0, 0)


def test_more_confidence_is_a_wider_interval_and_half_successes_count() -> None:
    assert wilson_interval(5, 10, confidence=0.99).low < wilson_interval(5, 10).low
    low, high = wilson_interval(0.5, 1)
    assert (low + high) / 2 == pytest.approx(0.5)


def test_the_error_of_a_ratio_is_that_of_its_units() -> None:
    # 9 of 6: residuals of 2 - 1.5 * 1, 3 - 1.5 * 3 and 4 - 1.5 * 2
    error = ratio_error(torch.tensor([2.0, 3.0, 4.0]), torch.tensor([1.0, 3.0, 2.0]))
    assert error == pytest.approx(math.sqrt(3 / 2 * (0.5**2 + 1.5**2 + 1.0**2)) / 6)
    # with equal denominators it is the standard error of the mean
    values = torch.tensor([1.0, 4.0, 2.0, 8.0])
    expected = float(values.std() / math.sqrt(4)) / 5
    assert ratio_error(values, torch.full((4,), 5.0)) == pytest.approx(expected)
    assert ratio_error(torch.ones(1), torch.ones(1)) == math.inf
    # float32 numbers are summed in float64
    numerators, denominators = torch.tensor([[0.1, 0.7, 0.3, 2.9], [1.1, 3.3, 0.7, 1.9]])
    pairs = list(zip(numerators.tolist(), denominators.tolist(), strict=True))
    total = math.fsum(x for _, x in pairs)
    ratio = math.fsum(y for y, _ in pairs) / total
    squares = math.fsum((y - ratio * x) ** 2 for y, x in pairs)
    exact = math.sqrt(4 / 3 * squares) / total
    assert ratio_error(numerators, denominators) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("scores", [[0.3, -1.0, 2.0, 0.5, 1.0], [1.0, 0.0, 1.0, 0.0, 1.0]])
def test_best_of_n_is_the_mean_over_all_subsets(scores: list[float], n: int) -> None:
    values, means = [0.1, 0.2, 0.4, 0.8, 1.6], []
    for subset in combinations(range(5), n):
        best = max(scores[i] for i in subset)
        tied = [values[i] for i in subset if scores[i] == best]
        means.append(sum(tied) / len(tied))
    exact = torch.tensor([values], dtype=torch.float64)
    estimate = best_of_n(torch.tensor([scores]), exact, n)
    assert estimate.tolist() == pytest.approx([sum(means) / len(means)], rel=1e-12)


def test_best_of_n_by_hand() -> None:
    scores, values = torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([[0.9, 0.0, 0.3]])
    # two of the three pairs have the best sample, and one has the second
    assert float(best_of_n(scores, values, 2)) == pytest.approx((2 * 0.9 + 0.3) / 3)
    assert float(best_of_n(scores, values, 1)) == pytest.approx(0.4)
    assert best_of_n_kl(4) == pytest.approx(math.log(4) - 0.75)
    with pytest.raises(ValueError, match="from 1 to 3 samples, got 4"):
        best_of_n(scores, values, 4)
