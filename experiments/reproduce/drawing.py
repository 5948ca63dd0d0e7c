"""The figures, in the arrangement of the paper's: means over seeds, with the range as a band."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.drawing import COLORS, STYLE, band, figure_colors, finish_panel
from experiments.reproduce.judging import Runs, Value
from experiments.reproduce.table import LANGUAGES, Arm, Experiment, Foundation

COLUMNS = 4
OUTCOMES = {"win": "#0072B2", "tie": "#D9D9D9", "lose": "#D55E00"}
Results = Mapping[int, Runs]


def runs_of(part: Arm | Foundation, results: Results) -> list[Mapping[str, Any]]:
    """The results of an arm or foundation, one per seed."""
    return [runs[part.name] for runs in results.values() if part.name in runs]


def draw(experiment: Experiment, results: Results) -> Figure:
    """Draw a figure from the results that there are.

    Args:
        experiment: The figure.
        results: Results by seed; only the seeds of the figure are drawn.
    """
    chosen = {seed: runs for seed, runs in results.items() if seed in experiment.seeds}
    drawing = {
        "curves": draw_curves,
        "differences": draw_differences,
        "accuracy": draw_accuracy,
        "outcomes": draw_outcomes,
        "language": draw_language,
        "distribution": draw_distribution,
        "frontier": draw_frontier,
        "monitors": draw_monitors,
        "tricks": draw_tricks,
    }[experiment.kind]
    with rc_context(STYLE):
        return drawing(experiment, chosen)


def shown_course(run: Mapping[str, Any], kind: str, measure: str) -> np.ndarray:
    """A measure over a run; scores start at 0, because each reward model has its own zero."""
    course = np.array(run[kind][measure], float)
    return course - run["samples"]["score"][0] if measure == "score" else course


def draw_course(axis: Axes, measure: str, arms: Sequence[Arm], results: Results) -> None:
    """Draw a measure of several arms over their iterations."""
    colors = figure_colors(arm.label for arm in arms)
    for arm in arms:
        runs = runs_of(arm, results)
        # gold is measured on the same held-out prompts in every sample, so it is less noisy there
        kind = "samples" if measure in ("gold", "win") else "curves"
        courses = [shown_course(run, kind, measure) for run in runs]
        if courses:
            steps = runs[0][kind]["iteration"]
            band(axis, courses, steps, arm.label, colors[arm.label])
    if measure == "gold":
        # the first arm of a figure starts from the SFT policy, others may not
        starts = [run["samples"]["gold"][0] for run in runs_of(arms[0], results)]
        axis.axhline(float(np.mean(starts)), color="#555555", linestyle="--", linewidth=1.0)
    finish_panel(axis, measure)


def draw_curves(experiment: Experiment, results: Results) -> Figure:
    """One panel per measure, one line per arm; the dashed line is SFT's gold."""
    panels = len(experiment.panels)
    columns = panels if panels <= COLUMNS else math.ceil(panels / 2)
    rows = math.ceil(panels / columns)
    figure = Figure(figsize=(3.0 * columns, 2.3 * rows + 0.7))
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for unused in axes[panels:]:
        unused.set_axis_off()
    for axis, measure in zip(axes, experiment.panels, strict=False):
        draw_course(axis, measure, experiment.arms, results)
        axis.set_xlabel("PPO iteration")
    handles, labels = axes[0].get_legend_handles_labels()
    widest = 0.5 + 0.075 * max(map(len, labels))  # inches of a line's sample and label
    fitting = min(4, len(labels), int(figure.get_figwidth() / widest))
    figure.legend(handles, labels, loc="outside upper center", ncols=fitting, fontsize=9)
    return figure


def draw_differences(experiment: Experiment, results: Results) -> Figure:
    """Histograms of chosen minus rejected score, a panel for each language."""
    figure = Figure(figsize=(7.0, 2.8))
    for axis, foundation in zip(figure.subplots(1, 2), experiment.foundations, strict=True):
        for run, color in zip(runs_of(foundation, results), cycle(COLORS), strict=False):
            axis.stairs(run["histogram"], run["histogram_edges"], color=color)
        axis.axvline(0.0, color="black", linewidth=0.8)
        axis.set_title(LANGUAGES[foundation.language])
        axis.set_xlabel("chosen minus rejected score, a line per seed")
    return figure


def draw_accuracy(experiment: Experiment, results: Results) -> Figure:
    """Accuracy over the steps of reward modelling, and PPO on an early and the last model."""
    figure = Figure(figsize=(10.0, 2.9))
    first, *others = figure.subplots(1, 1 + len(experiment.panels))
    for foundation, color in zip(experiment.foundations, COLORS, strict=False):
        runs = runs_of(foundation, results)
        if runs:
            courses = [run["curves"]["accuracy"] for run in runs]
            smooth = [moving_mean(course) for course in courses]
            band(first, smooth, runs[0]["curves"]["step"], foundation.label, color)
    finish_panel(first, "accuracy in training batches")
    first.set_xlabel("step of reward modelling")
    first.legend(fontsize=8)
    for axis, measure in zip(others, experiment.panels, strict=True):
        draw_course(axis, measure, experiment.arms, results)
        axis.set_xlabel("PPO iteration")
    others[0].legend(fontsize=8)
    return figure


def moving_mean(values: Sequence[float], width: int = 9) -> list[float]:
    """Mean over a window around each value."""
    half = width // 2
    return [float(np.mean(values[max(0, i - half) : i + half + 1])) for i in range(len(values))]


