"""The page about the pretrained model with its figure and tables, from the benchmark's results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.drawing import STYLE, band, figure_colors, finish_panel
from experiments.frame import fill_template
from experiments.results_file import table

PAGE_TEMPLATE = Path(__file__).with_suffix(".md.j2")
TABLES_TEMPLATE = Path(__file__).with_name("results.md.j2")
NOT_RUN = "not run yet"

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


def format_page(results: Mapping[str, Any]) -> str:
    """Format the page: what each part shows, in sentences.

    Args:
        results: Results of the finished steps by name, and `settings`.
    """
    runs = [
        {"name": name, **step["result"]} for name, step in sorted(results.items()) if is_ppo(name)
    ]
    reports = {name: figures_of(results, f"report_{name}") for name in ("reward", "reward_lora")}
    return fill_template(
        PAGE_TEMPLATE,
        perplexity={name: perplexity(results, name) for name in ("base", "sft", "sft_lora")},
        accuracy={name: share(r["accuracy"]) if r else NOT_RUN for name, r in reports.items()},
        gain="" if reports["reward"] is None else format_gain(reports["reward"]),
        watched=len(runs),
        cut_off=format_cut_off(runs),
        flagged=[run for run in runs if run["flagged_at"] is not None],
        faster=figures_of(results, "faster_policies_0"),
        total=format_total(results),
        window=WINDOW,
    )


def format_cut_off(runs: Sequence[Mapping[str, Any]]) -> str:
    """How the share of responses that reach the longest length goes with the proxy's score."""
    curves = [r["curves"] for r in runs if r["name"].startswith(("ppo_max", "ppo_vanilla"))]
    if not curves:
        return ""
    cut, score = (
        np.array([curve[key] for curve in curves])
        for key in ("rollout/truncation_rate", "rollout/score/reward")
    )
    first, last = (100 * part.mean(1) for part in (cut[:, :WINDOW], cut[:, -WINDOW:]))
    correlation = np.corrcoef(cut.ravel(), score.ravel())[0, 1]
    return (
        f"{first.min():.0f} to {first.max():.0f} % reach it in\n  the first {WINDOW} iterations, "
        f"{last.min():.0f} to {last.max():.0f} % in the last {WINDOW}, and the correlation of this "
        f"share\n  with the proxy's score is {correlation:.2f}"
    )


def is_ppo(name: str) -> bool:
    """Whether a step is a PPO run."""
    return name.startswith("ppo_")


def format_tables(results: Mapping[str, Any]) -> str:
    """Format all tables and samples.

    Args:
        results: Results of the finished steps by name, and `settings`.
    """
    settings = results["settings"]
    tables = {
        "split": format_split(settings["split"]),
        "trial": format_trial(results.get("trial_with_harmless")),
        "sft": format_sft(results),
        "reward_models": format_reward_models(results),
        "ppo": format_ppo(results),
        "detector": format_detector(results),
        "faster": format_faster(results),
        "lora": format_lora(results),
        "total": format_total(results),
        "times": format_times(results),
    }
    return fill_template(
        TABLES_TEMPLATE,
        max_response=settings["sizes"]["max_response"],
        machine=settings["machine"],
        precision=settings["precision"],
        **{name: text.strip("\n") for name, text in tables.items()},
    )


def format_split(split: Mapping[str, Mapping[str, int]]) -> str:
    """Table of the number of pairs by part and source."""
    sources = list(split["all"])
    names = {"all": "all that can be read", "gold": "gold", "proxy": "proxy"}
    names |= {"val": "validation", "test": "test"}
    rows = [
        [name, *(f"{split[key][source]:,}" for source in sources), f"{sum(split[key].values()):,}"]
        for key, name in names.items()
    ]
    return table(["pairs", *sources, "together"], rows)


