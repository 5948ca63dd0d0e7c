"""`lit_rlhf reward`: strengths of preferences (arXiv 2401.06080), RewardBench, and a probe."""

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_rlhf.checks import check_count, check_number
from lit_rlhf.choices import DType, OnBadRecord
from lit_rlhf.cli.configs import resolve_configs
from lit_rlhf.command import Command
from lit_rlhf.files import delete, read_text
from lit_rlhf.paths import check_inputs, check_outputs, source_path
from lit_rlhf.terminal import print_line

if TYPE_CHECKING:  # it imports torch, for which --help does not wait
    from lit_rlhf.tools.evaluation.reward_probe import RewardProbe


def measure_strength(
    model: str,
    preferences: list[str],
    fit_config: list[str],
    output: str,
    *,
    folds: int = 5,
    repeats: int = 1,
    seed: int = 0,
    split: str = "train",
    on_bad_record: OnBadRecord = "error",
    device: str = "auto",
) -> list[dict[str, Any]]:
    """Measure how strong preferences are, by reward models that were not trained on them.

    Args:
        model: Folder or hub id of the model that training starts from, usually the SFT model.
        preferences: Files or ids of datasets on the hub, each as PATH or NAME=PATH.
        fit_config: Configurations of the reward stage for lit_rlhf fit, by name or path; the last
            wins. Data, model, seeds and folders are set by this command.
        output: JSON lines file for the pairs in order, with strength and strength_std. Finished
            models' scores are kept beside it, and after an interruption the same command continues.
        folds: Number of parts of the pairs. A model is trained without each part, and scores it; 1
            trains a model on all pairs, as in the paper.
        repeats: Number of models that score each pair, trained with other parts and seeds.
        seed: Seed of the first model and parts; the others have the next ones.
        split: Split of a dataset on the hub, for example train or train[:200].
        on_bad_record: error stops at the first record that cannot be used; skip leaves it out.
        device: Where pairs are scored: auto, cpu, cuda, cuda:1 and so on.
    """
    check_count("folds", folds)
    check_count("repeats", repeats)
    import torch

    from lit_rlhf.data import DataSource, PreferenceRecord, load_records, turns_as_dicts
    from lit_rlhf.files import ProgressFile, hash_model
    from lit_rlhf.tools.commands.report import parse_source
    from lit_rlhf.tools.evaluation.loading import choose_device
    from lit_rlhf.tools.evaluation.reward_report import print_strengths, score_pairs

    sources = [parse_source(word, split=split) for word in preferences]
    check_outputs({"output": output}, [source.place for source in sources])
    records: list[PreferenceRecord] = load_records("preference", sources, on_bad_record)
    rows: list[dict[str, Any]] = [
        {
            "prompt": turns_as_dicts(pair.prompt),
            "chosen": pair.chosen,
            "rejected": pair.rejected,
            "source": pair.source,
            "margin": pair.margin,
            "location": str(pair.location),
        }
        for pair in records
    ]
    configs = resolve_configs([word for name in fit_config for word in ("--config", name)])
    settings = {
        "model": [model, hash_model(model)],
        "preferences": [[on_bad_record, source.content_hash()] for source in sources],
        "fit_config": [read_text(config) for config in configs[1::2]],
        "folds": folds,
        "repeats": repeats,
        "seed": seed,
    }
    differences = torch.full((repeats, len(rows)), math.nan, dtype=torch.float64)
    with ProgressFile(output, settings) as unfinished:
        for number in range(folds * repeats):
            repeat, fold = divmod(number, folds)
            fold_of = assign_folds(
                [record.prompt for record in records], folds=folds, seed=seed + repeat
            )
            held_out = [place for place in range(len(rows)) if fold_of[place] == fold]
            # a single model is trained on all pairs, and scores them
            training = [
                row for place, row in enumerate(rows) if fold_of[place] != fold or folds == 1
            ]
            name = f"model {number + 1} of {folds * repeats}"
            finished = unfinished.batches(name)
            if finished:
                places, scored = finished[0]
            else:
                print()
                print_line(f"{name}, which scores {len(held_out)} of {len(rows)} pairs")
                with _make_work_folder(output) as folder:
                    trained = fit_reward_model(model, training, configs, folder, seed + number)
                    source = DataSource([rows[place] for place in held_out])
                    pairs = score_pairs(trained, [source], device=choose_device(device))
                # the lines of rows count from 1; pairs that are too long for the model are missing
                places = [held_out[record.location.line - 1] for record in pairs.records]
                scored = (pairs.chosen - pairs.rejected).tolist()
                unfinished.add(name, [places, scored])
            differences[repeat, places] = torch.tensor(scored, dtype=torch.float64)
        # mean and deviation over the models, as in Section 2 of the paper
        stds, means = torch.std_mean(differences, dim=0, correction=0)
        for row, mean, std in zip(rows, means.tolist(), stds.tolist(), strict=True):
            row |= {"strength": mean, "strength_std": std if repeats > 1 else None}
        rows = [row for row in rows if math.isfinite(row["strength"])]
        unfinished.finish(rows)
    print_strengths(rows)
    print_line(f"{len(rows)} pairs in {output}; {len(records) - len(rows)} too long for the model")
    return rows


