"""Two rounds of labels in the lab against one round with as many labels.

    python -m experiments rounds run      # trains what is missing
    python -m experiments rounds page     # writes docs/rounds.md

An annotator by a script labels pairs through the schedule and the store of `lit_rlhf label`: it
prefers the response with the higher gold, calls equal gold a tie, and errs in a tenth of all other
cases. A round is labels, a reward model on all labels so far, which starts from SFT, and PPO-max.

- `one`: all labels are of SFT's samples, and PPO-max runs once, for all iterations.
- `two`: half of the labels are the first half of `one`'s. PPO-max runs for half of the iterations.
  The other half of the labels are of that policy's samples. PPO-max goes on from that policy, with
  its critic, for the other half of the iterations.

Both arms get the same prompts, the same number of looks and the same number of iterations. Gold is
measured on held-out prompts. `CRITERION` was fixed before the first run, and there was no trial.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from matplotlib import rc_context
from matplotlib.figure import Figure

from experiments.drawing import COLORS, STYLE, finish_axis
from experiments.frame import DOCS, IMAGES, Documents, fill_template
from experiments.judging import compare_by_seed
from experiments.lab_gold import measure_gold
from experiments.processes import command_job, cpu_seconds_used, run_missing_jobs
from experiments.reproduce.running import versions
from experiments.results_file import read_runs, table, write_run
from lit_rlhf.data import DataSource, Message, load_records
from lit_rlhf.files import write_text
from lit_rlhf.rollout import SamplingOptions
from lit_rlhf.tools.commands.quickstart import Quickstart
from lit_rlhf.tools.evaluation import generate_from_models
from lit_rlhf.tools.evaluation.labels import Choice
from lit_rlhf.tools.evaluation.responses import read_response_lines
from lit_rlhf.tools.lab import gold_reward
from lit_rlhf.tools.labelling import (
    LabelStore,
    Schedule,
    ScheduleOptions,
    order_comparisons,
    pair_responses,
)

RESULTS = Path(__file__).with_name("results.jsonl")
TABLES = RESULTS.with_suffix(".md")
PAGE = DOCS / "rounds.md"
FIGURE = IMAGES / "rounds.svg"
PAGE_TEMPLATE = Path(__file__).with_name("page.md.j2")
TABLES_TEMPLATE = Path(__file__).with_name("results.md.j2")
SEEDS: Final = (71, 72, 73)
LOOKS: Final = 1000
"""Comparisons that are shown in each of two rounds; `one` shows twice as many at once."""
ITERATIONS: Final = 30
"""Iterations of PPO in each of two rounds; `one` has twice as many."""
BATCH: Final = 128
"""Responses of an iteration."""
ERRORS: Final = 0.1
"""Share of the annotator's choices that are wrong."""
MARGIN: Final = 0.1
"""Gold by which the arms have to differ."""
POLICIES: Final = ("sft", "ppo_two_first", "ppo_two", "ppo_one")
"""Policies whose gold is measured."""
CRITERION: Final = (
    f"Two rounds are better (worse) than one if the gold of the final policy is higher (lower) by "
    f"more than {MARGIN} with each of the seeds {', '.join(map(str, SEEDS))}; else no difference "
    "is shown."
)
"""Fixed before the first run."""


def run_one(output_dir: str, seed: int) -> None:
    """Run both arms of a seed in this process.

    Args:
        output_dir: Folder of the experiment.
        seed: Seed of world, models, labels and order.
    """
    root = Path(output_dir) / f"seed_{seed}"
    stages = Quickstart(root, seed, world="extrapolation", overwrite=True)
    stages.write_world()
    stages.fit_sft("sft.yaml")
    sft = root / "sft"
    first = label_samples(stages, sft, "sft_first", first_prompt=0)
    second_of_sft = label_samples(stages, sft, "sft_second", first_prompt=LOOKS)
    train_round(stages, "one", [first, second_of_sft], start=sft, iterations=2 * ITERATIONS)
    train_round(stages, "two_first", [first], start=sft, iterations=ITERATIONS)
    middle = root / "ppo_two_first"
    second_of_ppo = label_samples(stages, middle, "ppo_second", first_prompt=LOOKS)
    train_round(
        stages,
        "two",
        [first, second_of_ppo],
        start=middle,
        iterations=ITERATIONS,
        critic=middle / "critic",
    )
    labels = {"first": first, "second of SFT": second_of_sft, "second of PPO": second_of_ppo}
    result: dict[str, Any] = {
        "seed": seed,
        "gold": {policy: measure_gold(stages, policy) for policy in POLICIES},
        "preferences": {
            name: len(load_records("preference", [DataSource(str(path))]))
            for name, path in labels.items()
        },
        "cpu_seconds": cpu_seconds_used(),
        "versions": versions(),
    }
    write_run(RESULTS, run_name(seed), result)


