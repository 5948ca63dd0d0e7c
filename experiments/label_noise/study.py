"""Flipped labels in the lab: how well strength finds them, and what the remedies are worth.

    python -m experiments label_noise run      # trains what is missing
    python -m experiments label_noise page     # writes docs/label_noise.md

After *Secrets of RLHF, Part II: Reward Modeling* (arXiv 2401.06080), in the lab's world
`extrapolation`. Pairs are two responses of an SFT model, the chosen one with the higher gold; pairs
of equal gold are left out. A share of the labels of the training pairs is then flipped at random,
so that it is known which are wrong. Test pairs have other prompts and keep their labels. All reward
models have the quickstart's options. Strength is of `lit_rlhf reward strength` with its defaults,
and every remedy is given the true share of flipped labels, which has to be guessed elsewhere.

PPO-max then learns from each reward model for half of the quickstart's iterations, and is judged by
gold on held-out prompts.

`CRITERION` was fixed before the first result, after a trial on seed 0 with 2,293 pairs and a fifth
flipped, which set the number of pairs: the AUC was 0.80, and the accuracy 0.79 without flips and
0.67 with them. Since then, before any result was looked at, test pairs became 1,200 instead of
1,500, as a seed has no more, and runs without flips lost their strength and remedies. Differences
are rounded since the results at 20 %: 12 of 1,200 pairs, the 0.01 of the criterion, were a little
more than 0.01 as floating-point numbers. After the results of seeds 61 to 63 at 0, 20 and 30 %, and
before all others, seeds 64 and 65 were added, and PPO with its part of the criterion, for which all
was trained again. The result of each run is a line of `experiments/label_noise/results.jsonl`, and
none is repeated.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from torchmetrics.functional.classification import binary_auroc

from experiments.drawing import COLORS, STYLE, band, finish_axis
from experiments.frame import DOCS, IMAGES, Documents, fill_template
from experiments.judging import compare_by_seed
from experiments.lab_gold import measure_gold
from experiments.processes import command_job, cpu_seconds_used, run_missing_jobs
from experiments.reproduce.running import versions
from experiments.results_file import (
    read_lines,
    read_runs,
    table,
    write_run,
)
from lit_rlhf.data import DataSource
from lit_rlhf.files import write_json_lines, write_text
from lit_rlhf.tools.commands.quickstart import Quickstart
from lit_rlhf.tools.commands.reward import fit_reward_model, measure_strength, relabel
from lit_rlhf.tools.evaluation.reward_report import score_pairs
from lit_rlhf.tools.lab import gold_reward

RESULTS = Path(__file__).with_name("results.jsonl")
TABLES = RESULTS.with_suffix(".md")
PAGE = DOCS / "label_noise.md"
FIGURE = IMAGES / "label_noise.svg"
PAGE_TEMPLATE = Path(__file__).with_name("page.md.j2")
TABLES_TEMPLATE = Path(__file__).with_name("results.md.j2")
SEEDS: Final = (61, 62, 63, 64, 65)
RATES: Final = (0.0, 0.1, 0.2, 0.3)
"""Shares of flipped labels."""
REMEDIES: Final = ("flip", "remove", "margin", "smoothing")
PAIRS = 6500
"""Pairs that are sampled; more than a quarter are of equal gold."""
TRAIN = 3000
"""Pairs to train on."""
TEST = 1200
"""Pairs to measure accuracy on."""
WANTED: Final = 0.8
"""AUC that is wanted."""
MARGIN: Final = 0.01
"""Accuracy by which a remedy has to differ."""
GOLD_MARGIN: Final = 0.1
"""Gold after PPO by which a remedy has to differ."""
CRITERION: Final = (
    f"Strength finds the flipped pairs of a share if its AUC is at least {WANTED} with each seed. "
    "A remedy is better (worse) than none if the accuracy of its reward model on the test pairs "
    f"is higher (lower) by more than {MARGIN} with each seed; else its paired 95 % interval is "
    "given, by Student's t over the seeds. "
    f"By PPO it is better (worse) if the gold of its policy is higher (lower) by more than "
    f"{GOLD_MARGIN} with each seed."
)
ITERATIONS = 35
"""Iterations of PPO."""
BATCH = 128
"""Responses of an iteration."""
Pair = dict[str, Any]


def run_one(output_dir: str, seed: int, rate: float) -> None:
    """Measure strength and train the reward models of a share of flipped labels in this process.

    Args:
        output_dir: Folder of the benchmark.
        seed: Seed of world, models, labels and order.
        rate: Share of flipped labels.
    """
    root = Path(output_dir) / f"seed_{seed}"
    stages = Quickstart(root, seed, world="extrapolation", pairs=PAIRS, overwrite=True)
    preferences = root / "world" / "preferences.jsonl"
    if not preferences.is_file():
        stages.write_world()
        stages.fit_sft("sft.yaml")
        stages.label_preferences()
    train, test = split_pairs(label_by_gold(read_lines(preferences)), seed)
    flipped_places = random.Random(f"flips {seed} {rate}").sample(range(TRAIN), round(rate * TRAIN))
    flipped = torch.zeros(TRAIN, dtype=torch.long)
    flipped[flipped_places] = 1
    noisy_pairs = [swap(pair) if flip else pair for pair, flip in zip(train, flipped, strict=True)]
    model = str(root / "sft")
    folder = root / f"flipped_{rate}"
    pairs = write_json_lines(folder / "pairs.jsonl", noisy_pairs)
    strengths = str(folder / "strengths.jsonl")
    result: dict[str, Any] = {"seed": seed, "rate": rate, "accuracy": {}, "gold": {}}
    if rate:  # else there is nothing to find
        measured = measure_strength(
            model, [str(pairs)], ["quickstart/reward"], strengths, seed=seed, device="cpu"
        )
        strength = torch.tensor([row["strength"] for row in measured])
        weakest = strength.argsort()[: len(flipped_places)]
        result["auc"] = auc(strength, flipped)
        result["flipped_among_weakest"] = float(flipped[weakest].double().mean())
        result["negative"] = float((strength < 0).double().mean())
    for remedy in ("none", *REMEDIES) if rate else ("none",):
        written = str(folder / f"{remedy}.jsonl")
        options: list[str] = ["--config", "quickstart/reward"]
        rows = noisy_pairs
        if remedy in ("flip", "remove", "margin"):
            flip, remove = (rate if remedy == name else 0.0 for name in ("flip", "remove"))
            rows = relabel(strengths, written, flip, remove, margin=remedy == "margin")
        if remedy == "smoothing":
            options.append(f"--model.label_smoothing={rate}")
        with TemporaryDirectory(dir=folder) as new:
            trained = fit_reward_model(model, rows, options, new, seed)
            result["accuracy"][remedy] = float((score(trained, test) > 0).double().mean())
            if rate and remedy == "none":
                result["auc_in_sample"] = auc(score(trained, noisy_pairs), flipped)
            train_policy(stages, trained, remedy)
        result["gold"][remedy] = measure_gold(stages, remedy)
    result["sft_gold"] = measure_gold(stages, "sft")
    result["cpu_seconds"] = cpu_seconds_used()
    result["versions"] = versions()
    write_run(RESULTS, run_name(seed, rate), result)


def train_policy(stages: Quickstart, reward: str, name: str) -> None:
    """Train PPO-max on a reward model, to a folder beside the other stages."""
    overrides = {
        "trainer": {"callbacks": [], "limit_val_batches": 0},
        "model": {"init_args": {"rewards": {reward: 1.0}}},
        "data": {"init_args": {"samples_per_epoch": ITERATIONS * BATCH}},
    }
    overlay = write_text(stages.root / "configs" / f"own_{name}.yaml", json.dumps(overrides) + "\n")
    folder = f"--model.output_dir={stages.root / name}"
    stages.fit_ppo(("ppo_max.yaml", overlay), "--name", name, folder)


def run_name(seed: int, rate: float) -> str:
    """Name of a run in the file of results."""
    return f"flipped_{rate}-seed_{seed}"


def label_by_gold(pairs: Iterable[Pair]) -> list[Pair]:
    """HH records whose chosen response has the higher gold; none of equal gold."""
    labelled = []
    for pair in pairs:
        golds = []
        for side in ("chosen", "rejected"):
            prompt, marker, response = pair[side].rpartition("\n\nAssistant:")
            golds += gold_reward([prompt + marker], [response.strip()], [True])
        if golds[0] != golds[1]:
            labelled.append(pair if golds[0] > golds[1] else swap(pair))
    return labelled


def split_pairs(pairs: Sequence[Pair], seed: int) -> tuple[list[Pair], list[Pair]]:
    """`TRAIN` pairs to train on and `TEST` pairs with other prompts.

    Raises:
        ValueError: If there are too few.
    """
    prompts = sorted({prompt_of(pair) for pair in pairs})
    random.Random(f"test {seed}").shuffle(prompts)
    held_out = set(prompts[: len(prompts) // 3])
    train = [pair for pair in pairs if prompt_of(pair) not in held_out][:TRAIN]
    test = [pair for pair in pairs if prompt_of(pair) in held_out][:TEST]
    if (len(train), len(test)) != (TRAIN, TEST):
        raise ValueError(f"pairs: expected {TRAIN} and {TEST}, got {len(train)} and {len(test)}")
    return train, test


def prompt_of(pair: Pair) -> str:
    """The dialogue before the responses."""
    return str(pair["chosen"].rpartition("\n\nAssistant:")[0])


def swap(pair: Pair) -> Pair:
    """The pair with the other label."""
    return {"chosen": pair["rejected"], "rejected": pair["chosen"]}


def score(model: str, pairs: Sequence[Pair]) -> torch.Tensor:
    """Score differences of pairs, `[N]`."""
    scored = score_pairs(model, [DataSource(list(pairs))])
    return torch.from_numpy(scored.chosen - scored.rejected)


def auc(strength: torch.Tensor, flipped: torch.Tensor) -> float:
    """Chance that a flipped pair is weaker than another one."""
    return float(binary_auroc(-strength, flipped))


def run(output_dir: str = "runs/label_noise", parallel: int = 1) -> None:
    """Train what has no result yet.

    Args:
        output_dir: Folder of all runs.
        parallel: Seeds at a time.
    """
    for rate in RATES:  # one share after the other: the runs of a seed share files
        jobs = {
            run_name(seed, rate): command_job(
                "label_noise",
                "run_one",
                {"output_dir": output_dir, "seed": seed, "rate": rate},
                log=Path(output_dir) / f"{run_name(seed, rate)}.log",
            )
            for seed in SEEDS
        }
        run_missing_jobs(jobs, RESULTS, parallel)


def documents() -> Documents:
    """The page, all tables and the figure, from the committed results."""
    results = read_results()
    finding = format_finding(results)
    return {
        PAGE: fill_template(
            PAGE_TEMPLATE,
            finding=finding,
            accuracy=list_small_differences(results, "accuracy", MARGIN),
            gold=list_small_differences(results, "gold", GOLD_MARGIN),
        ),
        TABLES: fill_template(
            TABLES_TEMPLATE,
            criterion=CRITERION,
            finding=finding,
            accuracy=format_accuracy(results),
            gold=format_gold(results),
        ),
        FIGURE: lambda: draw(results),
    }


Result = Mapping[str, Any]
Results = Mapping[float, Sequence[Result]]
"""Results of each share of flipped labels, by seed."""


def read_results() -> dict[float, list[Result]]:
    """The committed results."""
    return by_rate(read_runs(RESULTS).values())


def by_rate(results: Iterable[Result]) -> dict[float, list[Result]]:
    """The results of each share of flipped labels, by seed.

    Args:
        results: Results of runs.
    """
    by_seed = sorted(results, key=lambda result: int(result["seed"]))
    return {rate: [run for run in by_seed if run["rate"] == rate] for rate in RATES}


def format_finding(results: Results) -> str:
    """Format what strength finds, by share of flipped labels."""
    rows = []
    for rate, runs in results.items():
        if rate and runs:
            aucs = [run["auc"] for run in runs]
            cells = [join(aucs), find_verdict(aucs)]
            for measure in ("auc_in_sample", "flipped_among_weakest", "negative"):
                cells.append(join(run[measure] for run in runs))
            rows.append([f"{rate:.0%}", *cells])
    head = ["flipped", "AUC", "", "AUC of a model trained on the pairs"]
    head += ["flipped among as many weakest", "strength below 0"]
    return table(head, rows)


def format_accuracy(results: Results) -> str:
    """Format the accuracy of the reward model after each remedy."""
    rows = [
        [f"{rate:.0%}", *compare_remedies(runs, "accuracy", ".3f", MARGIN)]
        for rate, runs in results.items()
        if runs
    ]
    return table(["flipped", "none", *REMEDIES], rows)


def format_gold(results: Results) -> str:
    """Format the gold of the policy after each remedy."""
    rows = []
    for rate, runs in results.items():
        if runs:
            sft = join(run["sft_gold"] for run in runs)
            golds = compare_remedies(runs, "gold", ".2f", GOLD_MARGIN)
            rows.append([f"{rate:.0%}", sft, *golds])
    return table(["flipped", "SFT", "none", *REMEDIES], rows)


def draw(results: Results) -> Figure:
    """Draw the gold after PPO over the share of flipped labels, with each remedy and without.

    Args:
        results: Results of each share of flipped labels.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.6))
        axis = figure.subplots()
        plain = [[run["gold"]["none"] for run in runs] for runs in results.values()]
        band(axis, list(zip(*plain, strict=True)), [*results], "no remedy", COLORS[0])
        flipped = [rate for rate in results if rate]
        for remedy, color in zip(REMEDIES, COLORS[1:], strict=False):
            means = [fmean(run["gold"][remedy] for run in results[rate]) for rate in flipped]
            axis.plot(flipped, means, "o-", color=color, linewidth=1.2, markersize=4, label=remedy)
        sft = fmean(run["sft_gold"] for runs in results.values() for run in runs)
        axis.axhline(sft, color="#555555", linestyle="--", linewidth=1.0, label="SFT")
        axis.set_xticks([*results], [f"{rate:.0%}" for rate in results])
        axis.set_xlabel("share of flipped labels")
        axis.set_title(f"gold reward on held-out prompts, {len(SEEDS)} seeds each")
        axis.legend(fontsize=8, ncols=2)
        finish_axis(axis)
        return figure


