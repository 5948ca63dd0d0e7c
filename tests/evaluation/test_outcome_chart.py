from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_rlhf.evaluation import HeadToHead, Outcomes
from lit_rlhf.evaluation.outcome_chart import outcomes_chart, outcomes_figure
from lit_rlhf.functional import Interval

MAX = Outcomes(
    0.44, 0.26, 0.3, Interval(0.37, 0.51), Interval(0.2, 0.32), Interval(0.24, 0.36), 200
)
VANILLA = Outcomes(0.2, 0.02, 0.78, Interval(0.1, 0.3), Interval(0, 0.04), Interval(0.7, 0.88), 200)
ROWS = [
    HeadToHead("ppo_max", "helpful", MAX),
    HeadToHead("vanilla", "helpful", VANILLA),
    HeadToHead("ppo_max", "harmless", None),
]


def drawn(figure: Figure, title: str) -> Axes:
    (axis,) = (axis for axis in figure.axes if axis.get_title(loc="left") == title)
    return axis


def test_every_share_is_a_bar_behind_the_one_before() -> None:
    axis = drawn(outcomes_figure(ROWS, "sft"), "helpful")

    bars = [
        (bar.get_y() + bar.get_height() / 2, bar.get_x(), bar.get_width()) for bar in axis.patches
    ]
    expected = [
        *((0, 0.0, 0.44), (0, 0.44, 0.26), (0, 0.7, 0.3)),
        *((1, 0.0, 0.2), (1, 0.2, 0.02), (1, 0.22, 0.78)),
    ]
    assert bars == [pytest.approx(bar) for bar in expected]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["ppo_max", "vanilla"]
    assert axis.yaxis_inverted()  # the first policy is on top
    assert [text.get_text() for text in axis.texts] == ["44", "26", "30", "20", "78"]


def test_lines_are_the_intervals_of_win_and_of_lose() -> None:
    axis = drawn(outcomes_figure(ROWS, "sft"), "helpful")

    ends = [line.get_xdata() for line in axis.lines]
    assert [list(pair) for pair in ends[:2]] == [
        pytest.approx([0.37, 0.51]),
        pytest.approx([1 - 0.36, 1 - 0.24]),  # lose is counted from the right
    ]


def test_a_policy_without_a_verdict_has_no_bar() -> None:
    axis = drawn(outcomes_figure(ROWS, "sft"), "harmless")

    assert list(axis.patches) == []
    assert [text.get_text() for text in axis.texts] == ["no valid verdict"]


def test_the_baseline_is_named() -> None:
    figure = outcomes_figure(ROWS, "my_sft")

    assert "against my_sft" in figure.axes[-1].get_xlabel()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["win", "tie", "lose"]


def test_the_suffix_is_the_format(tmp_path: Path) -> None:
    path = outcomes_chart(ROWS, "sft", tmp_path / "new" / "chart.svg")

    assert path.read_text("utf-8").startswith("<?xml")


def test_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="chart: expected verdicts of a reward or a judge"):
        outcomes_figure([], "sft")
