import math
import random
from collections.abc import Sequence

import pytest
import torch

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
    slopes, score = [], 0
    for j in range(len(values)):
        for i in range(j):
            slopes.append((values[j] - values[i]) / (j - i))
            if values[j] > values[i]:
                score += 1
            elif values[j] < values[i]:
                score -= 1
    slopes.sort()
    middle = len(slopes) // 2
    slope = slopes[middle] if len(slopes) % 2 else (slopes[middle - 1] + slopes[middle]) / 2
    n_values = len(values)
    towards_zero = score - 1 if score > 0 else score + 1 if score < 0 else 0
    return slope, towards_zero / math.sqrt(n_values * (n_values - 1) * (2 * n_values + 5) / 18)


@pytest.mark.parametrize("n", [3, 4, 7, 10, 25])
@pytest.mark.parametrize("digits", [0, 6])  # 0: many ties
def test_a_trend_is_that_of_a_loop_over_pairs(n: int, digits: int) -> None:
    rng = random.Random(n)
    for drift in (-0.3, 0.0, 0.3):
        values = [round(drift * i + rng.gauss(0, 1), digits) for i in range(n)]
        assert trend(values) == pytest.approx(loop_trend(values), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 5.0], [3.0] * 10])
def test_few_or_equal_values_have_no_trend(values: list[float]) -> None:
    assert trend(values) == (0.0, 0.0)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 97])
def test_distribution_is_that_of_torch(n: int) -> None:
    rng = random.Random(n)
    numbers = [math.exp(rng.gauss(0, 1)) - 2.0 for _ in range(n)]
    tensor = torch.tensor(numbers, dtype=torch.float64)
    places = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
    moments = [float(tensor.mean()), float(tensor.std(correction=0))]
    expected = [*torch.quantile(tensor, places).tolist(), *moments]
    shape = distribution(numbers)
    summary = [shape[key] for key in ("q05", "median", "q95", "mean", "std")]
    assert summary == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("numbers", [[], [math.nan, 1.0], [1.0, 2.0, math.inf], [-math.inf] * 3])
def test_what_is_not_finite_has_no_shape(numbers: list[float]) -> None:
    assert all(map(math.isnan, distribution(numbers).values()))
