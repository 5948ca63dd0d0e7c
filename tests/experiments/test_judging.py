"""Judgements that several experiments share."""

import math

import pytest

from experiments.judging import compare_by_seed, student_interval


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.2, 0.3, 0.11], "better"),
        ([0.2, 0.3, 0.05], "no difference shown"),
        ([-0.2, -0.3, -0.11], "worse"),
        ([0.2, -0.3, 0.2], "no difference shown"),
        ([0.2, 0.3, 1.1 - 1.0], "no difference shown"),  # 0.10000000000000009
        ([0.2, 0.3, math.nan], "not comparable"),
        ([0.2, 0.3], "open"),
    ],
)
def test_arm_differs_if_it_does_with_each_seed(differences: list[float], verdict: str) -> None:
    assert compare_by_seed(differences, 0.1, seeds=3) == verdict


def test_student_interval_by_hand() -> None:
    # mean 2, standard deviation 1, and 4.303 from two degrees of freedom
    assert student_interval([1.0, 2.0, 3.0]) == pytest.approx(
        (2 - 4.303 / math.sqrt(3), 2.0, 2 + 4.303 / math.sqrt(3))
    )
    low, mean, high = student_interval([2.0, 2.0, 2.0], least_spread=0.5)
    assert (low, mean, high) == pytest.approx(
        (2 - 0.5 * 4.303 / math.sqrt(3), 2.0, 2 + 0.5 * 4.303 / math.sqrt(3))
    )
