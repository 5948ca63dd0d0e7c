"""RewardBench: how often a reward model scores the best of several responses highest.

Its format is of RewardBench (Lambert et al., arXiv 2403.13787; pairs) and RewardBench 2 (Malik et
al., arXiv 2506.01937; the best of four): a `prompt`, `chosen` and `rejected`, each a text or a list
of texts, and the `subset`.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

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
    batch_size: int = 16,
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
        batch_size: Number of pairs that are scored together.
        max_length: Longest dialogue in tokens. Default: that of the model's training, or 512.
        device: auto, cpu, cuda, cuda:1 and so on.
        dtype: Data type of all weights: float32, bfloat16 or float16.
    """
    check_outputs({"output": output}, [questions])
    rows, subsets = read_questions(questions)
    results = {}
    for model in models:
        pairs = score_pairs(
            model,
            [DataSource(rows)],
            options=ModelOptions(dtype=dtype),
            device=choose_device(device),
            batch_size=batch_size,
            max_length=max_length,
        )
        # lines of rows in memory count from 1
        places = [record.location.line - 1 for record in pairs.records]
        wins = dict(zip(places, (pairs.chosen > pairs.rejected).tolist(), strict=True))
        results[model] = summarize(rows, subsets, wins)
        _print(model, results[model])
    inputs = {model: hash_model(model) for model in models}
    report = {"questions": questions, "inputs": inputs, "models": results}
    report["versions"] = code_versions()
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
        for chosen in texts[0]:
            for rejected in texts[1]:
                pair = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
                pairs.append({**pair, "question": len(subsets)})
        subsets.append(subset)
    return pairs, subsets


def _read_texts(row: Row, field: str) -> list[str]:
    texts = row.get(field)
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        raise row.error(field, "not a text or a list of texts", repr(texts)[:80])
    return texts


def summarize(
    pairs: Sequence[dict[str, Any]], subsets: Sequence[str], wins: dict[int, bool]
) -> dict[str, dict[str, float]]:
    """Accuracy by subset with its 95 % interval, and their mean as `all`.

    A question is right if every right response scores higher than every wrong one; a tie is wrong.
    `wins` are by the place of the pair; questions with a pair that was too long are left out.
    """
    of_question = defaultdict(list)
    for place, pair in enumerate(pairs):
        of_question[pair["question"]].append(wins.get(place))
    right = defaultdict(list)
    for question, outcomes in of_question.items():
        if None not in outcomes:
            right[subsets[question]].append(all(outcomes))
    result = {}
    for subset, found in right.items():
        low, high = wilson_interval(sum(found), len(found))
        result[subset] = {"accuracy": float(np.mean(found)), "low": low, "high": high}
        result[subset] |= {"questions": len(found)}
    means = [row["accuracy"] for row in result.values()]
    n_left_out = len(subsets) - sum(map(len, right.values()))
    return {"all": {"accuracy": float(np.mean(means)), "left_out": n_left_out}, **result}


def _print(model: str, rows: dict[str, dict[str, float]]) -> None:
    caption = f"all: mean over subsets; {rows['all']['left_out']} questions were too long"
    table = make_table(f"RewardBench: {model}", "subset", "questions", "accuracy", caption=caption)
    for subset, row in rows.items():
        interval = f" [{row['low']:.1%}, {row['high']:.1%}]" if "low" in row else ""
        table.add_row(subset, str(row.get("questions", "")), f"{row['accuracy']:.1%}{interval}")
    print_table(table)