@contextmanager
def _make_work_folder(output: str) -> Iterator[str]:
    """Make a folder beside an output, and delete it in the end.

    Its name is the same at every start, so that a killed command's goes with the next one.
    """
    path = Path(output)
    folder = path.with_name(f".{path.name}.models")
    delete(folder)
    folder.mkdir(parents=True)
    try:
        yield str(folder)
    finally:
        delete(folder)


def assign_folds(prompts: Sequence[Any], *, folds: int, seed: int) -> list[int]:
    """Draw the fold of each pair; pairs with equal prompts are in one fold.

    Args:
        prompts: Prompt of each pair, hashable.
        folds: Number of folds.
        seed: Seed of the draw.

    Returns:
        A number from 0 to `folds - 1` for each pair.
    """
    distinct = list(dict.fromkeys(prompts))
    if len(distinct) < folds:
        raise ValueError(f"folds: expected at most {len(distinct)}, one per prompt, got {folds}")
    random.Random(seed).shuffle(distinct)
    fold_of = {prompt: place % folds for place, prompt in enumerate(distinct)}
    return [fold_of[prompt] for prompt in prompts]


def fit_reward_model(
    model: str, rows: Sequence[Mapping[str, Any]], configs: Sequence[str], folder: str, seed: int
) -> str:
    """Train a reward model with `lit_rlhf fit` on pairs.

    Args:
        model: Folder or hub id of the model that training starts from.
        rows: The pairs, as rows of a data file.
        configs: Arguments for `lit_rlhf fit` that name its configurations.
        folder: Folder for the pairs, the overlay and the model.
        seed: Seed of the data and of the head.

    Returns:
        Folder of the model.
    """
    from lit_rlhf.files import write_json_lines, write_text
    from lit_rlhf.tools.commands.quickstart import run

    trained = f"{folder}/reward"
    pairs = write_json_lines(f"{folder}/pairs.jsonl", rows)
    data = {"train_sources": [{"path": str(pairs)}], "val_fraction": 0, "test_fraction": 0}
    trainer = {"logger": False, "default_root_dir": folder, "limit_val_batches": 0}
    trainer |= {"enable_checkpointing": False, "callbacks": None}  # a progress bar is the only one
    arguments = {"model_path": model, "output_dir": trained, "head_seed": seed}
    overlay = {
        "seed_everything": seed,
        "suffix": [],
        "trainer": {**trainer, "devices": 1},  # a second process would run this whole command
        "model": {"init_args": arguments},
        "data": {"init_args": {**data, "seed": seed}},
    }
    file = write_text(f"{folder}/overlay.yaml", json.dumps(overlay) + "\n")
    run("fit", *configs, "--config", str(file))
    return trained


