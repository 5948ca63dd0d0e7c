"""RewardBench: how often a reward model scores the best of several responses highest.

It reads the format of RewardBench (Lambert et al., arXiv 2403.13787; pairs) and RewardBench 2
(Malik et al., arXiv 2506.01937; the best of four): a `prompt`, `chosen` and `rejected`, each a text
or a list of texts, and the `subset`.
"""

from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean
from typing import Any, NamedTuple

import torch

from lit_rlhf.data import DataSource, RecordError, Row
from lit_rlhf.functional import wilson_interval
from lit_rlhf.models import ModelOptions
from lit_rlhf.tools.evaluation.loading import CPU
from lit_rlhf.tools.evaluation.output import make_table, print_table
from lit_rlhf.tools.evaluation.reward_report import score_pairs


class BenchQuestions(NamedTuple):
    """The questions of a benchmark.

    Attributes:
        pairs: A pair for each right and wrong response to the same question, whose number from 0
            is the field `question`.
        subsets: Subset of each question.
    """

    pairs: list[dict[str, Any]]
    subsets: list[str]


def read_questions(path: str) -> BenchQuestions:
    """Read the questions in the file `path` as pairs.

    Raises:
        RecordError: If a field is missing or has another type, with its line.
    """
    pairs: list[dict[str, Any]] = []
    subsets: list[str] = []
    for row in DataSource(path).read_rows():
        if isinstance(row, RecordError):
            raise row
        prompt = row.read_string("prompt")
        subset = row.read_string("subset")
        right = _read_texts(row, "chosen")
        wrong = _read_texts(row, "rejected")
        if set(right) & set(wrong):
            raise row.error("a text that is chosen, too", field="rejected")
        pairs += [
            {"prompt": prompt, "chosen": chosen, "rejected": rejected, "question": len(subsets)}
            for chosen in right
            for rejected in wrong
        ]
        subsets.append(subset)
    return BenchQuestions(pairs=pairs, subsets=subsets)


def _read_texts(row: Row, field: str) -> list[str]:
    texts = row.get(field)
    texts = [texts] if isinstance(texts, str) else texts
    is_list = isinstance(texts, list) and bool(texts)
    if not is_list or not all(isinstance(text, str) and text.strip() for text in texts):
        raise row.error("not a text or a list of texts", field=field, detail=repr(texts)[:80])
    return texts


def measure_accuracy(
    model: str,
    bench: BenchQuestions,
    *,
    options: ModelOptions = ModelOptions(),
    device: torch.device = CPU,
    max_length: int | None = None,
) -> dict[str, Any]:
    """Measure how often a reward model scores a right response above all wrong ones.

    Args:
        model: Folder or hub id of the reward model.
        bench: The questions.
        options: How the model is loaded.
        device: Where it computes.
        max_length: Longest dialogue in tokens. `None`: as in the model's training, or 512.
    """
    pairs = score_pairs(
        model, [DataSource(bench.pairs)], options=options, device=device, max_length=max_length
    )
    # lines of rows in memory count from 1
    places = [record.location.line - 1 for record in pairs.records]
    wins = dict(zip(places, (pairs.chosen > pairs.rejected).tolist(), strict=True))
    return summarize(bench, wins)


def summarize(bench: BenchQuestions, wins: Mapping[int, bool]) -> dict[str, Any]:
    """Compute the accuracy by subset with its 95 % interval, and the mean over subsets.

    A question is right if every right response scores higher than every wrong one; a tie is wrong.
    A question with a pair that was too long is left out. A subset without any other question is
    left out of the mean.

    Args:
        bench: The questions.
        wins: Whether the right response scores higher, by the place of the pair. Pairs that were
            too long are missing.
    """
    by_question = defaultdict(list)
    for place, pair in enumerate(bench.pairs):
        by_question[pair["question"]].append(wins.get(place))
    rows: dict[str, dict[str, Any]] = {}
    for subset in dict.fromkeys(bench.subsets):
        outcomes = [is_win for n, is_win in by_question.items() if bench.subsets[n] == subset]
        right = [all(is_win) for is_win in outcomes if None not in is_win]
        rows[subset] = {"questions": len(right), "left_out": len(outcomes) - len(right)}
        if right:
            interval = wilson_interval(sum(right), len(right))
            rows[subset] |= {
                "accuracy": sum(right) / len(right),
                "low": interval.low,
                "high": interval.high,
            }
    accuracies = [row["accuracy"] for row in rows.values() if "accuracy" in row]
    return {"subsets": rows, "mean": fmean(accuracies) if accuracies else None}


def print_accuracy(model: str, accuracy: Mapping[str, Any]) -> None:
    """Print the accuracy of a reward model by subset.

    Args:
        model: Its folder or hub id.
        accuracy: What `measure_accuracy` returned.
    """
    mean = "-" if accuracy["mean"] is None else f"{accuracy['mean']:.1%}"
    table = make_table(
        f"RewardBench: {model}",
        ["subset", "questions", "too long", "accuracy"],
        caption=f"mean over subsets: {mean}",
    )
    for subset, row in accuracy["subsets"].items():
        text = "{accuracy:.1%} [{low:.1%}, {high:.1%}]" if "low" in row else "-"
        table.add_row(subset, str(row["questions"]), str(row["left_out"]), text.format_map(row))
    print_table(table)
