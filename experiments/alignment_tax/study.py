"""What PPO costs on a benchmark, and whether PPO-ptx mitigates it: Figure 12 with SmolLM2-135M.

    python -m experiments alignment_tax run MODELS BASE TEXT QUESTIONS
    python -m experiments alignment_tax ask_world FOLDER QUESTIONS
    python -m experiments alignment_tax page

`MODELS` is the folder of a seed of `experiments.known_truth`, whose SFT and reward model all arms
start from; `TEXT` is plain text, and `QUESTIONS` a file of MMLU with the fields `question`, `A` to
`D`, `answer`, `subject` and `split`. Each arm is trained with and without the language-model loss
on the first nine tenths of the text; the rest measures perplexity. Finished steps are not repeated.

The rule, fixed before the runs: an effect is the paired difference of a seed's arms on the same
questions or text, with Student's 95 % interval of its mean over the seeds. PPO costs accuracy if
the interval of its arm against SFT lies below 0, and ptx mitigates if the interval of the arm with
ptx against the one without lies above 0; for the logarithm of perplexity the other way round.
Otherwise it is undecided. `ask_world` asks the policies of the built-in world the same questions;
`FOLDER` is the output of `experiments.reproduce.study run vanilla ppo_max ppo_max-ptx`.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec

from experiments.frame import DOCS, Documents, fill_template
from experiments.judging import student_interval
from experiments.known_truth.study import Recipe, Seed
from experiments.processes import Step, run_missing_steps, run_step
from experiments.reproduce.measuring import measure_perplexity
from experiments.results_file import read_lines, read_run, read_runs, table, write_run
from lit_rlhf.files import write_json_lines

RESULTS = Path(__file__).with_name("results.jsonl")
TEMPLATE = Path(__file__).with_name("page.md.j2")
PAGE = DOCS / "alignment_tax.md"
RECIPE = Recipe()
SEEDS = (20, 21, 22)
ARMS = ("ppo_vanilla", "ppo_vanilla_ptx", "ppo_max", "ppo_max_ptx")
LABELS = {
    "ppo_vanilla": "vanilla PPO",
    "ppo_vanilla_ptx": "vanilla PPO-ptx",
    "ppo_max": "PPO-max",
    "ppo_max_ptx": "PPO-max-ptx",
}
COMPARISONS = (
    ("ppo_vanilla", "sft"),
    ("ppo_vanilla_ptx", "ppo_vanilla"),
    ("ppo_max", "sft"),
    ("ppo_max_ptx", "ppo_max"),
)
OF_WORLD = {"vanilla": "vanilla PPO", "ppo_max": "PPO-max", "ppo_max-ptx": "PPO-max-ptx"}
QUESTIONS = 400
TEXTS = 64
"""Texts that measure perplexity."""
CHARACTERS = 600
"""Characters of a text, at most."""


def write_questions(source: Path, target: Path) -> None:
    """Draw `QUESTIONS` of the test split, and write them as `evaluate --choices` reads them."""
    with fsspec.open(source, "rt", compression="infer") as file:
        rows = [row for row in map(json.loads, file) if row["split"] == "test"]
    questions = random.Random(0).sample(rows, QUESTIONS)
    write_json_lines(
        target,
        [
            {
                "question": row["question"],
                "choices": [row[letter] for letter in "ABCD"],
                "answer": row["answer"],
                "subject": row["subject"],
            }
            for row in questions
        ],
    )


def split_text(source: Path, training: Path, unseen: Path) -> None:
    """Cut the text at nine tenths: to train on and to measure."""
    with fsspec.open(source, "rt", compression="infer") as file:
        lines = [line for line in map(str.strip, file) if len(line) >= 200]
    cut = len(lines) * 9 // 10
    write_json_lines(training, [{"text": line} for line in lines[:cut]])
    write_json_lines(unseen, [{"text": line} for line in lines[cut:]])


def run(
    models: str,
    base: str,
    text: str,
    questions: str,
    *,
    output_dir: str = "runs/alignment_tax",
    seeds: tuple[int, ...] = SEEDS,
    recipe: Recipe = RECIPE,
    threads: int = 2,
    results: str = str(RESULTS),
) -> None:
    """Train the arms that are missing, and measure them beside SFT.

    Args:
        models: Folder of a seed of `experiments.known_truth`.
        base: Folder of SmolLM2-135M-Instruct.
        text: File of plain text.
        questions: File of MMLU.
        output_dir: Folder for all files of the runs.
        seeds: Seeds of the rollouts, the critic's head and the order of the data.
        recipe: That of `models`.
        threads: Threads of a step.
        results: File of the results.
    """
    root = Path(output_dir).resolve()
    asked, training, unseen = (root / name for name in ("mmlu.jsonl", "text.jsonl", "unseen.jsonl"))
    root.mkdir(parents=True, exist_ok=True)
    write_questions(Path(questions), asked)
    split_text(Path(text), training, unseen)
    for seed in seeds:
        runs = Seed(root, f"seed_{seed}", base, seed, recipe)
        for name in ("sft", "reward"):
            link = Path(runs.path(name))
            if not link.exists():
                link.symlink_to(Path(models, name).resolve())
        steps = [runs.fit_ppo(arm, str(training) if arm.endswith("ptx") else "") for arm in ARMS]
        steps.append(measure(runs, asked, unseen))
        result = read_run(Path(results), f"seed_{seed}") or {}
        for step, row in run_missing_steps(steps, result, folder=runs.root, threads=threads):
            result[step.name] = row
            write_run(Path(results), f"seed_{seed}", result)


def measure(runs: Seed, questions: Path, unseen: Path) -> Step:
    """A step that asks SFT and all arms the questions, and then reads the unseen text."""
    names = ("sft", *ARMS)
    asking = ask(Path(runs.path("benchmarks.json")), Path(runs.path()), names, questions)

    def collect() -> dict[str, Any]:
        texts = [row["text"][:CHARACTERS] for row in read_lines(unseen)[:TEXTS]]
        return {
            name: {**answers, "perplexity": measure_perplexity(Path(runs.path(name)), texts)}
            for name, answers in asking.collect().items()
        }

    return asking._replace(collect=collect)


def ask(output: Path, folder: Path, names: Sequence[str], questions: Path) -> Step:
    """A step that asks the policies of a folder the questions; the first is the baseline."""
    command = ["-m", "lit_rlhf.cli.main", "evaluate", "--policies"]
    command += [str(folder / name) for name in names]
    command += ["--choices", str(questions), "--output", str(output)]

    def collect() -> dict[str, Any]:
        report = json.loads(output.read_text("utf-8"))["benchmarks"]
        scores = next(row for row in report["rows"] if row["part"] == "")["scores"]
        return {
            name: {
                "accuracy": scores[name]["value"],
                "difference": scores[name]["difference"],
                "stderr": scores[name]["difference_stderr"],
            }
            for name in names
        }

    return Step("measure", 1, command, collect)


def ask_world(
    folder: str, questions: str, output_dir: str = "runs/alignment_tax", results: str = str(RESULTS)
) -> None:
    """Ask the policies of the built-in world the questions.

    Args:
        folder: Folder with the runs of `experiments.reproduce`.
        questions: File of MMLU.
        output_dir: Folder for all files.
        results: File of the results.
    """
    root = Path(output_dir).resolve()
    root.mkdir(parents=True, exist_ok=True)
    write_questions(Path(questions), root / "mmlu.jsonl")
    for seed in sorted(Path(folder).resolve().glob("foundation-biased-en-seed_*")):
        if (seed / "ppo_max-ptx").is_dir():
            name = f"world_{seed.name.split('-')[3]}"
            step = ask(root / f"{name}.json", seed, ("sft", *OF_WORLD), root / "mmlu.jsonl")
            write_run(Path(results), name, {"measure": run_step(step, root / name, threads=1)})


def judge(effects: list[float], sign: int) -> str:
    """Whether the interval lies on the side of `sign`, on the other side, or on both."""
    low, _, high = student_interval(effects)
    if low * sign > 0 and high * sign > 0:
        return "yes"
    return "no" if low * sign < 0 and high * sign < 0 else "undecided"


def documents() -> Documents:
    """The page, from the committed results."""
    return {PAGE: format_page(read_runs(RESULTS))}


def format_page(results: dict[str, dict[str, Any]]) -> str:
    """Format the page: scores of each seed, and the comparisons."""
    done = {name: row["measure"]["result"] for name, row in results.items() if "measure" in row}
    measured = [row for name, row in done.items() if name.startswith("seed_")]
    of_world = {name: row for name, row in done.items() if name.startswith("world_")}
    names = {"sft": "SFT", **LABELS}
    scores = [
        [
            names[arm],
            *(f"{100 * row[arm]['accuracy']:.2f}" for row in measured),
            *(f"{row[arm]['perplexity']:.2f}" for row in measured),
        ]
        for arm in names
    ]
    rows = []
    for arm, other in COMPARISONS:
        ptx = arm.endswith("ptx")
        accuracy = [row[arm]["accuracy"] - row[other]["accuracy"] for row in measured]
        text = [math.log(row[arm]["perplexity"] / row[other]["perplexity"]) for row in measured]
        low, mean, high = student_interval(accuracy)
        text_low, text_mean, text_high = (math.exp(value) for value in student_interval(text))
        rows.append(
            [
                f"{names[arm]} against {names[other]}",
                "ptx mitigates" if ptx else "PPO costs",
                f"{100 * mean:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]",
                judge(accuracy, 1 if ptx else -1),
                f"x {text_mean:.3f} [{text_low:.3f}, {text_high:.3f}]",
                judge(text, -1 if ptx else 1),
            ]
        )
    seeds = [name.removeprefix("seed_") for name in done if name.startswith("seed_")]
    head = ["policy", *(f"MMLU %, seed {s}" for s in seeds), *(f"perplexity, {s}" for s in seeds)]
    columns = ["comparison", "claim", "MMLU, points", "holds", "perplexity", "holds"]
    world = [
        [label, *(f"{100 * row[arm]['accuracy']:.1f}" for row in of_world.values())]
        for arm, label in {"sft": "SFT", **OF_WORLD}.items()
    ]
    asked = ["policy", *(f"MMLU %, seed {name.rpartition('_')[2]}" for name in of_world)]
    return fill_template(
        TEMPLATE,
        questions=QUESTIONS,
        scores=table(head, scores),
        comparisons=table(columns, rows),
        world=table(asked, world),
    )


COMMANDS = (run, ask_world)
