"""Whether the collapse detector flags runs in time, and whether rolling back saves them.

    python -m experiments collapse run    # trains what is missing, writes the results
    python -m experiments collapse page   # writes docs/collapse.md

`run` trains, for each seed, the quickstart's stages, then vanilla PPO and PPO-max under a detector
that only watches, and vanilla PPO under one that rolls back and raises `kl_coef`. Runs that are
finished are not repeated. `quickstart_seeds` tests the same detector on more runs, without rolling
back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure

from experiments.detector.calibrating import CALIBRATION
from experiments.detector.criterion import BEFORE, GRID, GROUPS, NARROW, REPLAYED
from experiments.detector.page import (
    BEFORE_RESULT,
    Comparison,
    compare_calibrated,
    compare_groups,
    count_chosen,
    count_doubted,
    demands_met,
    describe_changes,
    draw_groups,
    format_groups,
    score_groups,
)
from experiments.detector.page import RESULT as DETECTOR_RESULT
from experiments.drawing import STYLE, band, figure_colors, finish_panel
from experiments.frame import DOCS, IMAGES, Documents, fill_template
from experiments.processes import command_job, run_jobs
from experiments.results_file import read_lines, table
from lit_callbacks import (
    FirstRatioMonitor,
    Level,
    Monitor,
    default_monitors,
    read_logged_steps,
    replay_steps,
)
from lit_rlhf.files import write_text
from lit_rlhf.tools.commands.quickstart import COLLAPSE_STDS, Quickstart

RESULT = Path(__file__).with_name("results.json")
TEMPLATE = Path(__file__).with_name("page.md.j2")
TABLES = RESULT.with_suffix(".md")
PAGE = DOCS / "collapse.md"
FIGURE = IMAGES / "detector.svg"
RUNS_FIGURE = IMAGES / "collapse.svg"

DETECTOR_SEEDS = (60, 61, 62, 63, 64, 65, 66, 67, 68, 69)
"""Seeds on which nothing was chosen: the thresholds were on seeds 0 to 2 and 30 to 39."""
ROLLBACK = Path("configs/overlays/rollback.yaml")
RUNS: dict[str, tuple[str | Path, ...]] = {
    "ppo_vanilla": ("ppo_max.yaml", "ppo_vanilla.yaml"),
    "ppo_max": ("ppo_max.yaml",),
    "ppo_rollback": ("ppo_max.yaml", "ppo_vanilla.yaml", ROLLBACK),
}


MEASURES = ("gold", "kl", "response_length")
"""Metrics of rollouts that the figure shows."""


def run_seed(output_dir: str, seed: int) -> None:
    """Train all runs of one seed, in this process.

    Args:
        output_dir: Folder of the benchmark.
        seed: Seed of the world, the weights, the data order and the rollouts.
    """
    stages = Quickstart(Path(output_dir) / f"seed_{seed}", seed, overwrite=True)
    if not (stages.root / "reward" / "model.safetensors").is_file():
        stages.prepare()
    for name, configs in RUNS.items():
        if not (stages.root / name / "model.safetensors").is_file():
            stages.fit_ppo(configs, "--name", name)
    if not (stages.root / "evaluation.json").is_file():
        stages.evaluate("sft", *RUNS)


def run(
    output_dir: str = "runs/collapse", seeds: tuple[int, ...] = DETECTOR_SEEDS, parallel: int = 2
) -> None:
    """Train the runs that are missing, each seed in a process, and write the results.

    Args:
        output_dir: Folder of the benchmark.
        seeds: Seeds to run.
        parallel: Number of seeds that run at a time.
    """
    root = Path(output_dir)
    run_jobs(
        [
            command_job(
                "collapse",
                "run_seed",
                {"output_dir": output_dir, "seed": seed},
                log=root / f"seed_{seed}" / "log.txt",
            )
            for seed in seeds
        ],
        parallel,
    )
    rows = [summarize_seed(root, seed) for seed in seeds]
    write_text(RESULT, json.dumps(rows) + "\n")


read_steps = cache(read_logged_steps)


def read_metric(folder: Path, key: str) -> dict[int, float]:
    """Read a metric of a run by iteration."""
    return {step: s[key] for step, s in read_steps(str(folder)).items() if key in s}


class Detection(NamedTuple):
    """The verdict of a detector on a run.

    Attributes:
        flagged_at: Iteration of the first verdict "collapsed"; `None` without one.
        healthy_until: Last iteration before it, or of the run, with the verdict "healthy"; 0
            without one.
    """

    flagged_at: int | None
    healthy_until: int


def detect_collapse(folder: Path, monitors: list[Monitor], votes: int = 2) -> Detection:
    """Replay a detector on a run's logs.

    Args:
        folder: The run's logs.
        monitors: The detector's monitors.
        votes: Number of signals that make a collapse.
    """
    healthy_until = 0
    for step, verdict in replay_steps(read_steps(str(folder)), monitors, votes):
        if verdict.level is Level.COLLAPSED:
            return Detection(step, healthy_until)
        if verdict.level is Level.HEALTHY:
            healthy_until = step
    return Detection(None, healthy_until)


def compare_with_harm(folder: Path, detection: Detection, bound: float) -> dict[str, Any]:
    """When a run was flagged, and when harm was done.

    A run is flagged in time if no iteration from harm on was called healthy before the flag. A
    roll-back, which restores weights that later healthy iterations have confirmed, then undoes it.

    Args:
        folder: The run's logs.
        detection: What the detector says of the run.
        bound: Gold reward below which harm is done.
    """
    flagged_at, healthy_until = detection
    gold = read_metric(folder, "rollout/gold")
    harmed_at = next((step for step, value in gold.items() if value < bound), None)
    return {
        "flagged_at": flagged_at,
        "healthy_until": healthy_until,
        "gold_at_flag": None if flagged_at is None else gold[flagged_at],
        "peak_gold": max(gold.values()),
        "last_gold": fmean(list(gold.values())[-10:]),
        "harmed_at": harmed_at,
        "lead": None if flagged_at is None or harmed_at is None else harmed_at - flagged_at,
        "in_time": flagged_at is not None and (harmed_at is None or healthy_until < harmed_at),
    }


def summarize_seed(root: Path, seed: int) -> dict[str, Any]:
    """The figures of one seed in the tables."""
    folder = root / f"seed_{seed}"
    policies = json.loads((folder / "evaluation.json").read_text("utf-8"))["policies"]
    gold = {
        name.rpartition("/")[2]: report["rewards"]["gold_reward"]
        for name, report in policies.items()
    }
    bound = gold["sft"]["mean"] - COLLAPSE_STDS * gold["sft"]["std"]
    logs = {name: folder / "logs" / name for name in RUNS}
    return {
        "seed": seed,
        "sft_gold": gold["sft"]["mean"],
        **{
            name: compare_with_harm(
                logs[name], detect_collapse(logs[name], default_monitors()), bound
            )
            for name in ("ppo_vanilla", "ppo_max")
        },
        "final_gold": {name: gold[name]["mean"] for name in RUNS},
        "collapses": sum(
            before < Level.COLLAPSED <= after
            for before, after in pairwise(
                [0.0, *read_metric(logs["ppo_rollback"], "monitor/level").values()]
            )
        ),
        "curves": {
            name: {
                key: [round(v, 3) for v in read_metric(log, f"rollout/{key}").values()]
                for key in MEASURES
            }
            for name, log in logs.items()
        },
    }


COLUMNS = ("flagged_at", "gold_at_flag", "peak_gold", "last_gold", "harmed_at", "lead")
"""Columns of the table of `format_flags`."""


def format_policies(rows: Sequence[dict[str, Any]]) -> str:
    """Format the outcome of each policy, as a Markdown table."""
    names = ("ppo_vanilla", "ppo_rollback", "ppo_max")
    head = ["seed", "final gold: SFT", "vanilla", "vanilla, roll-back", "PPO-max"]
    return table(
        [*head, "collapses flagged"],
        [
            [
                row["seed"],
                f"{row['sft_gold']:.2f}",
                *(f"{row['final_gold'][name]:.2f}" for name in names),
                row["collapses"],
            ]
            for row in rows
        ],
    )


def format_flags(rows: Sequence[dict[str, Any]]) -> str:
    """Format when vanilla PPO was flagged, as a Markdown table."""

    def shown(value: float | int | None) -> str:
        return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)

    head = ["seed", "flagged at iteration", "gold at that iteration", "peak gold"]
    head += ["gold, last 10 iterations", "harm at iteration", "lead, iterations"]
    flags = [[row["seed"], *(shown(row["ppo_vanilla"][key]) for key in COLUMNS)] for row in rows]
    return table(head, flags)


def scale_thresholds(monitor: Monitor, factor: float) -> Monitor:
    """Move every threshold of a monitor `factor` times as far from the baseline."""
    if isinstance(monitor, FirstRatioMonitor):  # fixed thresholds around 1, the healthy ratio
        assert monitor.high is not None
        assert monitor.low is not None
        monitor.high = 1 + (monitor.high - 1) * factor
        monitor.low = 1 - (1 - monitor.low) * factor
        return monitor
    if monitor.high is not None:
        monitor.high *= factor
    if monitor.high_ratio is not None:
        monitor.high_ratio = 1 + (monitor.high_ratio - 1) * factor
    if monitor.low_ratio is not None:
        monitor.low_ratio = max(0.0, 1 - (1 - monitor.low_ratio) * factor)
    return monitor


LABELS = {
    "ppo_vanilla": "vanilla PPO",
    "ppo_rollback": "vanilla PPO with roll-back",
    "ppo_max": "PPO-max",
}
"""Runs as the figure calls them."""


def draw(rows: list[dict[str, Any]]) -> Figure:
    """Draw the runs over their iterations: means over seeds, with the range as a band.

    Args:
        rows: What `summarize_seed` says of each seed.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=(10.5, 3.2))
        axes = figure.subplots(1, len(MEASURES))
        colors = figure_colors(LABELS)
        for axis, measure in zip(axes, MEASURES, strict=True):
            for run, label in LABELS.items():
                courses = [row["curves"][run][measure] for row in rows]
                band(axis, courses, range(1, len(courses[0]) + 1), label, colors[run])
            finish_panel(axis, measure)
            axis.set_xlabel("PPO iteration")
        axes[0].axhline(
            fmean(row["sft_gold"] for row in rows), color="#555555", linestyle="--", linewidth=1.0
        )
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
        return figure


