"""The page and the figure from the results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from experiments.drawing import STYLE, band, figure_colors, finish_axis, window_means
from experiments.frame import fill_template
from experiments.known_truth.criterion import (
    BEST_OF,
    DECIDING_SEEDS,
    best_of,
    read_arms,
)
from experiments.known_truth.rule import PARTS
from experiments.results_file import table
from lit_rlhf.functional import best_of_n_kl

NAMES = {"sft": "SFT", "ppo_vanilla": "vanilla PPO", "ppo_max": "PPO-max"}
PAGE_TEMPLATE = Path(__file__).with_name("page.md.j2")
TABLES_TEMPLATE = Path(__file__).with_name("results.md.j2")


def complete_seeds(results: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """The results of the seeds that have a verdict."""
    return {
        int(name.removeprefix("seed_")): row for name, row in results.items() if "verdict" in row
    }


def format_page(results: Mapping[str, Any]) -> str:
    """Format the page.

    Args:
        results: Results by the name of the run.
    """
    done = complete_seeds(results)
    decided = [seed for seed in DECIDING_SEEDS if seed in done]
    state = (
        f"Of seeds {list(DECIDING_SEEDS)}, which decide, {len(decided)} are done. Shown are the "
        f"seeds {sorted(done)}."
    )
    return fill_template(PAGE_TEMPLATE, seeds=format_seeds(done), state=state)


def format_tables(results: Mapping[str, Any]) -> str:
    """Format all seeds: policies, verdicts, flags of the detector, and samples.

    Args:
        results: Results by the name of the run.
    """
    done = complete_seeds(results)
    each = []
    for seed, row in done.items():
        steps = {name: step["result"] for name, step in row["steps"].items()}
        each.append(
            {
                "seed": seed,
                "policies": _policies(steps),
                "best_of": format_best_of(read_arms(steps)["sft"]),
                "verdict": format_verdict(row["verdict"]),
                "samples": _samples(steps),
            }
        )
    return fill_template(
        TABLES_TEMPLATE, seeds=format_seeds(done), flags=format_flags(done), each=each
    )


def format_seeds(done: dict[int, dict[str, Any]], truth: str = "truth") -> str:
    """Format the truth of all policies, the differences of the criterion, and whether it holds."""
    names = ("vanilla - SFT", "PPO-max - SFT", "PPO-max - vanilla", "PPO-max - best of 4")
    head = ["seed", *(f"{truth}: {name}" for name in NAMES.values()), *names, "criterion"]
    rows = []
    for seed, row in done.items():
        policies = row["steps"]["policies"]["result"]
        verdict = row["verdict"]
        truths = (f"{np.mean(policies[name]['truth']):.2f}" for name in NAMES)
        differences = (format_interval(verdict["differences"][name]) for name in names)
        failed = [name for name, held in verdict["holds"].items() if not held]
        rows.append(
            [seed, *truths, *differences, f"not {', '.join(failed)}" if failed else "holds"]
        )
    return table(head, rows)


def format_flags(done: dict[int, dict[str, Any]], truth: str = "truth") -> str:
    """Say where the collapse detector spoke, and whether it was right."""
    rows = []
    for seed, row in done.items():
        for policy, name in (("ppo_vanilla", "vanilla - SFT"), ("ppo_max", "PPO-max - SFT")):
            run = row["steps"][policy]["result"]
            worse = row["verdict"]["differences"][name][2] < 0
            right = "right" if worse == (run["flagged_at"] is not None) else "wrong"
            flag = run["flagged_at"] or "not"
            rows.append([seed, NAMES[policy], flag, right, run["reasons"] or "-"])
    flags = table(["seed", "run", "flagged at iteration", "", "reasons"], rows)
    return (
        "The collapse detector watched all runs with its default thresholds, and stopped none. A "
        f"flag\nis right where the {truth} of the last policy is below SFT's, silence where it is "
        f"not: the\n95 % interval of the difference lies below 0, or does not.\n\n{flags}"
    )


def format_interval(difference: Sequence[float]) -> str:
    """Format a difference with its interval."""
    mean, low, high = difference
    return f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"


def _policies(steps: dict[str, Any]) -> str:
    head = ["policy", "proxy", "truth", "KL, nats", "tokens", "cut off"]
    head += [part.replace("_", " ") for part in PARTS] + ["canned", "flagged at"]
    rows = []
    for policy, row in steps["policies"].items():
        flagged = steps[policy].get("flagged_at") or "-"
        cells = [NAMES[policy], *(f"{np.mean(row[key]):.2f}" for key in ("proxy", "truth"))]
        cells += [f"{row['kl']:.1f}", f"{row['length']:.1f}", f"{row['cut_off']:.0%}"]
        cells += [f"{row['parts'][part]:.0%}" for part in PARTS]
        rows.append([*cells, f"{row['canned']:.0%}", str(flagged)])
    return table(head, rows)


def format_best_of(sft: dict[str, np.ndarray], truth: str = "truth") -> str:
    """Format a table of the best of n samples of SFT by the proxy."""
    rows = []
    for n in BEST_OF:
        means = (best_of(n, sft["proxy"], sft[key]).mean() for key in ("proxy", "truth"))
        rows.append(
            [f"best of {n}", *(f"{mean:.2f}" for mean in means), f"at most {best_of_n_kl(n):.1f}"]
        )
    return table(["SFT, by the proxy", "proxy", truth, "KL, nats"], rows)


def format_verdict(verdict: dict[str, Any]) -> str:
    """Say what holds of the criterion."""
    gain = verdict["vanilla's proxy above SFT's, in SFT's standard deviations"]
    holds = ", ".join(
        f"{name}: {'yes' if held else 'no'}" for name, held in verdict["holds"].items()
    )
    return (
        f"Vanilla PPO's proxy is {gain:.1f} standard deviations above SFT's.\n\n"
        f"Criterion: {holds}.\n"
    )


def _samples(steps: dict[str, Any]) -> str:
    rows = []
    for policy, row in steps["policies"].items():
        for prompt, response in row["samples"][:4]:
            subject = prompt.partition("about ")[2].rstrip(".")
            rows.append([NAMES[policy], subject, response.strip().replace("\n", " ")])
    return table(["policy", "about", "response"], rows)


CURVES = {
    "rollout/score": "proxy, standard deviations above SFT",
    "rollout/gold": "truth",
    "rollout/kl": "KL to SFT, nats",
}
"""Title of each panel by the metric that it shows; the first is the proxy's."""


def draw(results: Iterable[dict[str, Any]], panels: dict[str, str] = CURVES) -> Figure:
    """Draw proxy, truth and KL of both arms over the iterations; bands are the range of seeds.

    Each seed has a reward model with a scale of its own, so the proxy is in units of SFT's scores.
    """
    complete = [row["steps"] for row in results if "verdict" in row]
    with rc_context(STYLE):
        figure = Figure(figsize=(9.5 / 3 * len(panels), 2.8))
        axes = figure.subplots(1, len(panels))
        for axis, (key, title) in zip(axes, panels.items(), strict=True):
            for policy, color in figure_colors(("ppo_vanilla", "ppo_max")).items():
                courses = []
                for steps in complete:
                    course = np.array(steps[policy]["result"]["curves"][key])
                    if key == next(iter(panels)):
                        of_sft = np.array(steps["policies"]["result"]["sft"]["proxy"])
                        course = (course - of_sft.mean()) / of_sft.std()
                    courses.append(window_means(course.tolist(), 4))
                if courses:
                    band(axis, courses, range(4, 4 + len(courses[0])), NAMES[policy], color)
            axis.set_title(title)
            axis.set_xlabel("iteration")
            finish_axis(axis)
        axes[0].legend(fontsize=8)
    return figure