def label_samples(stages: Quickstart, policy: Path, name: str, *, first_prompt: int) -> Path:
    """Sample two responses of a policy to each of `LOOKS` prompts, and label them.

    Args:
        stages: The folders and the seed.
        policy: Folder of the policy.
        name: Name of the file of labels.
        first_prompt: Place of the first prompt among the training prompts.

    Returns:
        The file of labels.
    """
    folder = stages.root / "labels"
    prompts = load_records("prompt", [DataSource(f"{stages.root}/world/prompts_train.jsonl")])
    responses = folder / f"{name}_responses.jsonl"
    generate_from_models(
        [str(policy)],
        prompts[first_prompt : first_prompt + LOOKS],
        sampling=SamplingOptions(max_new_tokens=48),
        batch_size=128,
        responses_per_prompt=2,
        seed=stages.seed,
        output=responses,
    )
    comparisons = pair_responses(read_response_lines([str(responses)]))
    order = order_comparisons(comparisons, seed=stages.seed)
    path = folder / f"{name}.jsonl"
    path.unlink(missing_ok=True)
    store = LabelStore(path, order)
    schedule = Schedule(order, store, ScheduleOptions(repeat_share=0.0, seed=stages.seed))
    errors = random.Random(f"errors {name} {stages.seed}")
    while (task := schedule.next_task("script")) is not None:
        compared = store.comparisons[task.comparison]
        golds = gold_reward(
            [prompt_text(compared.prompt)] * 2,
            [compared.response_a, compared.response_b],
            [bool(compared.ended_a), bool(compared.ended_b)],
        )
        better: Choice = "a" if golds[0] > golds[1] else "b"
        if errors.random() < ERRORS:
            better = "b" if better == "a" else "a"
        schedule.save(task, "tie" if golds[0] == golds[1] else better)
    store.close()
    return path


def prompt_text(turns: Sequence[Message]) -> str:
    """A prompt as HH-RLHF writes it, which gold reads."""
    speakers = {"user": "Human", "assistant": "Assistant"}
    written = "".join(f"\n\n{speakers[turn.role]}: {turn.content}" for turn in turns)
    return f"{written}\n\nAssistant:"


def train_round(
    stages: Quickstart,
    name: str,
    labels: Sequence[Path],
    *,
    start: Path,
    iterations: int,
    critic: Path | None = None,
) -> None:
    """Train a reward model on labels, and PPO-max by it, to `reward_NAME` and `ppo_NAME`.

    Args:
        stages: The folders and the seed.
        name: Name of the round.
        labels: Files of labels.
        start: Folder of the policy that PPO starts from, which is its reference too.
        iterations: Iterations of PPO.
        critic: Folder of the critic that it goes on with; `None`: the reward model's copy.
    """
    root = stages.root
    reward = f"{root}/reward_{name}"
    sources = [{"path": str(path), "name": path.stem} for path in labels]
    own_reward = {
        "model": {"init_args": {"output_dir": reward}},
        "data": {"init_args": {"train_sources": sources}},
    }
    overlay = write_text(root / "configs" / f"own_reward_{name}.yaml", json.dumps(own_reward))
    stages.fit(
        ("reward.yaml", overlay),
        *("--name", f"reward_{name}"),
        seeded=["--data.seed", "--model.head_seed"],
    )
    own: dict[str, Any] = {
        "rewards": {reward: 1.0},
        "model_path": str(start),
        "output_dir": f"{root}/ppo_{name}",
    }
    if critic is not None:
        own["critic_init"] = str(critic)
    ppo = {
        "trainer": {"callbacks": [], "limit_val_batches": 0},
        "model": {"init_args": own},
        "data": {"init_args": {"samples_per_epoch": iterations * BATCH}},
    }
    overlay = write_text(root / "configs" / f"own_ppo_{name}.yaml", json.dumps(ppo))
    stages.fit_ppo(("ppo_max.yaml", overlay), "--name", f"ppo_{name}")


