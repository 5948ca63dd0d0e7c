"""Figures of comparisons: who wins against a baseline, and scores against the KL."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lit_callbacks.charts import BLUE, FIGURE_DPI, FIGURE_STYLE, VERMILION, figure_colors
from lit_rlhf.files import replace_file
from lit_rlhf.tools.evaluation.outcomes import HeadToHeads, Outcomes, ScoreSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lit_rlhf.tools.evaluation.compare import Comparison

_OUTCOME_COLORS = {"win": BLUE, "tie": "#D9D9D9", "lose": VERMILION}
_OUTCOME_TEXT_COLORS = {"win": "white", "tie": "black", "lose": "white"}
_NARROW = 0.035  # a share below this has no room for its number
_BEST_OF_COLOR = "0.45"  # a gray


def save_figure(figure: Figure, output: str | Path) -> Path:
    """Write a figure into a file.

    Args:
        figure: The figure.
        output: The file; its suffix is the format, such as `.png`.
    """
    path = Path(output)
    with replace_file(path) as file:
        figure.savefig(file, format=path.suffix.removeprefix("."))
    return path


def outcome_figure(judged: Sequence[HeadToHeads], baseline: str) -> Figure:
    """Draw win, tie and lose shares as one stacked bar per policy, with one panel per judge.

    As in Figure 10 of arXiv 2307.04964. The lines above and below a bar are the 95 % intervals of
    win and of lose.

    Args:
        judged: Who judged, and how often each policy won.
        baseline: Name of the policy that all others are compared with.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import PercentFormatter

    if not judged:
        raise ValueError("chart: expected verdicts of a reward or a judge to draw, got none")
    heights = [len(by_judge.outcomes) for by_judge in judged]
    with rc_context(FIGURE_STYLE):
        height = 0.9 + 0.45 * sum(heights) + 0.4 * len(heights)
        figure = Figure(figsize=(6.6, height), dpi=FIGURE_DPI)
        panels = figure.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights)
        for axes, by_judge in zip(panels[:, 0], judged, strict=True):
            _draw_judge(axes, by_judge.judge, by_judge.outcomes)
        lowest = panels[-1, 0]
        lowest.set_xlabel(f"share of prompts, against {baseline}; lines: 95 % intervals")
        lowest.xaxis.set_major_formatter(PercentFormatter(1.0))
        handles = [Patch(facecolor=color) for color in _OUTCOME_COLORS.values()]
        figure.legend(
            handles, list(_OUTCOME_COLORS), loc="outside upper center", ncols=3, fontsize=10
        )
    return figure


def kl_figure(comparison: Comparison) -> Figure:
    """Draw scores against the square root of the KL from the baseline, with a panel per reward.

    As in Figure 1 of arXiv 2210.10760. Lines at the points are 95 % intervals.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rewards = list(comparison.rewards)
    colors = figure_colors(comparison.policies)
    with rc_context(FIGURE_STYLE):
        figure = Figure(figsize=(0.6 + 3.4 * len(rewards), 3.2), dpi=FIGURE_DPI)
        panels = figure.subplots(1, len(rewards), squeeze=False)[0]
        for axes, reward in zip(panels, rewards, strict=True):
            for name, report in comparison.policies.items():
                _draw_point(
                    axes,
                    kl=report.metrics["kl"],
                    score=report.scores[reward],
                    color=colors[name],
                    label=name,
                )
            _draw_best_of(axes, comparison, reward)
            axes.set_title(reward)
            axes.set_xlabel(f"square root of the KL from {comparison.baseline}, nats")
            axes.grid(alpha=0.25, linewidth=0.6)
        panels[0].set_ylabel("mean score")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=9)
    return figure


def _draw_best_of(axes: Axes, comparison: Comparison, reward: str) -> None:
    """Draw the best of n of the baseline as a line with a numbered point for each n."""
    places = []
    means = []
    for best in comparison.best_of:
        score = best.scores[reward]
        _draw_point(axes, kl=best.kl, score=score, color=_BEST_OF_COLOR)
        places.append(math.sqrt(best.kl))
        means.append(score.mean)
        axes.annotate(str(best.n), (places[-1], means[-1]), fontsize=8)
    if places:
        axes.plot(places, means, color=_BEST_OF_COLOR, label="best of n")


def _draw_point(
    axes: Axes, *, kl: float, score: ScoreSummary, color: str, label: str | None = None
) -> None:
    """Draw a mean score with its interval over the square root of a KL."""
    place = math.sqrt(max(kl, 0.0))  # an estimate may be negative
    axes.plot([place], [score.mean], "o", color=color, label=label)
    axes.plot([place] * 2, [score.low, score.high], color=color)


def _draw_judge(axes: Axes, judge: str, outcomes: Mapping[str, Outcomes | None]) -> None:
    """Draw the panel of one judge, with a bar for each policy."""
    for place, rates in enumerate(outcomes.values()):
        if rates is not None:
            _draw_bar(axes, place, rates)
        else:
            axes.text(0.01, place, "no valid verdict", va="center", fontsize=9)
    axes.set_yticks(range(len(outcomes)), list(outcomes), fontsize=9)
    axes.set_ylim(len(outcomes) - 0.5, -0.5)  # the first policy on top
    axes.set_xlim(0, 1)
    axes.set_title(judge)
    axes.tick_params(length=0, labelsize=9)
    axes.spines[:].set_visible(False)


def _draw_bar(axes: Axes, place: int, outcomes: Outcomes) -> None:
    """Draw the shares of one policy side by side, with the intervals of win and lose."""
    start = 0.0
    for name, color in _OUTCOME_COLORS.items():
        share = getattr(outcomes, name)
        axes.barh(place, share, left=start, height=0.56, color=color)
        if share >= _NARROW:
            axes.text(
                start + share / 2,
                place,
                f"{100 * share:.0f}",
                ha="center",
                va="center",
                color=_OUTCOME_TEXT_COLORS[name],
            )
        start += share
    win = outcomes.win_interval
    lose = outcomes.lose_interval
    axes.plot([win.low, win.high], [place - 0.35] * 2, color=_OUTCOME_COLORS["win"])
    # Lose is counted from the right end of the bar.
    axes.plot([1 - lose.high, 1 - lose.low], [place + 0.35] * 2, color=_OUTCOME_COLORS["lose"])