def format_trial(trial: Mapping[str, Any] | None) -> str:
    """How a reward model was trained on the harmless data too, and its accuracy."""
    if trial is None:
        return ""
    settings = trial["settings"]
    pairs = settings["split"]["proxy"]
    rows = [
        [source, pairs[source], share(accuracy)]
        for source, accuracy in trial["result"]["by_source"].items()
    ]
    return (
        f"at a learning rate of {settings['learning_rate']:g} and on responses of at most "
        f"{settings['sizes']['max_response']} tokens. On test pairs:\n\n"
        + table(["source", "pairs of training", "accuracy"], rows)
    )


def format_sft(results: Mapping[str, Any]) -> str:
    """Part 1."""
    rows = [["pretrained", perplexity(results, "base")], ["after SFT", perplexity(results, "sft")]]
    return table(["model", "perplexity"], rows)


def format_reward_models(results: Mapping[str, Any]) -> str:
    """Part 2."""
    titles = {
        "reward": "with LM imitation (Eq. 2), the proxy",
        "reward_no_lm": "without LM imitation",
        "gold": "gold: with LM imitation, other and more data",
    }
    rows = []
    sources: list[str] = []
    judged = []
    for name, title in titles.items():
        figures = figures_of(results, f"report_{name}")
        if figures is None:
            rows.append([title, NOT_RUN, "", "", "", ""])
            continue
        sources = sources or list(figures["by_source"])
        language = figures["perplexity"].get("reward model")
        rows.append(
            [
                title,
                share(figures["accuracy"]),
                format_gain(figures),
                f"{figures['calibration_error']:.3f}",
                f"{figures['difference_by_length']['spearman']:.2f}",
                "-" if language is None else f"{language['all']:.1f}",
            ]
        )
        judged.append([title, *(share(figures["by_source"][source]) for source in sources)])
    text = table(
        [
            *("reward model", "accuracy", "beside the better length rule", "calibration error"),
            *("rank correlation with length", "perplexity of its trunk"),
        ],
        rows,
    )
    return f"{text}\n{table(['reward model', *sources], judged)}" if judged else text


def format_gain(figures: Mapping[str, Any]) -> str:
    """How much more often a reward model is right than the better rule on length."""
    gain = figures["gain"]
    interval = f"[{gain['low']:+.1%}, {gain['high']:+.1%}]"
    return f"{gain['mean']:+.1%} {interval} over {figures['length_baseline']}"


def format_ppo(results: Mapping[str, Any]) -> str:
    """Part 3."""
    evaluations = find_evaluations(results, "policies_")
    if not evaluations:
        return f"({NOT_RUN})"
    agreement = ", ".join(f"{figures['agreement']:.2f}" for figures in evaluations.values())
    return (
        f"{format_scores(evaluations)}\nThe rank correlation of proxy and gold over SFT's "
        f"responses is {agreement}. Over training, means of each quarter of the iterations:\n\n"
        f"{format_curves(results)}"
        f"{format_samples(next(iter(evaluations.values()))['responses'])}"
    )