def draw_outcomes(experiment: Experiment, results: Results) -> Figure:
    """Win, tie and lose as stacked bars, as in Figure 10; means over seeds."""
    figure = Figure(figsize=(6.6, 2.6))
    axis = figure.subplots()
    bars = [(arm, kind) for arm in experiment.arms for kind in ("helpful", "harmless")]
    for place, (arm, kind) in enumerate(bars):
        start = 0.0
        counts = [run["preferences"][kind] for run in runs_of(arm, results)]
        for outcome, color in OUTCOMES.items() if counts else ():
            share = float(np.mean([run[outcome] for run in counts]))
            label = outcome if place == 0 else None
            axis.barh(place, share, left=start, color=color, height=0.6, label=label)
            if share > 0.02:  # else it is narrower than its number
                axis.text(start + share / 2, place, f"{100 * share:.0f}", ha="center", va="center")
            start += share
    names = [f"{LANGUAGES[arm.foundation.language]}, {kind}" for arm, kind in bars]
    axis.set_yticks(range(len(bars)), names)
    axis.invert_yaxis()
    axis.set_xlabel("share of prompts, PPO-max against SFT by gold")
    figure.legend(loc="outside upper center", ncols=3)
    return figure


def draw_language(experiment: Experiment, results: Results) -> Figure:
    """Perplexity of unseen text before and after PPO, as bars with the range over seeds."""
    figure = Figure(figsize=(5.0, 2.8))
    axis = figure.subplots()
    start = Value(experiment.arms[0], "text_perplexity.sft")
    named = {"SFT": start} | {
        arm.label: Value(arm, "text_perplexity.policy") for arm in experiment.arms
    }
    draw_bars(axis, named, results)
    axis.set_ylabel("perplexity of unseen text")
    return figure


def draw_bars(axis: Axes, named: Mapping[str, Value], results: Results) -> None:
    """Means of numbers as bars, seeds as points; a label says if not all seeds have the number."""
    labels = []
    for place, (name, value) in enumerate(named.items()):
        numbers = [value.of(runs) for runs in results.values() if value.part.name in runs]
        finite = [number for number in numbers if math.isfinite(number)]
        if finite:
            mean = float(np.mean(finite))
            axis.bar(place, mean, color="#9ecae1")
            axis.plot([place - 0.25] * len(finite), finite, "k.", markersize=4)
            axis.text(place + 0.38, mean, f"{mean:.3g}", fontsize=8, ha="right", va="bottom")
        some = len(finite) < len(numbers)
        labels.append(f"{name} ({len(finite)} of {len(numbers)})" if some else name)
    axis.set_xticks(range(len(labels)), labels, rotation=30, ha="right", fontsize=8)
    axis.set_xlim(-0.6, len(labels) - 0.4)


def draw_distribution(experiment: Experiment, results: Results) -> Figure:
    """Histograms of the scores of held-out prompts over the course of a run, of the first seed."""
    figure = Figure(figsize=(6.0, 3.4))
    axis = figure.subplots()
    samples = runs_of(experiment.arms[0], results)[0]["samples"]
    steps = samples["iteration"]
    for row, (step, counts) in enumerate(zip(steps, samples["histograms"], strict=True)):
        color = str(0.8 - 0.8 * row / max(1, len(steps) - 1))
        edges = samples["histogram_edges"]
        axis.stairs(counts, edges, color=color, label=f"iteration {step}")
    axis.set_xlabel("reward model's score")
    axis.set_ylabel("held-out prompts")
    axis.legend(fontsize=8)
    return figure


def draw_frontier(experiment: Experiment, results: Results) -> Figure:
    """Gold and score over the root of KL, as Gao et al. draw them."""
    figure = Figure(figsize=(8.0, 3.2))
    for axis, measure in zip(figure.subplots(1, 2), ("gold", "score"), strict=True):
        colors = figure_colors(arm.label for arm in experiment.arms)
        for arm in experiment.arms:
            color = colors[arm.label]
            for number, run in enumerate(runs_of(arm, results)):
                samples = run["samples"]
                root_kl = np.sqrt(np.maximum(0.0, np.array(samples["kl"], float)))
                label = arm.label if number == 0 else None
                course = shown_course(run, "samples", measure)
                axis.plot(root_kl, course, ".-", color=color, alpha=0.7, label=label)
        finish_panel(axis, measure)
        axis.set_xlabel("root of KL to the reference, nats per response")
    figure.axes[0].legend(fontsize=8)
    return figure


def draw_monitors(experiment: Experiment, results: Results) -> Figure:
    """First iteration at which each monitor warns in vanilla PPO."""
    figure = Figure(figsize=(6.0, 3.2))
    axis = figure.subplots()
    arm = experiment.arms[0]
    signals = runs_of(arm, results)[0]["first_warning"]
    draw_bars(axis, {s: Value(arm, f"first_warning.{s}") for s in signals}, results)
    axis.set_ylabel("first iteration with a warning")
    return figure


def draw_tricks(experiment: Experiment, results: Results) -> Figure:
    """Final gold of all arms as bars; the dashed line is SFT."""
    figure = Figure(figsize=(9.0, 3.6))
    axis = figure.subplots()
    draw_bars(axis, {arm.label: Value(arm, "gold") for arm in experiment.arms}, results)
    first = Value(experiment.arms[0], "gold", "start")
    starts = [first.of(runs) for runs in results.values() if first.part.name in runs]
    if starts:
        axis.axhline(float(np.mean(starts)), color="#555555", linestyle="--", label="SFT")
        axis.legend(fontsize=8)
    axis.set_ylabel("gold reward at the end")
    return figure
