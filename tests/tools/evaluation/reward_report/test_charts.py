"""The charts of the page about a reward model, read back from matplotlib."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from lit_callbacks.charts import COLORS, to_svg
from lit_rlhf.tools.evaluation.reward_report.charts import (
    draw_accuracy_by_length,
    draw_histogram,
    draw_reliability,
    draw_scatter,
)
from lit_rlhf.tools.evaluation.reward_report.measures import length_buckets, reliability

DIFFERENCES = np.array([2.0, -1.0, 0.5, 3.0])
LENGTHS = np.array([5, 5, 0, -2])


def assert_draws_accuracies(axes: Axes, entries: list[Any]) -> None:
    intervals: Any
    dots: Any
    intervals, dots = axes.collections
    assert [float(y) for _, y in dots.get_offsets()] == [entry.accuracy for entry in entries]
    ends = [list(path.vertices[:, 1]) for path in intervals.get_paths()]
    assert ends == [[entry.low, entry.high] for entry in entries]


def test_reliability_chart_draws_accuracies_with_their_intervals_over_confidence() -> None:
    bins = reliability(DIFFERENCES)
    axes = draw_reliability(bins)
    assert_draws_accuracies(axes, list(bins))
    dots: Any = axes.collections[1]
    assert [float(x) for x, _ in dots.get_offsets()] == [entry.confidence for entry in bins]


def test_length_chart_draws_accuracies_with_their_intervals_by_bucket() -> None:
    buckets = length_buckets(DIFFERENCES, LENGTHS)
    axes = draw_accuracy_by_length(buckets)
    assert_draws_accuracies(axes, [bucket.accuracy for bucket in buckets])
    labels = [label.get_text().replace("\n", " ") for label in axes.get_xticklabels()]
    assert labels == [bucket.label for bucket in buckets]


def test_scatter_chart_holds_every_pair_with_lengths_across() -> None:
    dots: Any
    (dots,) = draw_scatter(np.array([3, -1]), np.array([0.5, 2.0])).collections
    assert dots.get_offsets().tolist() == [[3.0, 0.5], [-1.0, 2.0]]


def test_histogram_has_the_color_of_rejected_responses_left_of_zero() -> None:
    axes = draw_histogram(edges=[-1.0, 0.0, 1.0, 2.0], counts=[3, 5, 7], x_title="difference")
    bars = [(bar.get_x(), bar.get_height(), to_hex(bar.get_facecolor())) for bar in axes.patches]
    wrong, right = COLORS["collapsed-band"], COLORS["c0"]
    assert bars == [(-1.0, 3, wrong), (0.0, 5, right), (1.0, 7, right)]
    assert axes.get_xlabel() == "difference"


def test_equal_charts_are_equal_bytes() -> None:
    first, second = (to_svg(draw_scatter(LENGTHS, DIFFERENCES), "pairs") for _ in range(2))
    assert first == second