def run_name(seed: int) -> str:
    """Name of a run in the file of results."""
    return f"seed_{seed}"


def run(output_dir: str = "runs/rounds", parallel: int = 1) -> None:
    """Train what has no result yet.

    Args:
        output_dir: Folder of all runs.
        parallel: Seeds at a time.
    """
    jobs = {
        run_name(seed): command_job(
            "rounds",
            "run_one",
            {"output_dir": output_dir, "seed": seed},
            log=Path(output_dir) / f"{run_name(seed)}.log",
        )
        for seed in SEEDS
    }
    run_missing_jobs(jobs, RESULTS, parallel)


def documents() -> Documents:
    """The page and all tables, from the committed results."""
    results = read_results()
    return {
        PAGE: fill_template(
            PAGE_TEMPLATE,
            finding=format_finding(results),
            verdict=judge(results),
            **{policy: f"{mean_gold(results, policy):.2f}" for policy in POLICIES},
            second_of_sft=join_preferences(results, "second of SFT"),
            second_of_ppo=join_preferences(results, "second of PPO"),
        ),
        TABLES: fill_template(
            TABLES_TEMPLATE,
            criterion=CRITERION,
            finding=format_finding(results),
            labels=format_labels(results),
        ),
        FIGURE: lambda: draw(results),
    }


Result = Mapping[str, Any]


def read_results() -> list[Result]:
    """The committed results by seed."""
    return sorted(read_runs(RESULTS).values(), key=lambda result: int(result["seed"]))


def judge(results: Sequence[Result]) -> str:
    """The verdict on two rounds, see `CRITERION`."""
    differences = [run["gold"]["ppo_two"] - run["gold"]["ppo_one"] for run in results]
    return str(compare_by_seed(differences, MARGIN, len(SEEDS)))


def format_finding(results: Sequence[Result]) -> str:
    """Format gold of all policies by seed."""
    rows: list[list[str]] = []
    for run in results:
        golds = run["gold"]
        cells = [f"{golds[policy]:.2f}" for policy in POLICIES]
        rows.append([str(run["seed"]), *cells, f"{golds['ppo_two'] - golds['ppo_one']:+.2f}"])
    means = {policy: mean_gold(results, policy) for policy in POLICIES}
    difference = means["ppo_two"] - means["ppo_one"]
    rows.append(["mean", *(f"{mean:.2f}" for mean in means.values()), f"{difference:+.2f}"])
    head = ["seed", "SFT", "after the first round", "after the second round", "one round"]
    return table([*head, "two less one"], rows)


def mean_gold(results: Sequence[Result], policy: str) -> float:
    """Mean gold of a policy over the seeds."""
    return fmean(run["gold"][policy] for run in results)


def join_preferences(results: Sequence[Result], labels: str) -> str:
    """How many comparisons of a file of labels became preferences, by seed."""
    return ", ".join(str(run["preferences"][labels]) for run in results)


def format_labels(results: Sequence[Result]) -> str:
    """Format how many of the looks became preferences."""
    names = list(results[0]["preferences"])
    rows = [[run["seed"], *(run["preferences"][name] for name in names)] for run in results]
    return table(["seed", *names], rows)


def draw(results: Sequence[Result]) -> Figure:
    """Draw gold over the labels of both arms, a thin line for each seed."""
    with rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.2), layout="constrained")
        axes = figure.subplots()
        arms = {
            "two rounds": (("sft", "ppo_two_first", "ppo_two"), (0, LOOKS, 2 * LOOKS)),
            "one round": (("sft", "ppo_one"), (0, 2 * LOOKS)),
        }
        for color, (arm, (policies, looks)) in zip(COLORS, arms.items(), strict=False):
            for run in results:
                golds = [run["gold"][policy] for policy in policies]
                axes.plot(looks, golds, color=color, alpha=0.35, linewidth=1)
            means = [mean_gold(results, policy) for policy in policies]
            axes.plot(looks, means, color=color, linewidth=2, marker="o", label=arm)
        axes.set_xlabel("comparisons shown to the annotator")
        axes.set_ylabel("gold")
        axes.legend()
        finish_axis(axes)
    return figure


COMMANDS = (run, run_one)
