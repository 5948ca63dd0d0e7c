"""PPO-max beside estimators without a critic, in the lab at the same number of responses.

    python -m experiments estimators run      # trains what is missing
    python -m experiments estimators page     # writes docs/estimators_compared.md

Each seed has its own world, SFT model and reward model, which the reproduction trained and every
arm starts from; no estimator without a critic was tried on them before. All arms have PPO-max's
options and no tuning of their own, and 35 iterations of 128 responses, half of the quickstart's;
where responses are compared, these are four to each of 32 prompts. VAPO's lambda has alpha 1
instead of 0.05, which is for thousands of tokens: here it is about 0.9 for a response of nine.
`CRITERION` was fixed before the first result. After seeds 43 to 45, and before all later ones, two
arms (VAPO, Dr. GRPO), two seeds (46, 47) and the best of n of the SFT policy were added. The result
of each run is a line of `experiments/estimators/results.jsonl`, and none is repeated.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.drawing import STYLE, figure_colors, finish_axis, window_means
from experiments.frame import DOCS, IMAGES, Documents, fill_template
from experiments.judging import Comparison, compare_by_seed
from experiments.processes import Job, command_job, cpu_seconds_used, run_jobs, run_missing_jobs
from experiments.reproduce.running import Plan, train, versions
from experiments.reproduce.table import foundations_by_name
from experiments.results_file import read_runs, table, write_run
from lit_callbacks import read_logged_steps
from lit_rlhf.cli.configs import find_config
from lit_rlhf.files import write_text
from lit_rlhf.functional import best_of_n_kl
from lit_rlhf.tools.commands.evaluate import EvaluateOptions, evaluate
from lit_rlhf.tools.commands.quickstart import GOLD, Quickstart

RESULTS = Path(__file__).with_name("results.jsonl")
TABLES = RESULTS.with_suffix(".md")
TEMPLATE = Path(__file__).with_name("page.md.j2")
PAGE = DOCS / "estimators_compared.md"
FIGURE = IMAGES / "estimators.svg"
SEEDS: Final = (43, 44, 45, 46, 47)
FOUNDATION: Final = "foundation-biased-en"
GROUP: Final = 4
ITERATIONS = 35
RESPONSES = 128


def data_of(group: int) -> dict[str, Any]:
    """The datamodule's settings for as many responses, to fewer prompts in larger groups."""
    return {"batch_size": RESPONSES // group, "samples_per_epoch": ITERATIONS * RESPONSES // group}


ARMS: dict[str, tuple[tuple[str, ...], int]] = {
    "ppo_max": ((), 1),
    "vapo": (("overlays/vapo",), 1),
    "rloo": (("overlays/rloo",), GROUP),
    "grpo": (("overlays/grpo",), GROUP),
    "dr_grpo": (("overlays/dr_grpo",), GROUP),
    "reinforce_plus_plus": (("overlays/reinforce_plus_plus",), 1),
}
"""Overlays of PPO-max, and responses to a prompt."""
TIMED: Final = (46, 47)
"""Seeds whose runs were all on one machine, for the comparison of costs."""
VAPO_ALPHA: Final = 1.0
BEST_OF: Final = (1, 4, 16)
"""Sizes of the best of n of the SFT policy, chosen by the reward model."""
WIDTH: Final = 5
"""Iterations whose mean is a point of a course."""
BUDGETS: Final = (0.3, 0.5, 0.7)
"""Square roots of KL, in nats per response, at which courses are compared."""
MARGIN: Final = 0.1
"""Gold by which an arm has to differ."""
CRITERION: Final = (
    f"An estimator is better (worse) than PPO-max if its gold reward on held-out prompts at the "
    f"end is higher (lower) by more than {MARGIN} in each seed; else its paired 95 % interval is "
    "given, by Student's t over the seeds. The same holds at a KL budget, for the best gold that a "
    f"course reaches within it: the mean over {WIDTH} iterations of gold, where that of KL is at "
    "most the budget's square."
)


def run_one(output_dir: str, seed: int, arm: str) -> None:
    """Train an arm on the models of its seed in this process, and judge it on held-out prompts.

    Args:
        output_dir: Folder of the benchmark.
        seed: Seed of the rollouts, and of the world and the models that they start from.
        arm: Key of `ARMS`, or `foundation`, or `best_of`.
    """
    plan = Plan(foundations_by_name()[FOUNDATION], seed, Path(output_dir))
    root = plan.root
    if arm == "foundation":
        train(plan)
        return
    if arm == "best_of":
        write_run(RESULTS, f"best_of-seed_{seed}", measure_best_of(root, seed))
        return
    stages = Quickstart(root, seed, overwrite=True)
    stages.fit_ppo(("ppo_max.yaml", *arm_overlays(root, arm)), "--name", arm)
    cpu_seconds = cpu_seconds_used()
    stages.evaluate("sft", arm)
    evaluation = json.loads((root / "evaluation.json").read_text("utf-8"))["policies"]
    steps = list(read_logged_steps(str(root / "logs" / arm)).values())
    row = {
        "seed": seed,
        "arm": arm,
        "sft_gold": evaluation["sft"]["rewards"]["gold_reward"]["mean"],
        "gold": evaluation[arm]["rewards"]["gold_reward"]["mean"],
        "score": evaluation[arm]["rewards"]["reward"]["mean"],
        "well_formed": evaluation[arm]["rewards"]["well_formed"]["mean"],
        "cpu_seconds": cpu_seconds,
        "courses": {
            name: [round(step[key], 4) for step in steps if (key := f"rollout/{name}") in step]
            for name in ("gold", "kl", "score", "response_length")
        },
        "versions": versions(),
    }
    write_run(RESULTS, f"{arm}-seed_{seed}", row)


def arm_overlays(root: Path, arm: str) -> list[Path]:
    """The overlays of an arm on PPO-max's configuration; the last one is written to `root`."""
    names, group = ARMS[arm]
    own: dict[str, Any] = {
        "suffix": [],
        "trainer": {"callbacks": [], "limit_val_batches": 0},
        "data": {"init_args": data_of(group)},
    }
    if arm == "vapo":
        own["model"] = {"init_args": {"advantages": {"lam_alpha": VAPO_ALPHA}}}
    file = write_text(root / "configs" / f"own_{arm}.yaml", json.dumps(own) + "\n")
    return [*(find_config(name) for name in names), file]


def measure_best_of(root: Path, seed: int) -> dict[str, Any]:
    """Gold of the best of n responses of the SFT policy to the held-out prompts."""
    options = EvaluateOptions(
        policies=[str(root / "sft")],
        prompts=str(root / "world" / "prompts_heldout.jsonl"),
        # the first one chooses
        rewards={str(root / "reward"): 1.0, f"{GOLD}:gold_reward": 1.0},
        best_of=list(BEST_OF),
        max_new_tokens=48,
        temperature=1.0,
        top_p=1.0,
        repetition_penalty=1.0,
        seed=seed,
    )
    rows = evaluate(options)["best_of"]
    gold = {str(row["n"]): round(row["scores"]["gold_reward"]["mean"], 4) for row in rows}
    return {"seed": seed, "arm": "best_of", "gold": gold, "versions": versions()}


def run(output_dir: str = "runs/reproduction", seeds: tuple[int, ...] = SEEDS) -> None:
    """Train what has no result yet, one run at a time.

    Args:
        output_dir: Folder of all runs. Arms of a seed share files, so that only different seeds may
            be trained by several processes.
        seeds: Seeds to train.
    """

    def job(seed: int, arm: str) -> Job:
        options = {"output_dir": output_dir, "seed": seed, "arm": arm}
        log = Path(output_dir) / f"seed_{seed}-{arm}.log"
        return command_job("estimators", "run_one", options, log=log)

    finished = read_runs(RESULTS)
    for seed in seeds:
        jobs = {f"{arm}-seed_{seed}": job(seed, arm) for arm in (*ARMS, "best_of")}
        plan = Plan(foundations_by_name()[FOUNDATION], seed, Path(output_dir))
        if not jobs.keys() <= finished.keys() and not plan.is_ready():
            run_jobs([job(seed, "foundation")], 1)
        run_missing_jobs(jobs, RESULTS, 1)


def smooth(course: Sequence[float]) -> list[float]:
    """Means over `WIDTH` iterations, from each that has as many behind it."""
    return window_means(course, WIDTH)


def gold_within(run: Mapping[str, Any], budget: float) -> float:
    """The best gold of a run within a square root of KL; NaN if it starts beyond."""
    golds, kls = (smooth(run["courses"][name]) for name in ("gold", "kl"))
    within = [gold for gold, kl in zip(golds, kls, strict=True) if kl <= budget**2]
    return max(within, default=math.nan)


class Study(NamedTuple):
    """How arms are compared.

    Attributes:
        seeds: Number of seeds; with fewer results a verdict is open.
        margin: What an arm has to differ by in each seed.
        measures: What arms are compared by, from a result: the head of its column by function.
        timed: Seeds whose runs tell the cost.
    """

    seeds: int
    margin: float
    measures: dict[str, Callable[[Mapping[str, Any]], float]]
    timed: Sequence[int]


AT_THE_END: Final = "held-out gold at the end, above SFT's"
LAB: Final = Study(
    seeds=len(SEEDS),
    margin=MARGIN,
    measures={AT_THE_END: lambda run: run["gold"] - run["sft_gold"]}
    | {
        f"best gold within sqrt(KL) {budget}": partial(gold_within, budget=budget)
        for budget in BUDGETS
    },
    timed=TIMED,
)


def documents() -> Documents:
    """The page, all tables and the figure, from the committed results."""
    runs = read_runs(RESULTS)
    arms = by_arm(runs.values())
    measures = {AT_THE_END: LAB.measures[AT_THE_END]}
    return {
        PAGE: fill_template(
            TEMPLATE,
            iterations=ITERATIONS,
            criterion=CRITERION,
            arms=build_table(arms, LAB._replace(measures=measures)),
            at_most=f"{find_largest_bound(arms, LAB):.3f}",
            small_differences=list_small_differences(arms, LAB),
        ),
        TABLES: f"# Estimators in the lab: all measures\n\n{CRITERION}\n\n{format_tables(runs)}",
        FIGURE: lambda: draw(arms),
    }


def format_tables(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """All arms, and the best of n of the SFT policy.

    Args:
        runs: Results by name.
    """
    return f"{build_table(by_arm(runs.values()), LAB)}\n{build_best_of_table(runs.values())}"


def draw(arms: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Draw the gold of each arm's rollouts over the square root of KL.

    Args:
        arms: Results of each arm, by seed.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 4.0))
        axis = figure.subplots()
        draw_courses(axis, arms, roots_of_kl)
        axis.set_xlabel("square root of KL to the reference, nats per response")
        axis.set_title(f"gold reward of the rollouts, {len(SEEDS)} seeds each")
        axis.legend()
        return figure


def roots_of_kl(run: Mapping[str, Any]) -> list[float]:
    """Square roots of a run's KL, smoothed."""
    return [math.sqrt(max(kl, 0.0)) for kl in smooth(run["courses"]["kl"])]


def draw_courses(
    axis: Axes,
    arms: Mapping[str, Sequence[Mapping[str, Any]]],
    places: Callable[[Mapping[str, Any]], Sequence[float]],
) -> None:
    """Draw the gold of each run over what `places` takes from it, and each arm's means."""
    colors = figure_colors(arms)
    for arm, results in arms.items():
        color = colors[arm]
        runs = [(places(result), smooth(result["courses"]["gold"])) for result in results]
        for x, y in runs:
            axis.plot(x, y, color=color, linewidth=0.8, alpha=0.3)
        if runs:  # places and golds, iteration by iteration
            axis.plot(*np.mean(runs, axis=0), color=color, linewidth=2.0, label=arm)
    finish_axis(axis)


def build_best_of_table(results: Iterable[Mapping[str, Any]]) -> str:
    """One row per size of the best of n of the SFT policy: gold above SFT's by seed."""
    seed_golds = sorted((r["seed"], r["gold"]) for r in results if r["arm"] == "best_of")
    rows = []
    for size in BEST_OF[1:]:
        gains = ", ".join(f"{gold[str(size)] - gold['1']:.2f}" for _, gold in seed_golds)
        rows.append([f"best of {size}", gains, f"{math.sqrt(best_of_n_kl(size)):.2f}"])
    return table(["SFT, by the reward model", "gold above SFT's", "sqrt(KL), at most"], rows)


def by_arm(results: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The results of each arm, by seed."""
    ordered = sorted(results, key=lambda result: int(result["seed"]))
    return {arm: [result for result in ordered if result["arm"] == arm] for arm in ARMS}


def compare_arm(
    arms: Mapping[str, Sequence[Mapping[str, Any]]],
    arm: str,
    measure: Callable[[Mapping[str, Any]], float],
    study: Study,
) -> Comparison:
    """Compare an arm with PPO-max by a measure.

    Args:
        arms: Results of each arm, by seed.
        arm: Name of the arm.
        measure: The measure of a result.
        study: How arms are compared.
    """
    pairs = zip(arms[arm], arms["ppo_max"], strict=False)
    differences = [measure(result) - measure(base) for result, base in pairs]
    return compare_by_seed(differences, study.margin, study.seeds)


def list_small_differences(arms: Mapping[str, Sequence[Mapping[str, Any]]], study: Study) -> str:
    """List the differences that are no verdict, but whose interval excludes 0, as Markdown.

    Args:
        arms: Results of each arm, by seed.
        study: How arms are compared.
    """
    lines = []
    for arm in arms:
        for name, measure in study.measures.items():
            comparison = compare_arm(arms, arm, measure, study)
            if arm != "ppo_max" and comparison.is_small_difference:
                lines.append(f"- {arm}, {name}: {comparison}")
    return "\n".join(lines) or "- none"


def find_largest_bound(arms: Mapping[str, Sequence[Mapping[str, Any]]], study: Study) -> float:
    """The largest difference from PPO-max that the interval of an arm holds, at the end.

    Args:
        arms: Results of each arm, by seed.
        study: How arms are compared; its first measure counts.
    """
    measure = next(iter(study.measures.values()))
    intervals = [compare_arm(arms, arm, measure, study).interval for arm in arms]
    return max(interval.bound for interval in intervals if interval)


def build_table(arms: Mapping[str, Sequence[Mapping[str, Any]]], study: Study) -> str:
    """One row per arm: measures of each seed with verdicts, KL and length at the end, and cost."""
    rows = []
    for arm, results in arms.items():
        if not results:
            continue
        cells = [arm]
        for measure in study.measures.values():
            values = [measure(result) for result in results]
            cell = ", ".join("-" if math.isnan(v) else f"{v:.2f}" for v in values)
            if arm != "ppo_max":
                cell += f"; {compare_arm(arms, arm, measure, study)}"
            cells.append(cell)
        kls, lengths = (
            statistics.fmean(smooth(r["courses"][name])[-1] for r in results)
            for name in ("kl", "response_length")
        )
        seconds = [r["cpu_seconds"] for r in results if r["seed"] in study.timed]
        cost = f"{statistics.fmean(seconds):.0f}" if seconds else "-"
        rows.append([*cells, f"{math.sqrt(max(kls, 0.0)):.2f}", f"{lengths:.1f}", cost])
    head = ["arm", *study.measures, "sqrt(KL) at the end"]
    head += ["tokens per response at the end", "CPU seconds"]
    return table(head, rows)


COMMANDS = (run, run_one)
