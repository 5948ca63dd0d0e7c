"""Who wins, as stacked bars: a panel for each judge, as in Figure 10 of arXiv 2307.04964."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lit_rlhf.evaluation.outcomes import HeadToHead, Outcomes

_COLORS = {"win": "#0072B2", "tie": "#D9D9D9", "lose": "#D55E00"}
_TEXT = {"win": "white", "tie": "black", "lose": "white"}
_NARROW = 0.035  # a share below this has no room for its number


def outcomes_chart(rows: Sequence[HeadToHead], baseline: str, output: str | Path) -> Path:
    """Draw how often policies won, tied and lost against the baseline into a file.

    Args:
        rows: As for `outcomes_figure`.
        baseline: Name of the policy that the others were compared with.
        output: Where the figure goes; its suffix is its format, for instance `.png`.

    Returns:
        The path of the figure.

    Raises:
        ValueError: As `outcomes_figure`, and for a format that matplotlib does not know.
    """
    path = Path(output)
    figure = outcomes_figure(rows, baseline)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def outcomes_figure(rows: Sequence[HeadToHead], baseline: str) -> Figure:
    """Win, tie and lose shares as one bar for each policy, a panel for each judge.

    The lines above and below a bar are the 95 % intervals of win and of lose.

    Args:
        rows: Who won, by which judge.
        baseline: Name of the policy that the others were compared with.

    Raises:
        ValueError: If there is nothing to draw.
    """
    if not rows:
        raise ValueError("chart: expected verdicts of a reward or a judge to draw, got none")
    by_judge: dict[str, list[HeadToHead]] = {}
    for row in rows:
        by_judge.setdefault(row.by, []).append(row)
    heights = [len(group) for group in by_judge.values()]
    figure = Figure(
        figsize=(6.6, 0.9 + 0.45 * sum(heights) + 0.4 * len(heights)),
        dpi=160,
        layout="constrained",
    )
    axes = figure.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights)
    for axis, (by, group) in zip(axes[:, 0], by_judge.items(), strict=True):
        for place, row in enumerate(group):
            if row.outcomes is not None:
                _draw_bar(axis, place, row.outcomes)
            else:
                axis.text(0.01, place, "no valid verdict", va="center", fontsize=9)
        axis.set_yticks(range(len(group)), [row.policy for row in group], fontsize=9)
        axis.set_ylim(len(group) - 0.5, -0.5)
        axis.set_xlim(0, 1)
        axis.set_title(by, fontsize=10, loc="left")
        axis.tick_params(length=0, labelsize=9)
        axis.spines[:].set_visible(False)
    axis.set_xlabel(f"share of prompts, against {baseline}; lines: 95 % intervals", fontsize=9)
    axis.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    figure.legend(
        [Patch(facecolor=color) for color in _COLORS.values()],
        list(_COLORS),
        loc="outside upper center",
        ncols=3,
        frameon=False,
        fontsize=10,
    )
    return figure


def _draw_bar(axis: Axes, place: int, outcomes: Outcomes) -> None:
    left = 0.0
    for name, color in _COLORS.items():
        share = getattr(outcomes, name)
        axis.barh(place, share, left=left, height=0.56, color=color)
        if share >= _NARROW:
            middle, written = left + share / 2, f"{100 * share:.0f}"
            axis.text(middle, place, written, ha="center", va="center", color=_TEXT[name])
        left += share
    win, lose = outcomes.win_interval, outcomes.lose_interval
    axis.plot([win.low, win.high], [place - 0.35] * 2, color=_COLORS["win"])
    axis.plot([1 - lose.high, 1 - lose.low], [place + 0.35] * 2, color=_COLORS["lose"])