def relabel(
    strengths: str, output: str, flip: float = 0.0, remove: float = 0.0, margin: bool = False
) -> list[dict[str, Any]]:
    """Flip or remove the weakest preferences, or write strengths as margins of the loss.

    Args:
        strengths: JSON lines file that lit_rlhf reward strength wrote.
        output: JSON lines file for the pairs, to train a reward model on.
        flip: Share of the pairs, the weakest, whose chosen and rejected responses are swapped.
        remove: Share of the pairs, the weakest of those not flipped, that are left out.
        margin: Write the strength as the margin of the pairwise loss; a negative one as 0.
    """
    for name, share in (("flip", flip), ("remove", remove)):
        check_number(name, share, "a share in [0, 1)", lambda x: 0 <= x < 1)
    from lit_rlhf.files import write_json_lines
    from lit_rlhf.tools.evaluation.reward_report import read_strengths

    check_outputs({"output": output}, [strengths])
    rows = read_strengths(strengths)
    weakest = sorted(range(len(rows)), key=lambda place: float(rows[place]["strength"]))
    n_flipped = round(flip * len(rows))
    n_removed = round(remove * len(rows))
    if n_flipped + n_removed >= len(rows):
        raise ValueError(f"flip, remove: expected to leave pairs as they are, got {flip}, {remove}")
    for pair in (rows[place] for place in weakest[:n_flipped]):
        pair["chosen"], pair["rejected"] = pair["rejected"], pair["chosen"]
        pair |= {"strength": -pair["strength"], "margin": 0.0}  # its margin was the other label
    removed = set(weakest[n_flipped : n_flipped + n_removed])
    rows = [pair for place, pair in enumerate(rows) if place not in removed]
    for pair in rows if margin else ():
        pair["margin"] = max(pair["strength"], 0.0)
    write_json_lines(output, rows)
    print_line(f"{len(rows)} pairs in {output}: {n_flipped} flipped, {n_removed} removed")
    return rows


def run_bench(
    models: list[str],
    questions: str,
    *,
    output: str | None = None,
    max_length: int | None = None,
    device: str = "auto",
    dtype: DType = "float32",
) -> dict[str, Any]:
    """Measure how often reward models score a right response above all wrong ones.

    Args:
        models: Folders or hub ids of reward models.
        questions: File in RewardBench's format (.jsonl, .json or .parquet, or one of these with
            .gz): prompt, chosen and rejected, each a text or a list of texts, and subset.
        output: JSON file for the report.
        max_length: Longest dialogue in tokens. Default: the same as in the model's training, or
            512.
        device: auto, cpu, cuda, cuda:1 and so on.
        dtype: Data type of all weights: float32, bfloat16 or float16.
    """
    check_outputs({"output": output}, [questions])
    check_inputs({"models": models}, [questions])
    from lit_rlhf.data import DataSource
    from lit_rlhf.files import code_versions, hash_model, write_text
    from lit_rlhf.models import ModelOptions
    from lit_rlhf.tools.evaluation.loading import choose_device
    from lit_rlhf.tools.evaluation.reward_bench import (
        measure_accuracy,
        print_accuracy,
        read_questions,
    )

    bench = read_questions(questions)
    results = {}
    for model in models:
        results[model] = measure_accuracy(
            model,
            bench,
            options=ModelOptions(dtype=dtype),
            device=choose_device(device),
            max_length=max_length,
        )
        print_accuracy(model, results[model])
    inputs = {model: hash_model(model) for model in models}
    inputs[questions] = DataSource(questions).content_hash()
    report = {"inputs": inputs, "models": results, "versions": code_versions()}
    if output is not None:
        text = json.dumps(report, indent=2) + "\n"
        print_line(f"Report: {write_text(output, text)}")
    return report


