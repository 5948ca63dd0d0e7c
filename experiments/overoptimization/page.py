"""The page, its figure and the tables from the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.drawing import COLORS, STYLE, finish_axis
from experiments.frame import fill_template
from experiments.known_truth.page import NAMES, format_interval
from experiments.overoptimization.criterion import (
    LEAST_AGREEMENT,
    LEAST_CORRELATION,
    Course,
    Run,
    Scores,
    judge,
    keeps_variety,
)
from experiments.results_file import table

PAGE_TEMPLATE = Path(__file__).with_name("page.md.j2")
TABLES_TEMPLATE = Path(__file__).with_name("results.md.j2")
ARMS = ("ppo_vanilla", "ppo_max")
PLANNED_PAIRS = (300, 1000)
PLANNED_SEEDS = (0, 1, 2)
EVERY = 20
"""Iterations of PPO between two points of a course, by the criterion."""


@dataclass(frozen=True)
class ProxyResults:
    """The finished steps of a proxy.

    Attributes:
        pairs: Number of its pairs.
        seed: Seed of the repetition.
        steps: Results of its steps by their names without the end that names the proxy.
    """

    pairs: int
    seed: int
    steps: Mapping[str, Any]

    def points(self, arm: str) -> list[Mapping[str, Any]]:
        """The `P` points of an arm's course.

        Responses are also kept where the detector's level changes; these points are left out.
        """
        points = self.steps[f"course_{arm}"]["points"]
        return [point for point in points if point["iteration"] % EVERY == 0]

    def course(self, arm: str, key: str) -> Scores:
        """`proxy` or `truth` of an arm's held-out responses, `[P, N]`."""
        return np.array([point[key] for point in self.points(arm)])

    def run(self) -> Run:
        """The runs as the criterion reads them."""
        points = self.points("ppo_vanilla")
        iterations = tuple(point["iteration"] for point in points)
        ends = {arm: np.array(row["truth"]) for arm, row in self.steps["end"].items()}
        n_prompts = len(points[0]["truth"])
        return Run(
            vanilla=Course(iterations, self.course("ppo_vanilla", "truth")),
            ends={arm: truth.reshape(n_prompts, -1) for arm, truth in ends.items()},
        )


def read_proxies(results: Mapping[str, Any]) -> list[ProxyResults]:
    """The proxies with a finished step, by their pairs and seeds."""
    proxies = []
    for tag, row in results.items():
        pairs, _, seed = tag.partition("_")
        if pairs.isdigit():
            steps = {name.removesuffix(f"_{tag}"): step["result"] for name, step in row.items()}
            proxies.append(ProxyResults(int(pairs), int(seed), steps))
    return sorted(proxies, key=lambda proxy: (proxy.pairs, proxy.seed))


def describe_state(results: Mapping[str, Any]) -> str:
    """Say which steps are done and which are not."""
    common = results.get("common", {})
    proxies = read_proxies(results)
    planned = len(PLANNED_PAIRS) * len(PLANNED_SEEDS)
    parts = {
        "SFT": "sft" in common,
        "the gold model": "gold" in common,
        "the labels": "labelled_train" in common,
        "SFT's 64 samples": "best_of" in common,
    }
    counts = {
        "proxies": "proxy",
        "gates": "gate",
        "best of n by the proxies": "best_of",
        "runs of vanilla PPO": "course_ppo_vanilla",
        "runs of PPO-max": "course_ppo_max",
        "comparisons at the end": "end",
    }
    finished = [name for name, is_done in parts.items() if is_done]
    missing = [name for name, is_done in parts.items() if not is_done]
    for name, step in counts.items():
        done = sum(step in proxy.steps for proxy in proxies)
        (finished if done == planned else missing).append(f"{name} ({done} of {planned} done)")
    done_text = ", ".join(finished) or "nothing"
    return f"- Done: {done_text}.\n- Not done: {', '.join(missing) or 'nothing'}."


def answer(results: Mapping[str, Any]) -> str:
    """The answer as far as the finished steps go."""
    proxies = read_proxies(results)
    complete = [proxy for proxy in proxies if "end" in proxy.steps]
    sizes = sorted({proxy.pairs for proxy in complete})
    if len(sizes) == 2 and len(complete) == len(sizes) * len(PLANNED_SEEDS):
        few, many = (
            {proxy.seed: proxy.run() for proxy in complete if proxy.pairs == size} for size in sizes
        )
        holds = judge(few, many)
        parts = ", ".join(f"{name}: {'yes' if held else 'no'}" for name, held in holds.items())
        return f"The criterion is {'met' if all(holds.values()) else 'not met'}: {parts}."
    gates = [proxy.steps["gate"] for proxy in proxies if "gate" in proxy.steps]
    courses = [proxy.steps["best_of"] for proxy in proxies if "best_of" in proxy.steps]
    if not gates:
        return "Not known: no proxy is trained yet."
    opened = sum(gate["open"] for gate in gates)
    text = f"Not known yet for PPO. {opened} of {len(gates)} proxies pass the gate."
    if courses:
        falling = sum(is_over_optimized(row["course"]) for row in courses)
        text += (
            f" Best of 64 by the proxy is worse by gold than the best of fewer with {falling} of "
            f"{len(courses)} proxies, by means."
        )
    return text