def read_groups() -> dict[str, Comparison]:
    """The committed results of the detector by group of families, before and now."""
    return compare_groups(before=read_lines(BEFORE_RESULT), now=read_lines(DETECTOR_RESULT))


def format_page(rows: Sequence[dict[str, Any]], groups: Mapping[str, Comparison]) -> str:
    """Format the page.

    Args:
        rows: What `summarize_seed` says of each seed.
        groups: How the detector does on each group of families, before and now.
    """
    leads = [-row["ppo_vanilla"]["lead"] for row in rows]
    rows_now = read_lines(DETECTOR_RESULT)
    calibrated = compare_calibrated(read_lines(CALIBRATION))
    golds = {name: [row["final_gold"][name] for row in rows] for name in RUNS}
    return fill_template(
        TEMPLATE,
        groups=format_groups({name: groups[name] for name in list(GROUPS)[:4]}),
        before=BEFORE,
        now=REPLAYED,
        **{
            name: groups[group].now
            for name, group in zip(("lab", "real", "synthetic", "others"), GROUPS, strict=False)
        },
        missed_demands=describe_demands(demands_met(groups)),
        late=describe_lead(groups["lab"].now.leads),
        real_lead=describe_lead(groups["real models"].now.leads),
        doubted=count_doubted(rows_now),
        changes=describe_changes(rows_now),
        chosen=count_chosen(rows_now, 0),
        wide=score_groups(rows_now, 0),
        narrow=score_groups(rows_now, GRID.index(NARROW)),
        calibrated={name: calibrated[name] for name in list(GROUPS)[:3]},
        golds={name: f"{min(values):.2f} to {max(values):.2f}" for name, values in golds.items()},
        leads=f"{min(leads)} to {max(leads)}",
        seeds=len(rows),
        flagged=sum(row["ppo_vanilla"]["flagged_at"] is not None for row in rows),
        flagged_max=sum(row["ppo_max"]["flagged_at"] is not None for row in rows),
        saved=sum(row["final_gold"]["ppo_rollback"] >= row["sft_gold"] for row in rows),
    )


