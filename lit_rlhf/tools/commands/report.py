"""`lit_rlhf report`: one HTML page about training runs, or about a reward model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_rlhf.checks import check_count
from lit_rlhf.choices import DType, OnBadRecord
from lit_rlhf.command import Command
from lit_rlhf.errors import end_with_message
from lit_rlhf.paths import check_inputs, source_path
from lit_rlhf.terminal import fold, help_text, print_line

if TYPE_CHECKING:  # it imports torch, for which --help does not wait
    from lit_rlhf.data import DataSource


def report_reward_model(
    model: str,
    preferences: list[str],
    *,
    output: str = "reward_report",
    language_model: str | None = None,
    mistakes: int = 10,
    strengths: str | None = None,
    split: str = "test",
    max_pairs: int | None = None,
    max_length: int | None = None,
    on_bad_record: OnBadRecord = "error",
    chat_template: str = "tokenizer",
    batch_size: int = 16,
    seed: int = 0,
    device: str = "auto",
    dtype: DType = "float32",
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Report on a reward model: accuracy, calibration, length bias, mistakes, perplexity.

    Args:
        model: Folder or hub id of the reward model.
        preferences: Files of preferences (.jsonl, .json, .parquet, .jsonl.gz) or ids of datasets on
            the hub, each as PATH or NAME=PATH. Use pairs that the model was not trained on.
        output: Folder for report.html and report.json.
        language_model: Folder or hub id of the language model that the reward model started from.
            Its perplexity is reported too. Its output layer is used if the reward model's folder
            has no lm_head.safetensors; without either, the reward model has no perplexity.
        mistakes: Number of mistakes to show, the most confident first, and of weak pairs.
        strengths: File that lit_rlhf reward strength wrote; the page then shows its strengths, and
            the pairs that look mislabelled.
        split: Split of a dataset on the hub, for example test or test[:200]; not used for files.
        max_pairs: Number of first pairs to use of each source. Default: all.
        max_length: Longest dialogue in tokens; longer ones lose their oldest turns. Default: the
            longest of the model's training, or 512.
        on_bad_record: error stops at the first record that cannot be used and names its line; skip
            counts such records on the page.
        chat_template: tokenizer for the template in the model's folder, or hh, paper-en, paper-zh.
        batch_size: Number of pairs that are scored together.
        seed: Seed of the bootstrap.
        device: auto, cpu, cuda, cuda:1 and so on.
        dtype: Data type of all weights: float32, bfloat16 or float16.
        trust_remote_code: Run code that comes with a model. Leave it off unless you have read it.
    """
    check_count("mistakes", mistakes, minimum=0)
    check_count("batch_size", batch_size)
    check_inputs(
        {"model": model, "language_model": language_model},
        [*map(source_path, preferences), strengths],
    )
    from lit_rlhf.data import RecordError
    from lit_rlhf.files import write_text
    from lit_rlhf.models import ModelOptions
    from lit_rlhf.tools.evaluation.loading import choose_device
    from lit_rlhf.tools.evaluation.reward_report import (
        measure_reward_model,
        print_reward_report,
        read_strengths,
        report_html,
        score_pairs,
    )

    sources = [parse_source(word, split=split) for word in preferences]
    rows = [] if strengths is None else read_strengths(strengths)
    try:
        pairs = score_pairs(
            model,
            sources,
            language_model=language_model,
            options=ModelOptions(dtype=dtype, trust_remote_code=trust_remote_code),
            device=choose_device(device),
            batch_size=batch_size,
            chat_template=chat_template,
            max_length=max_length,
            max_pairs=max_pairs,
            on_bad_record=on_bad_record,
        )
    except RecordError as error:
        if on_bad_record == "error" and error.line:
            raise ValueError(f"{error}; --on_bad_record skip leaves such records out") from error
        raise
    paths = {source.label: source.path for source in sources}
    report = measure_reward_model(
        model, paths, pairs, n_mistakes=mistakes, seed=seed, strengths=rows
    )
    settings: dict[str, Any] = {"max_length": max_length, "max_pairs": max_pairs, "dtype": dtype}
    print_reward_report(report)
    values: dict[str, Any] = report.as_dict() | {"settings": settings}
    numbers = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    print_line(f"Numbers: {write_text(Path(output, 'report.json'), numbers)}")
    print_line(f"Page: {write_text(Path(output, 'report.html'), report_html(report))}")
    return values


def parse_source(word: str, *, split: str) -> "DataSource":
    """Parse a source given as PATH or NAME=PATH; a path may itself contain a `=`.

    Args:
        word: The source.
        split: Split of a dataset on the hub; not used for files.
    """
    from lit_rlhf.data import DataSource

    path = source_path(word)
    name = word.removesuffix(path).removesuffix("=")
    return DataSource(path, name=name or None, split=split)


_OUTPUT = ("output",)
COMMANDS = {
    "reward": Command(report_reward_model, lists=("preferences",), writes=_OUTPUT, folders=_OUTPUT)
}
USAGE = help_text("report")


def main(argv: Sequence[str]) -> None:
    """Run `lit_rlhf report`."""
    if argv and argv[0] == "reward":
        COMMANDS["reward"].run(argv[1:], "lit_rlhf report reward")
    elif argv and argv[0] == "gain" and len(argv) > 1:
        from lit_callbacks.gain import main as report_gain

        try:
            report_gain(argv[1:])
        except Exception as error:
            end_with_message(error, "lit_rlhf report gain")
    elif not argv or argv[0] in ("-h", "--help"):
        print(fold(USAGE))
    else:
        _report_runs(argv)


def _report_runs(argv: Sequence[str]) -> None:
    """Report on training runs; a word that is no path was meant as a command."""
    is_path = argv[0].startswith("-") or set(argv[0]) & {"=", "/"} or Path(argv[0]).exists()
    if not is_path:
        raise SystemExit(
            f"lit_rlhf report: expected `reward` or the folder of a run's log, got {argv[0]!r}, "
            "which does not exist; lit_rlhf report --help tells more"
        )
    from lit_callbacks.report import main as report_runs

    report_runs(argv, "lit_rlhf report")