def is_over_optimized(course: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last point's truth is below the highest of those before it."""
    truths: list[float] = [point["truth"][0] for point in course]
    return truths[-1] < max(truths[:-1])


def format_page(results: Mapping[str, Any]) -> str:
    """Format the page.

    Args:
        results: Results by the name of the run.
    """
    return fill_template(
        PAGE_TEMPLATE,
        answer=answer(results),
        state=describe_state(results),
        labels=format_labels(results.get("common", {})),
        gates=format_gates(read_proxies(results)),
        courses=format_courses(read_proxies(results)),
        ends=format_ends(read_proxies(results)),
        least_agreement=LEAST_AGREEMENT,
        least_correlation=LEAST_CORRELATION,
    )


def format_labels(common: Mapping[str, Any]) -> str:
    """Say what the labels are made of."""
    if "labelled_train" not in common:
        return "The labels are not made yet."
    row = common["labelled_train"]["result"]
    truth = row["truth"]
    pairs = row["pairs"]
    return (
        f"The gold model pays {truth['slope']:+.3f} per token within a prompt, where its score "
        f"correlates with the length by\n{row['gold with length']:+.2f}. Without it the truth "
        f"correlates with gold by {row['truth with gold']:.2f} and spreads by "
        f"{row['spread within prompts']:.2f} within a prompt. It labels\n"
        f"{pairs['train']['used']} pairs for training and {pairs['test']['used']} for the gate."
    )


def format_gates(proxies: Sequence[ProxyResults]) -> str:
    """Format the gate of each proxy and the best of n by it."""
    head = ["pairs", "seed", "right on test pairs", "correlation within prompts", "gate"]
    head += ["gold: SFT", "best of 4", "best of 16", "best of 64"]
    rows = []
    for proxy in proxies:
        if "gate" not in proxy.steps:
            continue
        gate = proxy.steps["gate"]
        cells = [proxy.pairs, proxy.seed, f"{gate['agreement']:.1%}", f"{gate['correlation']:.2f}"]
        cells.append("open" if gate["open"] else "shut")
        course = proxy.steps.get("best_of", {}).get("course", [])
        truths = {point["n"]: point["truth"] for point in course}
        cells += [format_mean(truths[n]) if n in truths else "-" for n in (1, 4, 16, 64)]
        rows.append(cells)
    return table(head, rows) if rows else "No proxy is trained yet.\n"


def format_mean(summary: Sequence[float]) -> str:
    """Format a mean with its interval."""
    mean, low, high = summary
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def format_ends(proxies: Sequence[ProxyResults]) -> str:
    """Format what PPO ended with, and the differences of the criterion."""
    head = ["pairs", "seed", "vanilla PPO peaks at", "its fall from there", "vanilla - SFT"]
    head += ["PPO-max - SFT", "PPO-max - vanilla", "KL, nats", "canned", "distinct bigrams"]
    rows = []
    for proxy in proxies:
        if "end" not in proxy.steps:
            continue
        run = proxy.run()
        end = proxy.steps["end"]
        pairs = (("ppo_vanilla", "sft"), ("ppo_max", "sft"), ("ppo_max", "ppo_vanilla"))
        distinct = []
        for arm in NAMES:
            is_varied = keeps_variety(end[arm]["distinct_2"], end["sft"]["distinct_2"])
            distinct.append(f"{end[arm]['distinct_2']:.2f}{'' if is_varied else ' (low)'}")
        rows.append(
            [
                proxy.pairs,
                proxy.seed,
                run.vanilla.peak_iteration,
                format_interval(run.vanilla.fall),
                *(format_interval(run.difference(*pair)) for pair in pairs),
                ", ".join(f"{end[arm]['kl']:.1f}" for arm in ARMS),
                ", ".join(f"{end[arm]['canned']:.0%}" for arm in NAMES),
                ", ".join(distinct),
            ]
        )
    return table(head, rows) if rows else "No seed has both arms yet.\n"


def format_courses(proxies: Sequence[ProxyResults]) -> str:
    """Format gold, and the last KL, over each finished run of PPO."""
    rows = []
    iterations: list[int] = []
    for proxy in proxies:
        for arm in ARMS:
            if f"course_{arm}" not in proxy.steps:
                continue
            points = proxy.points(arm)
            iterations = [point["iteration"] for point in points]
            gold = [f"{value:.2f}" for value in proxy.course(arm, "truth").mean(1)]
            rows.append([proxy.pairs, proxy.seed, NAMES[arm], *gold, f"{points[-1]['kl']:.1f}"])
    head = ["pairs", "seed", "policy", *(f"gold at {n}" for n in iterations), "last KL, nats"]
    return table(head, rows) if rows else "PPO has not run yet.\n"


def format_tables(results: Mapping[str, Any]) -> str:
    """Format all numbers and samples.

    Args:
        results: Results by the name of the run.
    """
    common = results.get("common", {})
    proxies = read_proxies(results)
    return fill_template(
        TABLES_TEMPLATE,
        state=describe_state(results),
        times=format_times(results),
        labels=format_labels(common),
        gates=format_gates(proxies),
        courses=format_courses(proxies),
        ends=format_ends(proxies),
        best_of=[
            {"pairs": proxy.pairs, "seed": proxy.seed, "table": format_course(proxy)}
            for proxy in proxies
            if "best_of" in proxy.steps
        ],
        sft_samples=format_samples({"sft": common["best_of"]["result"]})
        if "best_of" in common
        else "SFT is not sampled yet.\n",
        samples=[
            {"pairs": p.pairs, "seed": p.seed, "table": format_samples(p.steps["end"])}
            for p in proxies
            if "end" in p.steps
        ],
    )


def format_course(proxy: ProxyResults) -> str:
    """Format proxy and gold of the best of n by a proxy."""
    rows = [
        [point["n"], f"{point['kl']:.2f}", *(format_mean(point[k]) for k in ("proxy", "truth"))]
        for point in proxy.steps["best_of"]["course"]
    ]
    return table(["n", "KL, nats", "proxy", "gold"], rows)


def format_samples(policies: Mapping[str, Any]) -> str:
    """Format the responses that were drawn, unedited."""
    rows = [
        [NAMES[key], *(" ".join(text.split()) for text in sample)]
        for key, row in policies.items()
        for sample in row["samples"]
    ]
    return table(["policy", "prompt", "response"], rows)


def format_times(results: Mapping[str, Any]) -> str:
    """Format what each step took."""
    rows = [
        [name, f"{step['cpu_minutes']:.1f}", f"{step['minutes']:.1f}", f"{step['peak_gib']:.1f}"]
        for run, steps in results.items()
        if run != "settings"
        for name, step in steps.items()
    ]
    return table(["step", "CPU minutes", "minutes", "GiB"], rows)


def draw(results: Mapping[str, Any]) -> Figure:
    """Draw proxy and gold against the square root of the KL, a panel for each number of pairs.

    Both are above SFT's mean, in their own standard deviations of SFT's responses to a prompt.
    """
    proxies = read_proxies(results)
    sizes = sorted({proxy.pairs for proxy in proxies} | set(PLANNED_PAIRS))
    with rc_context(STYLE):
        figure = Figure(figsize=(4.2 * len(sizes), 3.4))
        axes = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
        for axis, size in zip(axes, sizes, strict=True):
            for proxy in proxies:
                if proxy.pairs == size and "best_of" in proxy.steps:
                    spread = results["common"]["best_of"]["result"]["spread within prompts"]
                    draw_proxy(axis, proxy, gold_spread=spread)
            axis.set_title(f"{size:,} pairs")
            axis.set_xlabel("square root of the KL to SFT, nats")
            finish_axis(axis)
        axes[0].set_ylabel("above SFT, deviations within a prompt")
        handles = {
            label: handle
            for axis in axes
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        if handles:
            axes[0].legend(handles.values(), handles.keys(), fontsize=7)
    return figure


def draw_proxy(axis: Axes, proxy: ProxyResults, gold_spread: float) -> None:
    """Draw the best of n by a proxy as lines, and PPO's courses as points.

    Args:
        axis: The panel.
        proxy: The proxy, whose best of n is done.
        gold_spread: Standard deviation of the truth of SFT's responses to a prompt.
    """
    row = proxy.steps["best_of"]
    course = row["course"]
    roots = [point["kl"] ** 0.5 for point in course]
    start = {key: course[0][key][0] for key in ("proxy", "truth")}
    scale = {"proxy": row["spread within prompts"], "truth": gold_spread}
    labels = {"proxy": "proxy", "truth": "gold"}
    for key, color in zip(labels, COLORS, strict=False):
        values = [(point[key][0] - start[key]) / scale[key] for point in course]
        axis.plot(roots, values, color=color, label=f"{labels[key]}: best of n", linewidth=1.4)
        for arm, marker in zip(ARMS, ("x", "o"), strict=True):
            if f"course_{arm}" not in proxy.steps:
                continue
            points = proxy.points(arm)
            gains = proxy.course(arm, key).mean(1)
            axis.scatter(
                [max(point["kl"], 0.0) ** 0.5 for point in points],
                (gains - gains[0]) / scale[key],
                color=color,
                marker=marker,
                s=14,
                label=f"{labels[key]}: {NAMES[arm]}",
            )
