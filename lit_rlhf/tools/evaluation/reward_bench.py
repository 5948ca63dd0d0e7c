"""RewardBench: how often a reward model scores the best of several responses highest.

Its format is of RewardBench (Lambert et al., arXiv 2403.13787; pairs) and RewardBench 2 (Malik et
al., arXiv 2506.01937; the best of four): a `prompt`, `chosen` and `rejected`, each a text or a list
of texts, and the `subset`.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from lit_rlhf.data import DataSource, RecordError, Row
from lit_rlhf.files import check_outputs, code_versions, hash_model, write_text
from lit_rlhf.functional import wilson_interval
from lit_rlhf.models import DType, ModelOptions
from lit_rlhf.tools.evaluation.loading import choose_device
from lit_rlhf.tools.evaluation.output import make_table, print_table
from lit_rlhf.tools.evaluation.reward_report import score_pairs


def run_reward_bench(
    models: list[str],
    questions: str,
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
        max_length: Longest dialogue in tokens. Default: that of the model's training, or 512.
        device: auto, cpu, cuda, cuda:1 and so on.
        dtype: Data type of all weights: float32, bfloat16 or float16.
    """
    check_outputs({"output": output}, [questions])
    rows, subsets = read_questions(questions)
    scoring = (ModelOptions(dtype=dtype), choose_device(device))
    results = {}
    for model in models:
        pairs = score_pairs(model, [DataSource(rows)], None, *scoring, max_length=max_length)
        # lines of rows in memory count from 1
        places = [record.location.line - 1 for record in pairs.records]
        wins = dict(zip(places, (pairs.chosen > pairs.rejected).tolist(), strict=True))
        results[model] = summarize(rows, subsets, wins)
        _print(model, results[model])
    inputs = {model: hash_model(model) for model in models}
    inputs[questions] = DataSource(questions).content_hash()
    report = {"inputs": inputs, "models": results, "versions": code_versions()}
    if output is not None:
        text = json.dumps(report, indent=2) + "\n"
        print(f"Report: {write_text(output, text)}")
    return report


def read_questions(path: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Read questions as pairs, each with the number of its question, and the questions' subsets.

    Raises:
        RecordError: If a field is missing or has another type, with its line.
    """
    pairs: list[dict[str, Any]] = []
    subsets: list[str] = []
    for row in DataSource(path).read_rows():
        if isinstance(row, RecordError):
            raise row
        prompt, subset = row.read_string("prompt"), row.read_string("subset")
        texts = [_read_texts(row, side) for side in ("chosen", "rejected")]
        if set(texts[0]) & set(texts[1]):
            raise row.error("rejected", "a text that is chosen, too")
        for chosen in texts[0]:
            for rejected in texts[1]:
                pair = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
                pairs.append({**pair, "question": len(subsets)})
        subsets.append(subset)
    return pairs, subsets


def _read_texts(row: Row, field: str) -> list[str]:
    texts = row.get(field)
    texts = [texts] if isinstance(texts, str) else texts
    is_list = isinstance(texts, list) and bool(texts)
    if not is_list or not all(isinstance(text, str) and text.strip() for text in texts):
        raise row.error(field, "not a text or a list of texts", repr(texts)[:80])
    return texts


def summarize(
    pairs: Sequence[dict[str, Any]], subsets: Sequence[str], wins: dict[int, bool]
) -> dict[str, Any]:
    """Accuracy by subset with its 95 % interval, and the mean over subsets.

    A question is right if every right response scores higher than every wrong one; a tie is wrong.
    `wins` are by the place of the pair. A question with a pair that was too long is left out, and
    so is a subset of nothing else from the mean.
    """
    of_question = defaultdict(list)
    for place, pair in enumerate(pairs):
        of_question[pair["question"]].append(wins.get(place))
    rows: dict[str, dict[str, Any]] = {}
    for subset in dict.fromkeys(subsets):
        outcomes = [found for n, found in of_question.items() if subsets[n] == subset]
        right = [all(found) for found in outcomes if None not in found]
        rows[subset] = {"questions": len(right), "left_out": len(outcomes) - len(right)}
        if right:
            low, high = wilson_interval(sum(right), len(right))
            rows[subset] |= {"accuracy": sum(right) / len(right), "low": low, "high": high}
    accuracies = [row["accuracy"] for row in rows.values() if "accuracy" in row]
    return {"subsets": rows, "mean": fmean(accuracies) if accuracies else None}


def _print(model: str, result: dict[str, Any]) -> None:
    mean = "-" if result["mean"] is None else f"{result['mean']:.1%}"
    table = make_table(
        f"RewardBench: {model}",
        ["subset", "questions", "too long", "accuracy"],
        caption=f"mean over subsets: {mean}",
    )
    for subset, row in result["subsets"].items():
        text = "{accuracy:.1%} [{low:.1%}, {high:.1%}]" if "low" in row else "-"
        table.add_row(subset, str(row["questions"]), str(row["left_out"]), text.format_map(row))
    print_table(table)
