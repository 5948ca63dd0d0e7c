"""The figures of comparisons, read back from matplotlib."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from lit_rlhf.functional import Interval
from lit_rlhf.tools.evaluation import Comparison, kl_figure, outcome_figure, save_figure
from lit_rlhf.tools.evaluation.compare import BestOf, PolicyReport
from lit_rlhf.tools.evaluation.outcomes import HeadToHeads, Outcomes, ScoreSummary

PPO_MAX = Outcomes(
    win=0.44,
    tie=0.26,
    lose=0.3,
    win_interval=Interval(0.37, 0.51),
    tie_interval=Interval(0.2, 0.32),
    lose_interval=Interval(0.24, 0.36),
    n=200,
)
VANILLA = Outcomes(
    win=0.2,
    tie=0.02,
    lose=0.78,
    win_interval=Interval(0.1, 0.3),
    tie_interval=Interval(0.0, 0.04),
    lose_interval=Interval(0.7, 0.88),
    n=200,
)
JUDGED = [
    HeadToHeads(judge="helpful", outcomes={"ppo_max": PPO_MAX, "vanilla": VANILLA}),
    HeadToHeads(judge="harmless", outcomes={"ppo_max": None}),
]


def test_outcome_figure_draws_every_share_as_a_bar_behind_the_one_before(tmp_path: Path) -> None:
    figure = outcome_figure(JUDGED, "sft")
    axes, silent = figure.axes
    assert axes.get_title(loc="left") == "helpful"
    bars = [(b.get_y() + b.get_height() / 2, b.get_x(), b.get_width()) for b in axes.patches]
    expected = [
        (0, 0.0, 0.44),
        (0, 0.44, 0.26),
        (0, 0.7, 0.3),
        (1, 0.0, 0.2),
        (1, 0.2, 0.02),
        (1, 0.22, 0.78),
    ]
    assert bars == [pytest.approx(bar) for bar in expected]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["ppo_max", "vanilla"]
    assert axes.yaxis_inverted()  # the first policy is on top
    assert [text.get_text() for text in axes.texts] == ["44", "26", "30", "20", "78"]
    assert ([*silent.patches], silent.texts[0].get_text()) == ([], "no valid verdict")
    path = save_figure(figure, tmp_path / "new" / "chart.svg")
    assert path.read_text("utf-8").startswith("<?xml")


def test_outcome_figure_draws_the_intervals_of_win_above_and_of_lose_below() -> None:
    axes = outcome_figure(JUDGED, "sft").axes[0]
    intervals = [np.asarray(line.get_xydata()).tolist() for line in axes.lines]
    expected = [
        [[0.37, -0.35], [0.51, -0.35]],
        [[0.64, 0.35], [0.76, 0.35]],  # lose is counted from the right end
        [[0.1, 0.65], [0.3, 0.65]],
        [[0.12, 1.35], [0.3, 1.35]],
    ]
    np.testing.assert_allclose(intervals, expected, atol=1e-12)


def test_outcome_figure_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="chart: expected verdicts of a reward or a judge"):
        outcome_figure([], "sft")


def report(kl: float, score: ScoreSummary) -> PolicyReport:
    return PolicyReport(path="", scores={"gold": score}, outcomes={}, metrics={"kl": kl})


def test_kl_figure_draws_scores_and_intervals_over_the_square_root_of_the_kl() -> None:
    comparison = Comparison(
        policies={
            "sft": report(-0.5, ScoreSummary(mean=0.1, low=0.0, high=0.3, std=1.0)),
            "ppo": report(9.0, ScoreSummary(mean=1.0, low=0.8, high=1.1, std=1.0)),
        },
        samples={},
        rewards={"gold": "gold.py"},
        n_prompts=3,
        shortened=0,
        best_of=[
            BestOf(
                n=4,
                kl=4.0,
                scores={"gold": ScoreSummary(mean=0.5, low=0.4, high=0.7, std=1.0)},
                differences={},
            )
        ],
    )
    (axes,) = kl_figure(comparison).axes
    lines = [np.asarray(line.get_xydata()).tolist() for line in axes.lines]
    assert lines == [
        [[0.0, 0.1]],  # an estimate below 0 is drawn at 0
        [[0.0, 0.0], [0.0, 0.3]],
        [[3.0, 1.0]],
        [[3.0, 0.8], [3.0, 1.1]],
        [[2.0, 0.5]],
        [[2.0, 0.4], [2.0, 0.7]],
        [[2.0, 0.5]],  # the line through all n
    ]
    assert axes.texts[0].get_text() == "4"
    assert math.isclose(axes.texts[0].xy[0], 2.0)  # type: ignore[attr-defined]
    assert axes.get_legend_handles_labels()[1] == ["sft", "ppo", "best of n"]


def test_name_with_signs_of_formulas_is_drawn_as_it_is(tmp_path: Path) -> None:
    name = "a$\\frac$b"
    figure = outcome_figure([HeadToHeads(judge=name, outcomes={name: PPO_MAX})], name)
    assert save_figure(figure, tmp_path / "a.png").stat().st_size > 0
    assert figure.axes[0].get_title(loc="left") == name
