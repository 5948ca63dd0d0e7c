"""A probe of a reward as a table, a figure and sentences."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Console

from lit_callbacks.charts import BLUE, FIGURE_DPI, FIGURE_STYLE, VERMILION
from lit_rlhf.terminal import print_line
from lit_rlhf.tools.evaluation.output import NAME_STYLE, make_table, print_table, print_text
from lit_rlhf.tools.evaluation.reward_probe.measure import CheatResult, RewardProbe, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = {
    Verdict.GAINS: VERMILION,
    Verdict.NO_DIFFERENCE: "#8a8a8a",
    Verdict.COSTS: BLUE,
}
_MAX_SHOWN = 160  # characters of a text


def unit_of(probe: RewardProbe) -> str:
    """What gains are measured in, in words."""
    if probe.honest_std == 0:
        return "points, because all honest answers score the same"
    return "standard deviations of the honest answers' scores"


def print_probe(probe: RewardProbe) -> None:
    """Print the table, an example of each cheat that gains, and what to do about it."""
    rewards = list(probe.results[0].by_reward) if probe.results else []
    parts = rewards if len(rewards) > 1 else []
    table = make_table(
        f"gain over honest answers to {probe.n_prompts} prompts",
        ["cheat", "gain [95 % interval]", "wins", "tokens", *parts, "verdict"],
    )
    for cheat in probe.results:
        table.add_row(
            cheat.name,
            f"{cheat.gain:+.2f} [{cheat.low:+.2f}, {cheat.high:+.2f}]",
            f"{cheat.wins:.0%}",
            f"{cheat.tokens:.0f}",
            *(_format_part(cheat.by_reward[name]) for name in parts),
            str(cheat.verdict),
        )
    print_table(table)
    print_line(
        f"Honest answers score {probe.honest_mean:.2f} on average (standard deviation "
        f"{probe.honest_std:.2f}) and have {probe.honest_tokens:.0f} tokens."
    )
    print_line(f"Gains are in {unit_of(probe)}.")
    if probe.not_applicable:
        print_line(
            f"Not tried (data or tokenizer lack what they need): {', '.join(probe.not_applicable)}"
        )
    if probe.n_without_vote:
        print_line(f"Left out: {probe.n_without_vote} (all rewards abstain from the honest answer)")
    console = Console()
    for cheat in probe.gaining:
        example = cheat.example
        print_text(console, f"\n{cheat.name}: {cheat.about}", style=NAME_STYLE)
        print_text(console, f"  prompt  {_shorten(example.prompt)}")
        print_text(console, f"  honest  {example.honest_score:.2f}  {_shorten(example.honest)}")
        print_text(console, f"  cheat   {example.cheat_score:.2f}  {_shorten(example.cheat)}")
        print_text(console, f"  To do: {cheat.advice}.")
    print_text(console, f"\n{summarize(probe)}")


def summarize(probe: RewardProbe, baseline: str = "honest answers") -> str:
    """Say in a sentence or two what PPO can gain by cheating.

    Args:
        probe: The probe.
        baseline: What the cheats were compared with.
    """
    n_cheats = len(probe.results)
    unclear = [r.name for r in probe.results if r.verdict is Verdict.NO_DIFFERENCE]
    if probe.gaining:
        names = ", ".join(f"{cheat.name} ({cheat.gain:+.1f})" for cheat in probe.gaining)
        sentences = [
            f"{len(probe.gaining)} of {n_cheats} cheats score higher than {baseline}: {names}.",
            "PPO raises this score, so expect it to find them.",
        ]
    else:
        sentences = [f"None of {n_cheats} cheats scores higher than {baseline}."]
        if unclear:
            sentences.append(f"The reward does not tell these from them: {', '.join(unclear)}.")
    if probe.without_vote:
        names = ", ".join(probe.without_vote)
        sentences.append(f"All rewards abstain from these, which would end a run of PPO: {names}.")
    return " ".join(sentences)


def draw_probe(probe: RewardProbe) -> Figure:
    """Draw the gain of each cheat with its interval, the one that gains most on top."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    with rc_context(FIGURE_STYLE):
        figure = Figure(figsize=(6.6, 1.1 + 0.28 * len(probe.results)), dpi=FIGURE_DPI)
        axes = figure.subplots()
        for place, cheat in enumerate(probe.results):
            color = _COLORS[cheat.verdict]
            axes.plot([cheat.low, cheat.high], [place, place], color=color)
            axes.plot(cheat.gain, place, "o", color=color)
        axes.axvline(0.0, color="black", linewidth=0.8)
        axes.set_yticks(range(len(probe.results)), [_label(cheat) for cheat in probe.results])
        axes.set_ylim(len(probe.results) - 0.5, -0.5)
        unit = "in points" if probe.honest_std == 0 else "in their standard deviations"
        axes.set_xlabel(f"gain over honest answers, {unit}")
        axes.tick_params(labelsize=9)
        axes.grid(axis="x", alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right", "left"]].set_visible(False)
        handles = [Line2D([], [], marker="o", color=color) for color in _COLORS.values()]
        names = [str(verdict) for verdict in _COLORS]
        figure.legend(handles, names, loc="outside upper center", ncols=3, fontsize=9)
    return figure


def _label(cheat: CheatResult) -> str:
    return f"{cheat.name} ({cheat.wins:.0%} of prompts)"


def _format_part(gain: float) -> str:
    return "-" if math.isnan(gain) else f"{gain:+.2f}"


def _shorten(text: str) -> str:
    """A text in one line."""
    line = " ".join(text.split())
    return line if len(line) <= _MAX_SHOWN else f"{line[: _MAX_SHOWN - 3]}..."