def compare_remedies(runs: Sequence[Result], measure: str, form: str, margin: float) -> list[str]:
    """Cells of a measure: its values without a remedy, and the gain of each with a verdict.

    Args:
        runs: Results of a share of flipped labels, by seed.
        measure: `accuracy` or `gold`.
        form: Format of a value.
        margin: What a remedy has to differ by in each seed.
    """
    cells = [join((run[measure]["none"] for run in runs), form)]
    for remedy in REMEDIES:
        gains = measure_gains(runs, measure, remedy)
        verdict = compare_by_seed(gains, margin, len(SEEDS))
        cells.append(f"{join(gains, '+' + form)}; {verdict}" if gains else "")
    return cells


def measure_gains(runs: Sequence[Result], measure: str, remedy: str) -> list[float]:
    """The gain of a remedy with each seed; empty where it was not tried.

    Args:
        runs: Results of a share of flipped labels, by seed.
        measure: `accuracy` or `gold`.
        remedy: One of `REMEDIES`.
    """
    tried = [run[measure] for run in runs if remedy in run[measure]]
    return [values[remedy] - values["none"] for values in tried]


def list_small_differences(results: Results, measure: str, margin: float) -> str:
    """List the remedies with no verdict whose gain has an interval that excludes 0, as Markdown.

    Args:
        results: Results of each share of flipped labels.
        measure: `accuracy` or `gold`.
        margin: What a remedy has to differ by in each seed.
    """
    lines = []
    for rate, runs in results.items():
        for remedy in REMEDIES:
            gains = measure_gains(runs, measure, remedy)
            comparison = compare_by_seed(gains, margin, len(SEEDS))
            if comparison.is_small_difference:
                lines.append(f"- {measure}, {remedy} at {rate:.0%}: {comparison}")
    return "\n".join(lines) or f"- {measure}: none"


def join(values: Iterable[float], form: str = ".2f") -> str:
    """The values of all seeds in one cell."""
    return ", ".join(f"{value:{form}}" for value in values)


def find_verdict(aucs: Sequence[float]) -> str:
    """The verdict of `CRITERION` on strength, by the AUC of each seed."""
    if len(aucs) != len(SEEDS):
        return "open"
    return "found" if all(value >= WANTED for value in aucs) else "not found"


COMMANDS = (run, run_one)
