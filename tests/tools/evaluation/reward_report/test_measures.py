import math

import numpy as np
import pytest

from lit_rlhf.tools.evaluation.reward_report.measures import (
    accuracy,
    calibration_error,
    correlation,
    histogram,
    length_buckets,
    reliability,
)


def test_accuracy_counts_ties_as_misses_and_equal_lengths_as_half() -> None:
    found = accuracy(np.array([2.0, -1.0, 0.0, 3.0]), np.array([5, 5, 0, -2]))
    assert found.pairs == 4
    assert found.accuracy == 0.5
    assert found.margin == 1.0
    assert found.longer == (1 + 1 + 0.5 + 0) / 4
    assert found.low < 0.5 < found.high


def test_buckets_are_thirds_of_the_size_on_either_side() -> None:
    lengths = np.array([-9, -6, -1, 0, 1, 2, 3, 4, 5, 30])
    differences = np.array([-1.0, 1, -1, 1, 1, 1, -1, 1, 1, -1])
    # sizes 1 1 2 3 4 5 6 9 30: a third at 2 + 2/3, two thirds at 5 + 1/3
    buckets = length_buckets(differences, lengths)
    found = [(b.label, b.accuracy.pairs, b.accuracy.accuracy) for b in buckets]
    assert found == [
        ("-6 or less", 2, 0.5),
        ("-2 to -1", 1, 0.0),
        ("0", 1, 1.0),
        ("1 to 2", 2, 1.0),
        ("3 to 5", 3, pytest.approx(2 / 3)),
        ("6 or more", 1, 0.0),
    ]


def test_every_pair_is_in_one_bucket() -> None:
    rng = np.random.default_rng(0)
    for scale in (0, 1, 2, 300):
        lengths = rng.integers(-scale, scale + 1, size=200)
        buckets = length_buckets(rng.normal(size=200), lengths)
        assert sum(bucket.accuracy.pairs for bucket in buckets) == 200
        for bucket in buckets:
            low = -math.inf if bucket.low is None else bucket.low
            high = math.inf if bucket.high is None else bucket.high
            assert bucket.accuracy.pairs == ((lengths >= low) & (lengths <= high)).sum()


def test_reliability_and_its_error_by_hand() -> None:
    # confidences 1/2 (twice: a tie, a miss), then 0.9 (hit, miss, hit) and 0.9999
    logit = math.log(0.9 / 0.1)
    differences = np.array([0.0, -1e-9, logit, -logit, logit, 9.2])
    unsure, sure, certain = reliability(differences)
    assert (unsure.pairs, unsure.accuracy) == (2, 0.0)
    assert (sure.pairs, sure.accuracy) == (3, pytest.approx(2 / 3))
    assert sure.confidence == pytest.approx(0.9)
    assert sure.low < 2 / 3 < sure.high
    assert (certain.pairs, certain.accuracy) == (1, 1.0)
    expected = (2 * 0.5 + 3 * (0.9 - 2 / 3) + (1 - 1 / (1 + math.exp(-9.2)))) / 6
    assert calibration_error(differences) == pytest.approx(expected, abs=1e-6)


def test_histogram_bars_never_cross_zero_and_hold_every_pair() -> None:
    differences = np.array([-0.31, -0.01, 0.0, 0.01, 0.49, 0.5, 90.0] * 100)
    differences[-1] = 1e6
    sources = ["a", "a", "a", "a", "b", "b", "b"] * 100
    edges, counts = histogram(differences, sources).values()
    assert 0.0 in edges
    widths = np.diff(edges)
    assert np.allclose(widths, widths[0])
    middle = edges.index(0.0)
    assert sum(counts["a"][:middle]) == 200
    assert sum(counts["a"][middle:]) == 200
    assert sum(counts["b"]) == 300


def test_a_model_that_scores_all_alike_has_a_histogram_too() -> None:
    edges, counts = histogram(np.zeros(3), ["a"] * 3).values()
    assert counts["a"][edges.index(0.0)] == 3


def test_correlations() -> None:
    # x: 1 2 3 4, y: 1 3 2 10; deviations -3/2.. and -3 -1 -2 6
    expected = (4.5 + 0.5 - 1 + 9) / math.sqrt(5 * 50)
    found = correlation(np.array([1, 2, 3, 4]), np.array([1.0, 3.0, 2.0, 10.0]))
    assert found["pearson"] == pytest.approx(expected)
    assert found["spearman"] == pytest.approx(1 - 6 * 2 / (4 * 15), abs=1e-5)
    none = {"pearson": None, "spearman": None}
    assert correlation(np.array([1, 1]), np.array([1.0, 2.0])) == none
    assert correlation(np.array([1]), np.array([1.0])) == {"pearson": None, "spearman": None}
