"""Estimators on small sums with SmolLM2-135M-Instruct, where a rule is both reward and truth.

    python -m experiments estimator_sums run MODEL    # trains what is missing
    python -m experiments estimator_sums page         # writes docs/estimator_sums.md

The arms of `experiments.estimators`, on configs/examples/arithmetic.yaml: 20 iterations of 16
responses, to 16 prompts or in four groups. Where there is a critic, the first two train it alone,
and its learning rate is the example's. That configuration, with lambda 1 and advantages whitened
per minibatch, was made for PPO; of it all arms keep the KL penalty and the normalized and clipped
rewards, which the papers of the others do not have, and arms without a critic do not whiten their
advantages per minibatch. VAPO's lambda relies on a critic that learns little in so few iterations.
Each arm has the same tuning: one run at each of `RATES` with seed 0, of which the rate with the
highest mean share within `TOKENS` is kept. Where that is the lowest or the highest of `RATES`, half
of it or twice as much was run after all results, to see whether the grid was too narrow.

`CRITERION` was fixed before any run of a deciding seed. A version before it, with 30 iterations,
compared the ends of runs first, at a margin of 0.05. Four runs of its tuning (PPO-max at each rate,
VAPO at the lowest) had ended with 0.81 to 0.91 right, where little is left to differ by.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, product, takewhile
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from matplotlib import rc_context
from matplotlib.figure import Figure

from experiments.drawing import STYLE
from experiments.estimators.study import (
    ARMS,
    VAPO_ALPHA,
    WIDTH,
    Study,
    build_table,
    by_arm,
    draw_courses,
    roots_of_kl,
    smooth,
)
from experiments.examples.study import ask_unseen
from experiments.frame import DOCS, IMAGES, Documents, fill_template
from experiments.processes import Step, run_missing_steps
from experiments.results_file import read_runs, table, write_run
from lit_callbacks import read_logged_steps
from lit_rlhf.files import write_text
from lit_rlhf.functional import best_of_n_kl

RESULTS = Path(__file__).with_name("results.jsonl")
TABLES = RESULTS.with_suffix(".md")
TEMPLATE = Path(__file__).with_name("page.md.j2")
TABLES_TEMPLATE = Path(__file__).with_name("results.md.j2")
PAGE = DOCS / "estimator_sums.md"
FIGURE = IMAGES / "estimator_sums.svg"
SEEDS: Final = (1, 2, 3, 4, 5)
TUNING_SEED: Final = 0
RATES: Final = (2.5e-4, 5e-4, 1e-3)
ITERATIONS = 20
RESPONSES = 16
BEST_OF: Final = (1, 4, 16)
BUDGETS: Final = (1.0, 1.5)
"""Square roots of KL, in nats per response."""
TOKENS: Final = 4000
"""Sampled tokens of responses, fewer than most runs have; a shorter run counts whole."""
MARGIN: Final = 0.1
CRITERION: Final = (
    "An estimator is better (worse) than PPO-max if the mean share of right responses in the "
    f"iterations within {TOKENS} sampled tokens is higher (lower) by more than {MARGIN} in each of "
    "the five seeds; else its paired 95 % interval is given. The same holds for the share of right "
    f"responses to unseen sums at the end, and for the mean over the last {WIDTH} iterations "
    "before the root of KL leaves a budget."
)


def tokens_sampled(run: Mapping[str, Any]) -> list[float]:
    """Tokens of all responses up to the end of each iteration."""
    return [RESPONSES * total for total in accumulate(run["courses"]["response_length"])]


def right_within_tokens(run: Mapping[str, Any]) -> float:
    """The mean share of right responses in the iterations within `TOKENS` sampled tokens."""
    shares = zip(run["courses"]["gold"], tokens_sampled(run), strict=True)
    return fmean(share for share, tokens in shares if tokens <= TOKENS)


def right_within_kl(run: Mapping[str, Any], budget: float) -> float:
    """The last mean share before the root of KL leaves the budget; NaN if it starts beyond."""
    shares = zip(smooth(run["courses"]["gold"]), roots_of_kl(run), strict=True)
    within = [share for share, _ in takewhile(lambda point: point[1] <= budget, shares)]
    return within[-1] if within else math.nan


STUDY: Final = Study(
    seeds=len(SEEDS),
    margin=MARGIN,
    measures={
        f"right, mean within {TOKENS} tokens": right_within_tokens,
        "right, unseen sums at the end": lambda run: run["gold_unseen"],
        **{
            f"right before sqrt(KL) leaves {budget}": partial(right_within_kl, budget=budget)
            for budget in BUDGETS
        },
    },
    timed=SEEDS,
)


def train(*, model: Path, root: Path, arm: str, rate: float, seed: int, label: str) -> Step:
    """A step that trains an arm and reads its course.

    Args:
        model: Folder of SmolLM2-135M-Instruct.
        root: Folder of all runs.
        arm: Key of `ARMS`.
        rate: Learning rate of the policy.
        seed: Seed of the rollouts and of the order of the data.
        label: Name of the run.
    """
    overlays, group = ARMS[arm]
    advantages: dict[str, Any] = {"lam_alpha": VAPO_ALPHA} if arm == "vapo" else {}
    if arm not in ("ppo_max", "vapo"):
        advantages = {"normalization": False}
    overrides = {
        "suffix": [],
        "trainer": {
            "callbacks": [],
            "limit_val_batches": 0,
            "logger": {"init_args": {"save_dir": str(root / "logs"), "name": label}},
        },
        "model": {
            "init_args": {
                "model_path": str(model),
                "output_dir": str(root / label),
                "seed": seed,
                "policy_optimizer": {"learning_rate": rate},
                "advantages": advantages,
            }
        },
        "data": {
            "init_args": {
                "seed": seed,
                "batch_size": RESPONSES // group,
                "samples_per_epoch": ITERATIONS * RESPONSES // group,
            }
        },
    }
    file = write_text(root / "configs" / f"{label}.yaml", json.dumps(overrides) + "\n")
    command = ["-m", "lit_rlhf", "fit", "--overwrite"]  # an interrupted run begins again
    for name in ("examples/arithmetic", *overlays, str(file)):
        command += ["--config", name]

    def collect() -> dict[str, Any]:
        steps = list(read_logged_steps(str(root / "logs" / label)).values())
        keys = {"gold": "score/right", "kl": "kl", "response_length": "response_length"}
        courses = {
            name: [round(s[f"rollout/{key}"], 4) for s in steps if f"rollout/{key}" in s]
            for name, key in keys.items()
        }
        return {"seed": seed, "arm": arm, "rate": rate, "courses": courses}

    return Step(label, 1, command, collect)


def evaluate(model: Path, root: Path, seed: int) -> Step:
    """A step that asks the model and the arms of a seed the unseen sums."""
    report = root / f"unseen_{seed}.json"
    command = ask_unseen([model, *(root / f"{arm}-seed_{seed}" for arm in ARMS)], report)
    command += ["--samples_per_prompt", str(max(BEST_OF)), "--best_of", *map(str, BEST_OF)]
    command += ["--seed", str(seed), "--batch_size", "4"]

    def collect() -> dict[str, Any]:
        evaluation = json.loads(report.read_text("utf-8"))
        rows = evaluation["policies"].items()
        right = {Path(name).name: row["rewards"]["right"]["mean"] for name, row in rows}
        best = {str(r["n"]): r["scores"]["right"]["mean"] for r in evaluation["best_of"]}
        return {"seed": seed, "right": right, "best_of": best}

    return Step(f"unseen_{seed}", 1, command, collect)


def run(model: str, output_dir: str = "runs/estimator_sums", parallel: int = 2) -> None:
    """Train what has no result yet.

    Args:
        model: Folder of SmolLM2-135M-Instruct.
        output_dir: Folder of all runs, whose models take 25 GB.
        parallel: Runs at a time, each on one thread.
    """
    base = Path(model).resolve()
    root = Path(output_dir).resolve()

    def do(step: Step) -> None:
        for _, row in run_missing_steps([step], read_runs(RESULTS), folder=root, threads=1):
            seconds = round(60 * row["cpu_minutes"], 1)
            write_run(RESULTS, step.name, {**row["result"], "cpu_seconds": seconds})

    def train_arm(arm: str, *, rate: float, seed: int, label: str) -> Step:
        return train(model=base, root=root, arm=arm, rate=rate, seed=seed, label=label)

    tuning = [
        train_arm(arm, rate=rate, seed=TUNING_SEED, label=f"tuning-{arm}-{rate:g}")
        for arm, rate in product(ARMS, RATES)
    ]
    with ThreadPoolExecutor(parallel) as pool:
        list(pool.map(do, tuning))
        for step in tuning:
            shutil.rmtree(root / step.name, ignore_errors=True)  # its course alone is needed
        rates = choose_rates(read_runs(RESULTS))
        runs = [
            train_arm(arm, rate=rates[arm], seed=seed, label=f"{arm}-seed_{seed}")
            for seed, arm in product(SEEDS, ARMS)
        ]
        list(pool.map(do, runs))
        list(pool.map(do, [evaluate(base, root, seed) for seed in SEEDS]))
        beyond = [
            train_arm(arm, rate=beyond_grid(rate), seed=TUNING_SEED, label=f"beyond-{arm}")
            for arm, rate in rates.items()
            if beyond_grid(rate) != rate
        ]
        list(pool.map(do, beyond))


def choose_rates(runs: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Each arm's rate by its tuning; of equal ones the lowest."""

    def right(arm: str, rate: float) -> float:
        return right_within_tokens(runs[f"tuning-{arm}-{rate:g}"])

    return {arm: max(RATES, key=lambda rate: right(arm, rate)) for arm in ARMS}


