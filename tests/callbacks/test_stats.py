import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch

from lit_callbacks.monitors import TREND_SCORE, VISIBLE_TREND_SCORE
from lit_callbacks.stats import distribution, noise_of, trend


def test_noise_of_a_series_is_estimated_from_neighbours_without_its_trend() -> None:
    rng = random.Random(0)
    noise = [rng.gauss(0, 2) for _ in range(4000)]
    drifting = [3.0 * i + x for i, x in enumerate(noise)]
    assert noise_of(noise) == pytest.approx(2.0, rel=0.05)
    assert noise_of(drifting) == pytest.approx(noise_of(noise), rel=1e-9)


def test_noise_is_not_raised_by_a_jump_or_by_what_is_not_finite() -> None:
    assert noise_of([1.0, 1.0, 1.0, 1.0, 9.0, 9.0, 9.0]) == 0.0
    # by hand: differences 1, -1, 1, -1 with median 0 and absolute deviations of 1
    assert noise_of([0.0, math.nan, 1.0, 0.0, 1.0, 0.0]) == pytest.approx(1.4826 / math.sqrt(2))
    assert noise_of([5.0, 1.0, 5.0]) == 0.0


def loop_trend(values: Sequence[float]) -> tuple[float, float]:
    """Theil-Sen's slope and Mann-Kendall's score, pair by pair."""
    slopes, s = [], 0
    for j in range(len(values)):
        for i in range(j):
            slopes.append((values[j] - values[i]) / (j - i))
            if values[j] > values[i]:
                s += 1
            elif values[j] < values[i]:
                s -= 1
    slopes.sort()
    middle = len(slopes) // 2
    slope = slopes[middle] if len(slopes) % 2 else (slopes[middle - 1] + slopes[middle]) / 2
    n = len(values)
    towards_zero = s - 1 if s > 0 else s + 1 if s < 0 else 0
    return slope, towards_zero / math.sqrt(n * (n - 1) * (2 * n + 5) / 18)


@pytest.mark.parametrize("n", [3, 4, 7, 10, 25])
@pytest.mark.parametrize("digits", [0, 6])  # 0: many ties
def test_a_trend_is_that_of_a_loop_over_pairs(n: int, digits: int) -> None:
    rng = random.Random(n)
    for drift in (-0.3, 0.0, 0.3):
        values = [round(drift * i + rng.gauss(0, 1), digits) for i in range(n)]
        assert trend(values) == pytest.approx(loop_trend(values), rel=1e-12, abs=1e-12)


def test_a_trend_by_hand() -> None:
    # pairs rise by 1, 3/2, 1, 2, 1, 0: sorted 0, 1, 1, 1, 1.5, 2; five of six rise, one is a tie
    slope, score = trend([0.0, 1.0, 3.0, 3.0])
    assert slope == 1.0
    assert score == pytest.approx(4 / math.sqrt(4 * 3 * 13 / 18), rel=1e-12)


@pytest.mark.parametrize("scale", [math.exp, math.atan, lambda x: 1000 * x - 7])
def test_the_score_knows_only_the_order(scale: Callable[[float], float]) -> None:
    rng = random.Random(3)
    values = [0.2 * i + rng.gauss(0, 1) for i in range(12)]
    assert trend([scale(v) for v in values])[1] == trend(values)[1] != 0


def test_one_wild_value_makes_no_trend_and_hides_none() -> None:
    flat = [1.0, 1.2, 0.9, 1.1, 1.0, 0.8, 1.1, 0.9, 1.0, 1e6]
    slope, score = trend(flat)
    assert abs(score) < 1
    assert abs(slope) < 0.1
    line = [float(i) for i in range(10)]
    line[4] = -1e6
    slope, score = trend(line)
    assert slope == pytest.approx(1.0, abs=0.01)
    assert score > TREND_SCORE


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 5.0], [3.0] * 10])
def test_few_or_equal_values_have_no_trend(values: list[float]) -> None:
    assert trend(values) == (0.0, 0.0)


def chance_of_a_trend(limit: float, n: int = 10) -> float:
    """Probability that n numbers in random order score `limit` or more, up or down: exact.

    The number of orders with k inversions grows by one factor 1 + x + ... + x^(m - 1) for each m.
    """
    orders = [1]
    for m in range(1, n + 1):
        grown = [0] * (len(orders) + m - 1)
        for inversions, count in enumerate(orders):
            for more in range(m):
                grown[inversions + more] += count
        orders = grown
    pairs, deviation = n * (n - 1) // 2, math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    beyond = 0
    for inversions, count in enumerate(orders):
        if abs(pairs - 2 * inversions) - 1 >= limit * deviation:
            beyond += count
    return beyond / math.factorial(n)


def share_of_trends(memory: float) -> float:
    """Share of stretches of ten readings of autoregressive noise that look like a trend."""
    rng, value, hits, trials = random.Random(0), 0.0, 0, 4000
    series = []
    for _ in range(10 * trials):
        value = memory * value + rng.gauss(0, 1)
        series.append(value)
    for i in range(trials):
        hits += abs(trend(series[10 * i : 10 * i + 10])[1]) >= TREND_SCORE
    return hits / trials


def test_chance_makes_a_trend_as_often_as_the_comment_at_the_limit_says() -> None:
    assert round(1 / chance_of_a_trend(TREND_SCORE)) == 213
    assert round(1 / chance_of_a_trend(VISIBLE_TREND_SCORE)) == 35
    assert share_of_trends(memory=0.0) == pytest.approx(1 / 213, abs=0.003)
    # noise with memory makes more of them
    assert share_of_trends(memory=0.5) == pytest.approx(1 / 25, abs=0.01)


def test_a_distribution_by_hand() -> None:
    # 21 numbers: places 1, 10 and 19
    numbers = [float(i) for i in range(19)] + [49.0, 1000.0]
    shape = distribution(numbers)
    assert (shape["q05"], shape["median"], shape["q95"]) == (1.0, 10.0, 49.0)
    # 0, 0, 0, 4: deviations -1, -1, -1, 3; places 0.15, 1.5 and 2.85 among the sorted four
    shape = distribution([0.0, 4.0, 0.0, 0.0])
    expected = {"mean": 1.0, "std": math.sqrt(3), "q05": 0.0, "median": 0.0, "q95": 0.85 * 4}
    assert shape == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 97])
def test_quantiles_are_those_of_torch(n: int) -> None:
    rng = random.Random(n)
    numbers = [math.exp(rng.gauss(0, 1)) - 2.0 for _ in range(n)]
    both = torch.tensor(numbers, dtype=torch.float64)
    places = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
    expected = [*torch.quantile(both, places).tolist(), float(both.std(correction=0))]
    shape = distribution(numbers)
    assert [shape[k] for k in ("q05", "median", "q95", "std")] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("numbers", [[], [math.nan, 1.0], [1.0, 2.0, math.inf], [-math.inf] * 3])
def test_what_is_not_finite_has_no_shape(numbers: list[float]) -> None:
    assert all(map(math.isnan, distribution(numbers).values()))