def describe_lead(leads: Sequence[int]) -> str:
    """The median of leads in words, such as `3 iterations after the harm`."""
    lead = median(leads)
    return f"{abs(lead):g} iterations {'before' if lead > 0 else 'after'} the harm"


def describe_demands(met: Mapping[str, Mapping[str, bool]]) -> str:
    """Say how many demands each group of families meets.

    Args:
        met: Whether each demand is met, by group.
    """
    counts = {group: sum(held.values()) for group, held in met.items()}
    parts = [f"{group} {counts[group] or 'none'}" for group in list(GROUPS)[:4]]
    return f"Demands met: {', '.join(parts)}."


def format_tables(rows: Sequence[dict[str, Any]]) -> str:
    """Format the outcome of each run, and when vanilla PPO was flagged.

    Args:
        rows: What `summarize_seed` says of each seed.
    """
    return (
        "# The collapse detector and rolling back: each run\n\n"
        "Written by `python -m experiments collapse page` from `results.json` for the page on\n"
        "[the collapse detector](../../docs/collapse.md).\n\n"
        "![Gold, KL and response length over the iterations](../../docs/images/collapse.svg)\n\n"
        "Bands are ranges over seeds, the dashed line is SFT's gold.\n\n"
        f"{format_policies(rows)}\n"
        "Gold is over 512 held-out prompts here, and over the 128 rollouts of an iteration "
        "below.\n\n"
        "## When vanilla PPO is flagged\n\n"
        f"{format_flags(rows)}"
    )


def documents() -> Documents:
    """The page, its figure and all tables, from the committed results."""
    rows = json.loads(RESULT.read_text("utf-8"))
    groups = read_groups()
    return {
        PAGE: format_page(rows, groups),
        TABLES: format_tables(rows),
        FIGURE: lambda: draw_groups(groups),
        RUNS_FIGURE: lambda: draw(rows),
    }


COMMANDS = (run, run_seed)
