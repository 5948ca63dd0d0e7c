"""How the benchmark of the detector moves thresholds, and when it calls a flag in time."""

import json
from pathlib import Path

import pytest

from benchmarks.collapse import (
    PAGE,
    RESULT,
    Detection,
    compare_with_harm,
    format_page,
    scale_thresholds,
)
from lit_callbacks import KLMonitor, LengthMonitor, PerplexityMonitor


def test_thresholds_move_as_far_from_the_baseline_as_the_factor_says() -> None:
    kl = scale_thresholds(KLMonitor(high=10.0), 0.5)
    assert kl.high == pytest.approx(5.0)
    length = scale_thresholds(LengthMonitor(high_ratio=1.6, low_ratio=0.5), 2.0)
    assert (length.high_ratio, length.low_ratio) == pytest.approx((2.2, 0.0))
    perplexity = scale_thresholds(PerplexityMonitor(low_ratio=0.6, high_ratio=2.0), 0.5)
    assert (perplexity.low_ratio, perplexity.high_ratio) == pytest.approx((0.8, 1.5))


KL = [0.1, 0.1, 0.1, 0.1, 0.9, 2.0, 3.0, 9.0]
GOLD = [0.5, 0.6, 0.5, 0.8, 0.2, -0.4, -1.0, -2.0]


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    rows = [f"{k},{kl},{gold}" for k, (kl, gold) in enumerate(zip(KL, GOLD, strict=True), start=1)]
    (tmp_path / "metrics.csv").write_text("\n".join(["step,rollout/kl,rollout/gold", *rows]) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("detection", "in_time"),
    [
        (Detection(7, 5), True),  # flagged after harm, but the harmed iteration was not healthy
        (Detection(7, 6), False),
        (Detection(None, 5), False),  # never flagged
    ],
)
def test_flag_is_in_time_before_any_harm(logs: Path, detection: Detection, in_time: bool) -> None:
    figures = compare_with_harm(logs, detection, bound=-0.3)
    assert figures["harmed_at"] == 6
    assert figures["in_time"] is in_time


def test_page_agrees_with_the_results() -> None:
    rows = json.loads(RESULT.read_text("utf-8"))
    assert PAGE.read_text("utf-8") == format_page(rows), "run python -m benchmarks.collapse report"


def test_run_without_harm_is_flagged_in_time(logs: Path) -> None:
    assert compare_with_harm(logs, Detection(7, 6), bound=-9.0)["in_time"]
