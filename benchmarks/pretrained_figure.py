"""The figure about the pretrained model: what its PPO runs do to the scores and the monitors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.reproduce.drawing import COLORS, STYLE, band, finish_panel

RUNS = {
    "ppo_vanilla": "vanilla PPO",
    "ppo_max": "PPO-max",
    "ppo_fast": "vanilla PPO, 5x the learning rates",
    "ppo_faster": "vanilla PPO, 20x",
}
"""Names of runs, without their seeds, and what the legend calls them."""
PANELS = {
    "rollout/score/reward": "proxy score, above the start",
    "rollout/score/gold": "gold score, above the start",
    "rollout/kl": "kl",
    "rollout/response_length": "response_length",
    "rollout/perplexity": "perplexity",
}
"""Metrics of the panels, and their titles or the names by which `finish_panel` knows them."""
SCORES = ("rollout/score/reward", "rollout/score/gold")
WINDOW = 4
"""Iterations of a mean: one has 16 rollouts only, whose scores are noisy."""


def draw(results: Mapping[str, Any]) -> Figure:
    """Draw the PPO runs among the results; the last panel has gold over the root of KL.

    Args:
        results: Results of the finished steps by name.
    """
    with rc_context(STYLE):  # type: ignore[arg-type]  # older stubs type the keys
        figure = Figure(figsize=(10.5, 5.6))
        axes = figure.subplots(2, 3).flatten()
        for (run, label), color in zip(RUNS.items(), COLORS, strict=False):
            curves = [
                results[name]["result"]["curves"]
                for name in sorted(results)
                if name.rpartition("_")[0] == run
            ]
            if curves:
                draw_run(axes, curves, label, color)
        for axis, title in zip(axes, [*PANELS.values(), "gold over KL"], strict=True):
            finish_panel(axis, title)
            axis.set_xlabel("PPO iteration")
        axes[-1].set_xlabel("root of KL, nats per response")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
        return figure


def draw_run(
    axes: Sequence[Axes], curves: Sequence[Mapping[str, Sequence[float]]], label: str, color: str
) -> None:
    """Draw the runs of all seeds into all panels."""
    for axis, key in zip(axes, PANELS, strict=False):
        courses = [smooth(curve[key], above_start=key in SCORES) for curve in curves]
        steps = np.arange(len(courses[0])) + (WINDOW + 1) / 2
        band(axis, courses, steps.tolist(), label, color)
    for curve in curves:
        root_kl = np.sqrt(np.maximum(0.0, smooth(curve["rollout/kl"])))
        gold = smooth(curve["rollout/score/gold"], above_start=True)
        axes[-1].plot(root_kl[::WINDOW], gold[::WINDOW], ".-", color=color, alpha=0.7)


def smooth(course: Sequence[float], above_start: bool = False) -> np.ndarray:
    """Means of `WINDOW` iterations in a row, `[N - WINDOW + 1]`.

    Args:
        course: A value of each iteration, `[N]`.
        above_start: Whether to subtract the first mean.
    """
    means = np.convolve(course, np.full(WINDOW, 1 / WINDOW), mode="valid")
    return means - means[0] if above_start else means