def find_evaluations(results: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The evaluations of policies whose names begin so, by seed."""
    return {
        name.removeprefix(prefix): figures_of(results, name)
        for name in sorted(results)
        if name.startswith(prefix)
    }


def format_scores(evaluations: Mapping[str, Any]) -> str:
    """Table of the scores and metrics of policies, by seed."""
    rows = []
    for seed, figures in evaluations.items():
        for name, policy in figures["policies"].items():
            scores = policy["rewards"]
            rows.append(
                [
                    seed,
                    name.removesuffix(f"_{seed}"),
                    mean(scores["gold"]),
                    outcome(scores["gold"]["against_baseline"]),
                    mean(scores["reward"]),
                    outcome(scores["reward"]["against_baseline"]),
                    *(f"{policy[key]:.{digits}f}" for key, digits in METRICS.items()),
                ]
            )
    return table(
        [
            *("seed", "policy", "gold score", "win / tie / lose by gold, %", "proxy score"),
            *("win / tie / lose by proxy, %", "KL, nats", "length", "perplexity", "distinct-2"),
        ],
        rows,
    )


METRICS = {"kl": 2, "response_length": 1, "perplexity": 2, "distinct_2": 3}
"""Metrics of a policy and their digits, in the order of the columns."""


def format_curves(results: Mapping[str, Any]) -> str:
    """Gold and proxy scores beside KL, by quarter of each run."""
    keys = ("rollout/kl", "rollout/score/reward", "rollout/score/gold")
    rows = []
    for name in sorted(results):
        if not is_ppo(name):
            continue
        curves = results[name]["result"]["curves"]
        quarters = [
            " / ".join(f"{value:.2f}" for value in quarter_means(curves[key])) for key in keys
        ]
        rows.append([name, *quarters])
    return table(["run", "KL, nats", "proxy score", "gold score"], rows)


def quarter_means(values: Sequence[float]) -> list[float]:
    """Mean of each quarter of a curve."""
    bounds = [round(len(values) * quarter / 4) for quarter in range(5)]
    return [sum(values[low:high]) / max(high - low, 1) for low, high in pairwise(bounds)]


def format_samples(responses: Sequence[Mapping[str, Any]]) -> str:
    """Responses to the first test prompts, unedited."""
    text = "\nResponses to the first test prompts, unedited, cut off at the longest length:\n"
    for entry in responses:
        prompt = " ".join(turn["content"] for turn in entry["prompt"][-1:])
        text += f"\n> {one_line(prompt)}\n\n"
        text += "".join(
            f"- *{name}*: {one_line(response)}\n" for name, response in entry["responses"].items()
        )
    return text


HARM = 0.5
"""Harm is done below the first gold scores minus this many of their standard deviations."""


def find_harm(gold: Sequence[float], std: float) -> int | None:
    """The first of three iterations in a row, counted from 1, whose gold score is too low.

    A mean over 16 rollouts is noisy, so that one is not enough.

    Args:
        gold: Gold score by iteration. In the first five the policy is the SFT model or near it.
        std: Standard deviation of the gold score over the SFT model's responses.
    """
    bound = np.mean(gold[:5]) - HARM * std
    below = [value < bound for value in gold]
    return next((i + 1 for i in range(len(gold) - 2) if all(below[i : i + 3])), None)


def format_detector(results: Mapping[str, Any]) -> str:
    """Part 4."""
    rows = []
    for name in sorted(results):
        if is_ppo(name):
            figures = results[name]["result"]
            flagged = figures["flagged_at"]
            harmed = None
            if sft := results.get(f"policies_{name.rpartition('_')[2]}"):
                std = sft["result"]["policies"]["sft"]["rewards"]["gold"]["std"]
                harmed = find_harm(figures["curves"]["rollout/score/gold"], std)
            length = len(figures["curves"]["rollout/kl"])
            rows.append([name, length, flagged or "-", harmed or "-", figures["reasons"] or "-"])
    heads = ["run", "iterations", "flagged at iteration", "harm at iteration", "reasons"]
    return table(heads, rows) if rows else f"({NOT_RUN})"


def format_faster(results: Mapping[str, Any]) -> str:
    """Format the policies of part 4; empty if they have not been evaluated."""
    evaluations = find_evaluations(results, "faster_policies_")
    if not evaluations:
        return ""
    (figures,) = evaluations.values()
    openings = "; ".join(
        f"{name} {opening['share']:.0%} (*{one_line(opening['words'])}*)"
        for name, opening in figures["openings"].items()
    )
    return (
        f"{format_scores(evaluations)}\nShare of the responses that begin with the same two words: "
        f"{openings}.\n{format_samples(figures['responses'])}"
    )


def format_lora(results: Mapping[str, Any]) -> str:
    """Part 5."""
    rows = []
    for stage, full, measure in (
        ("SFT", "sft", "perplexity_{}"),
        ("reward model", "reward", "report_{}"),
    ):
        for title, name in (("full", full), ("LoRA", f"{full}_lora")):
            figures = figures_of(results, measure.format(name))
            if name not in results or figures is None:
                rows.append([stage, title, NOT_RUN, "", ""])
                continue
            step = results[name]
            rows.append(
                [
                    stage,
                    title,
                    perplexity(results, name) if stage == "SFT" else share(figures["accuracy"]),
                    f"{step['cpu_minutes']:.0f}",
                    f"{step['peak_gib']:.1f}",
                ]
            )
    heads = ["stage", "training", "perplexity or accuracy on test pairs", "CPU minutes"]
    return table([*heads, "peak, GiB"], rows)


def format_times(results: Mapping[str, Any]) -> str:
    """Format the time of each step."""
    rows = [
        [
            f"{name} (resumed)" if step["resumed"] else name,
            *(step["part"], f"{step['cpu_minutes']:.1f}", f"{step['minutes']:.1f}"),
            *(step["threads"], step["load"], f"{step['peak_gib']:.1f}"),
        ]
        for name, step in sorted(results.items(), key=lambda item: item[1].get("part", 0))
        if "minutes" in step
    ]
    heads = ["step", "part", "CPU minutes", "minutes", "threads", "load", "peak, GiB"]
    return table(heads, rows)


def format_total(results: Mapping[str, Any]) -> str:
    """A sentence on the CPU time of all steps that have been run."""
    minutes = [step["cpu_minutes"] for step in results.values() if "cpu_minutes" in step]
    return f"The {len(minutes)} steps took {sum(minutes) / 60:.1f} hours of CPU time."


def figures_of(results: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401  # a tree of figures
    """The figures of a step; `None` if it has not been run."""
    return results[name]["result"] if name in results else None


def perplexity(results: Mapping[str, Any], name: str) -> str:
    """The perplexity of a model with its interval."""
    figures = figures_of(results, f"perplexity_{name}")
    if figures is None:
        return NOT_RUN
    return f"{figures['perplexity']:.2f} [{figures['low']:.2f}, {figures['high']:.2f}]"


def share(accuracy: Mapping[str, float]) -> str:
    """An accuracy with its interval and number of pairs."""
    low = accuracy["low"]
    high = accuracy["high"]
    return f"{accuracy['accuracy']:.1%} [{low:.1%}, {high:.1%}] of {accuracy['pairs']}"


def mean(score: Mapping[str, float]) -> str:
    """A mean score with its interval."""
    return f"{score['mean']:.2f} [{score['low']:.2f}, {score['high']:.2f}]"


def outcome(rates: Mapping[str, Any] | None) -> str:
    """Win, tie and lose rates, the first with its interval."""
    if rates is None:
        return "-"
    low, high = rates["win_interval"]
    shares = " / ".join(f"{100 * rates[key]:.0f}" for key in ("win", "tie", "lose"))
    return f"{shares} [win {100 * low:.0f}, {100 * high:.0f}]"


def one_line(text: str) -> str:
    """A text on one line that Markdown shows as it is."""
    escaped = "".join(f"\\{letter}" if letter in "\\`*_<>[]#|" else letter for letter in text)
    return " ".join(escaped.split())


# --- the figure


def draw(results: Mapping[str, Any]) -> Figure:
    """Draw the PPO runs among the results; the last panel has gold over the root of KL.

    Args:
        results: Results of the finished steps by name.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=(10.5, 5.6))
        axes = figure.subplots(2, 3).flatten()
        colors = figure_colors(RUNS)
        for run, label in RUNS.items():
            curves = [
                results[name]["result"]["curves"]
                for name in sorted(results)
                if name.rpartition("_")[0] == run
            ]
            if curves:
                draw_run(axes, curves, label, colors[run])
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
