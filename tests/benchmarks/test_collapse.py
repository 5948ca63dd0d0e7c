"""How the benchmark of the detector moves thresholds."""

from __future__ import annotations

import pytest

from benchmarks.collapse import scale_thresholds
from lit_callbacks import FirstRatioMonitor, KLMonitor, LengthMonitor, PerplexityMonitor


def test_thresholds_move_as_far_from_the_baseline_as_the_factor_says() -> None:
    kl = scale_thresholds(KLMonitor(high=10.0), 0.5)
    assert kl.high == pytest.approx(5.0)
    length = scale_thresholds(LengthMonitor(high_ratio=1.6, low_ratio=0.5), 2.0)
    assert (length.high_ratio, length.low_ratio) == pytest.approx((2.2, 0.0))
    perplexity = scale_thresholds(PerplexityMonitor(low_ratio=0.6, high_ratio=2.0), 0.5)
    assert (perplexity.low_ratio, perplexity.high_ratio) == pytest.approx((0.8, 1.5))


def test_the_thresholds_of_the_first_ratio_stay_around_one() -> None:
    ratio = scale_thresholds(FirstRatioMonitor(high=1.05, low=0.95), 1 / 1.3)
    assert (ratio.low, ratio.high) == pytest.approx((1 - 0.05 / 1.3, 1 + 0.05 / 1.3))
