from __future__ import annotations

import math

import pytest

from lit_rlhf.functional import wilson_interval


def test_the_ends_are_where_the_share_is_just_not_rejected() -> None:
    # by definition: the share lies z standard errors, those of the end, away from each end
    low, high = wilson_interval(7, 20)

    for end in (low, high):
        error = math.sqrt(end * (1 - end) / 20)
        assert abs(7 / 20 - end) / error == pytest.approx(1.959964, rel=1e-6)
    assert low < 7 / 20 < high


def test_all_and_none_have_a_width() -> None:
    z2 = 1.959963985**2
    assert wilson_interval(10, 10) == pytest.approx((10 / (10 + z2), 1.0))
    assert wilson_interval(0, 10) == pytest.approx((0.0, z2 / (10 + z2)))


def test_more_confidence_is_wider_and_half_hits_count() -> None:
    assert wilson_interval(5, 10, 0.99).low < wilson_interval(5, 10).low
    low, high = wilson_interval(0.5, 1)
    assert (low + high) / 2 == pytest.approx(0.5)


@pytest.mark.parametrize(("hits", "trials", "confidence"), [(1, 0, 0.95), (3, 2, 0.95), (1, 2, 1)])
def test_numbers_out_of_range(hits: int, trials: int, confidence: float) -> None:
    with pytest.raises(ValueError, match="expected a number"):
        wilson_interval(hits, trials, confidence)
