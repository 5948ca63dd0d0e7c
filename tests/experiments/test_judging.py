"""Judgements that several experiments share."""

import math

import pytest

from experiments.judging import Comparison, Interval, compare_by_seed, student_interval


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.2, 0.3, 0.11], "better"),
        ([0.2, 0.3, 0.05], "undecided"),
        ([-0.2, -0.3, -0.11], "worse"),
        ([0.2, -0.3, 0.2], "undecided"),
        ([0.2, 0.3, 1.1 - 1.0], "undecided"),  # 0.10000000000000009
        ([0.2, 0.3, math.nan], "not comparable"),
        ([0.2, 0.3], "open"),
    ],
)
def test_arm_differs_if_it_does_with_each_seed(differences: list[float], verdict: str) -> None:
    assert compare_by_seed(differences, 0.1, seeds=3).verdict == verdict


def test_undecided_comparison_says_its_interval_and_how_large_the_difference_may_be() -> None:
    # mean 0.1, standard deviation 0.05, 4.3027 from two degrees of freedom: half is 0.1242
    either = compare_by_seed([0.05, 0.1, 0.15], 0.1, seeds=3)
    assert str(either) == "+0.100 [-0.024, +0.224], at most 0.224"
    assert not either.is_small_difference
    # mean 0.06 and standard deviation 0.01: half is 0.0248
    higher = compare_by_seed([0.05, 0.06, 0.07], 0.1, seeds=3)
    assert str(higher) == "+0.060 [+0.035, +0.085], at most 0.085"
    lower = compare_by_seed([-0.05, -0.06, -0.07], 0.1, seeds=3)
    assert str(lower) == "-0.060 [-0.085, -0.035], at most 0.085"
    assert higher.is_small_difference
    assert lower.is_small_difference
    assert str(compare_by_seed([0.2, 0.21, 0.22], 0.1, seeds=3)) == "better"
    assert not Comparison("better", Interval(0.1, 0.2, 0.3)).is_small_difference


def test_student_interval_by_hand() -> None:
    # mean 2, standard deviation 1, and 4.30265 from two degrees of freedom
    assert student_interval([1.0, 2.0, 3.0]) == pytest.approx(
        (2 - 4.30265 / math.sqrt(3), 2.0, 2 + 4.30265 / math.sqrt(3)), abs=1e-5
    )
    low, mean, high = student_interval([2.0, 2.0, 2.0], least_spread=0.5)
    assert (low, mean, high) == pytest.approx(
        (2 - 0.5 * 4.30265 / math.sqrt(3), 2.0, 2 + 0.5 * 4.30265 / math.sqrt(3)), abs=1e-5
    )


def test_interval_of_several_comparisons_has_their_part_of_the_error() -> None:
    # with two degrees of freedom the quantile of p is (2 p - 1) / sqrt(2 p (1 - p))
    for comparisons, quantile in ((2, 6.20535), (5, 9.92484)):  # at 0.9875 and at 0.995
        p = 1 - 0.025 / comparisons
        assert (2 * p - 1) / math.sqrt(2 * p * (1 - p)) == pytest.approx(quantile, abs=1e-5)
        half = quantile / math.sqrt(3)
        interval = student_interval([1.0, 2.0, 3.0], comparisons=comparisons)
        assert interval == pytest.approx((2 - half, 2.0, 2 + half), abs=1e-5)


def test_interval_of_more_seeds_keeps_mean_and_spread() -> None:
    # mean 2 and standard deviation 1; 2.77645 from four degrees of freedom
    half = 2.77645 / math.sqrt(5)
    interval = student_interval([1.0, 2.0, 3.0], n_seeds=5)
    assert interval == pytest.approx((2 - half, 2.0, 2 + half), abs=1e-5)