def beyond_grid(rate: float) -> float:
    """The next rate outside `RATES`, if `rate` is its lowest or highest; else `rate`."""
    return {RATES[0]: rate / 2, RATES[-1]: rate * 2}.get(rate, rate)


def judged(runs: dict[str, dict[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The results of each arm with its share of right responses to the unseen sums."""
    done = [
        {**row, "gold_unseen": runs[f"unseen_{row['seed']}"]["right"][name]}
        for name, row in runs.items()
        if "-seed_" in name and f"unseen_{row['seed']}" in runs
    ]
    return by_arm(done)


def format_tables(runs: dict[str, dict[str, Any]]) -> str:
    """The tables of the page: arms, the best of n, and the tuning."""
    unseen = [runs[f"unseen_{seed}"] for seed in SEEDS if f"unseen_{seed}" in runs]
    best = [
        [
            f"best of {size}",
            ", ".join(f"{row['best_of'][str(size)]:.2f}" for row in unseen),
            f"{math.sqrt(best_of_n_kl(size)):.2f}",
        ]
        for size in BEST_OF
    ]
    rates = choose_rates(runs)
    tuning = [
        [
            arm,
            *(f"{right_within_tokens(runs[f'tuning-{arm}-{rate:g}']):.2f}" for rate in RATES),
            f"{rates[arm]:g}",
            f"{right_within_tokens(found):.2f} at {found['rate']:g}"
            if (found := runs.get(f"beyond-{arm}"))
            else "-",
        ]
        for arm in ARMS
    ]
    head = ["SmolLM2-135M-Instruct, chosen by the truth", "right, unseen sums", "sqrt(KL), at most"]
    parts = [build_table(judged(runs), STUDY), table(head, best)]
    head = ["right at a rate of", *(f"{r:g}" for r in RATES), "kept", "beyond the grid"]
    return "\n".join([*parts, table(head, tuning)])


def documents() -> Documents:
    """The page, all tables and the figure, from the committed results."""
    runs = read_runs(RESULTS)
    shown_measures = dict(list(STUDY.measures.items())[:2])
    return {
        PAGE: fill_template(
            TEMPLATE, arms=build_table(judged(runs), STUDY._replace(measures=shown_measures))
        ),
        TABLES: fill_template(TABLES_TEMPLATE, criterion=CRITERION, tables=format_tables(runs)),
        FIGURE: lambda: draw(judged(runs)),
    }


def draw(arms: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Draw the share of right responses of each arm over the square root of KL and over tokens.

    Args:
        arms: Results of each arm, by seed.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=(9.0, 4.0))
        left, right = figure.subplots(1, 2, sharey=True)
        draw_courses(left, arms, roots_of_kl)
        draw_courses(right, arms, lambda run: tokens_sampled(run)[WIDTH - 1 :])
        left.set_xlabel("square root of KL to the reference, nats per response")
        right.set_xlabel("sampled tokens")
        left.set_title(f"share of right responses, {len(SEEDS)} seeds each")
        left.legend()
        return figure


COMMANDS = (run,)