def probe(
    rewards: dict[str, float | dict[str, Any]],
    data: list[str],
    *,
    policy: str | None = None,
    output: str = "reward_probe",
    max_prompts: int = 64,
    max_new_tokens: int | None = None,
    split: str = "test",
    on_bad_record: OnBadRecord = "error",
    chat_template: str = "tokenizer",
    reward_timeout: float | None = None,
    seed: int = 0,
    device: str = "auto",
    dtype: DType = "float32",
    trust_remote_code: bool = False,
) -> "RewardProbe":
    """Measure how much score each way to cheat gains over honest answers, before a run of PPO.

    The exit status is 1 if a cheat scores higher than honest answers, and 2 after an error.

    Args:
        rewards: Weights by reward, as in a configuration of PPO: a reward model's folder or hub id,
            or 'package.module:function'; a mapping instead of a weight describes a rule
            (docs/rewards.md). PPO would learn from their sum, which is what is probed.
        data: Files of preferences or demonstrations (.jsonl, .json, .parquet, .jsonl.gz) or ids of
            datasets on the hub, each as PATH or NAME=PATH. Chosen responses and answers are the
            honest ones.
        policy: Folder or hub id of the policy, usually the SFT model, whose tokenizer and chat
            template write prompts and responses. Default: the first reward model.
        output: Folder for probe.json and probe.svg.
        max_prompts: Number of prompts, drawn by the seed from those with an honest answer.
        max_new_tokens: Longest response in tokens, as sampling.max_new_tokens of the run; longer
            ones are cut off, as there. Default: what the policy's positions leave.
        split: Split of a dataset on the hub, for example test or test[:200]; not used for files.
        on_bad_record: error stops at the first record that cannot be used and names its line; skip
            leaves it out.
        chat_template: tokenizer for the template in the policy's folder, or hh, paper-en, paper-zh.
        reward_timeout: Seconds that a call of a reward function may take. Default: no limit.
        seed: Seed of the choice of prompts and of the bootstrap.
        device: auto, cpu, cuda, cuda:1 and so on.
        dtype: Data type of all weights: float32, bfloat16 or float16.
        trust_remote_code: Run code that comes with a model. Leave it off unless you have read it.
    """
    check_count("max_prompts", max_prompts)
    if max_new_tokens is not None:
        check_count("max_new_tokens", max_new_tokens)
    check_inputs({"rewards": rewards, "policy": policy}, map(source_path, data))
    from lit_rlhf.files import write_text
    from lit_rlhf.models import ModelOptions
    from lit_rlhf.tools.commands.report import parse_source
    from lit_rlhf.tools.evaluation import save_figure
    from lit_rlhf.tools.evaluation.loading import choose_device
    from lit_rlhf.tools.evaluation.output import progress_bar
    from lit_rlhf.tools.evaluation.reward_probe import (
        count_responses,
        draw_probe,
        load_probe,
        print_probe,
        probe_reward,
    )

    loaded = load_probe(
        rewards,
        [parse_source(word, split=split) for word in data],
        policy=policy,
        max_new_tokens=max_new_tokens,
        on_bad_record=on_bad_record,
        chat_template=chat_template,
        reward_timeout=reward_timeout,
        model_options=ModelOptions(dtype=dtype, trust_remote_code=trust_remote_code),
        device=choose_device(device),
    )
    honest = loaded.answers
    if len(honest) > max_prompts:
        honest = random.Random(seed).sample(honest, max_prompts)
    with progress_bar("responses scored", count_responses(len(honest))) as progress:
        probed = probe_reward(
            loaded.reward,
            honest,
            loaded.encoder,
            device=choose_device(device),
            seed=seed,
            report_progress=progress,
        )
    print_probe(probed)
    if loaded.left_out:
        reasons = ", ".join(f"{n} ({reason})" for reason, n in loaded.left_out.items())
        print_line(f"Left out: {reasons}")
    settings = {"rewards": rewards, "data": data, "policy": policy, "seed": seed}
    settings |= {"max_new_tokens": max_new_tokens, "dtype": dtype}
    report = probed.as_dict() | {"settings": settings}
    numbers = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    print_line(f"Numbers: {write_text(Path(output, 'probe.json'), numbers)}")
    print_line(f"Figure: {save_figure(draw_probe(probed), Path(output, 'probe.svg'))}")
    return probed


CHEATED = 1
"""Exit status of a probe if a cheat scores higher than honest answers."""
ERROR = 2
"""Exit status of a probe after an error."""


def end_with_verdict(probe: "RewardProbe") -> None:
    """End with `CHEATED` if a cheat scores higher than honest answers."""
    if probe.gaining:
        raise SystemExit(CHEATED)


_OUTPUT = ("output",)
COMMANDS = {
    "strength": Command(measure_strength, lists=("preferences", "fit_config"), writes=_OUTPUT),
    "relabel": Command(relabel, writes=_OUTPUT),
    "bench": Command(run_bench, lists=("models",), writes=_OUTPUT),
    "probe": Command(
        probe,
        lists=("data",),
        then=end_with_verdict,
        writes=_OUTPUT,
        folders=_OUTPUT,
        error_status=ERROR,
    ),
}
