"""Multiple choice against a loop over single rows, and differences from the first model."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_rlhf.models import load_causal_lm, load_tokenizer
from lit_rlhf.tools.evaluation.benchmarks import run_benchmarks
from lit_rlhf.tools.evaluation.benchmarks.alignment_tax import BenchmarkScore, compare_results
from lit_rlhf.tools.evaluation.benchmarks.harness import MetricValue, TaskResult
from tests.support.evaluation_folders import CHOICE_RECORDS, Folders, write_lines


@pytest.fixture
def questions(tmp_path: Path) -> str:
    return write_lines(tmp_path / "questions.jsonl", CHOICE_RECORDS)


def expected_hits(model_path: str) -> list[bool]:
    """Whether the right letter is the likeliest, each read in a row of its own, in float64."""
    model = load_causal_lm(model_path).eval().double()
    tokenizer = load_tokenizer(model_path)
    hits = []
    for record in CHOICE_RECORDS:
        lines = [record["question"]]
        lines += [f"{'ABCD'[place]}. {text}" for place, text in enumerate(record["choices"])]
        text = "\n".join([*lines, "答案：" if "说" in record["question"] else "Answer:"])
        scores = []
        for place in range(len(record["choices"])):
            before = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids = tokenizer(f"{text} {'ABCD'[place]}", add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            scores.append(sum(float(logprobs[t - 1, ids[t]]) for t in range(len(before), len(ids))))
        answer = record["answer"]
        right = answer if isinstance(answer, int) else "ABCD".index(answer.upper())
        hits.append(scores.index(max(scores)) == right)
    return hits


def test_the_right_letter_is_that_of_a_loop(folders: Folders, questions: str) -> None:
    report = run_benchmarks([folders.sft, folders.ppo], choices=[questions])
    before, after = expected_hits(folders.sft), expected_hits(folders.ppo)
    assert before != after
    assert 0 < sum(before) < 6
    whole, *subjects = report.rows
    assert (whole.benchmark, whole.part, whole.metric) == ("questions.jsonl", "", "acc")
    assert (whole.questions, whole.higher_is_better, whole.cut) == (6, True, 0)
    assert whole.scores["sft"].value == sum(before) / 6
    assert whole.scores["ppo"].value == sum(after) / 6
    assert whole.scores["ppo"].difference == pytest.approx((sum(after) - sum(before)) / 6)
    steps = [a - b for a, b in zip(after, before, strict=True)]
    error = torch.tensor(steps, dtype=torch.float64).std().item() / math.sqrt(6)
    assert whole.scores["ppo"].difference_stderr == pytest.approx(error)
    assert [(row.part, row.questions) for row in subjects] == [("sums", 4), ("metals", 2)]
    assert subjects[1].scores["sft"].value == (before[2] + before[3]) / 2


def test_questions_that_do_not_fit_are_counted(folders: Folders, tmp_path: Path) -> None:
    long = {"question": "why " * 60, "choices": ["a", "b"], "answer": 0}
    path = write_lines(tmp_path / "long.jsonl", [CHOICE_RECORDS[0], long])
    report = run_benchmarks([folders.sft], choices=[path])
    cut = [(row.part, row.cut) for row in report.rows]
    assert cut == [("", 1), ("sums", 0), ("no subject", 1)]
    report = run_benchmarks([folders.sft], choices=[path], max_questions=1)
    assert [(row.questions, row.cut) for row in report.rows] == [(1, 0)]


def test_arguments_out_of_range_are_refused(folders: Folders, questions: str) -> None:
    sft = folders.sft
    with pytest.raises(ValueError, match=r"less than the 6 questions of questions\.jsonl, got 6"):
        run_benchmarks([sft], choices=[questions], shots=6)
    refused_arguments: dict[str, dict[str, Any]] = {
        "benchmarks, choices": {},
        "max_questions": {"choices": [questions], "max_questions": 0},
        "benchmark_batch_size": {"choices": [questions], "batch_size": 0},
    }
    for name, options in refused_arguments.items():
        with pytest.raises(ValueError, match=f"{name}: expected "):
            run_benchmarks([sft], **options)
    with pytest.raises(ValueError, match="policies: expected one or more, each once"):
        run_benchmarks([sft, sft], choices=[questions])


def test_missing_extra_is_named(folders: Folders, questions: str, monkeypatch: Any) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for asked in ({"tasks": ["mmlu"]}, {"choices": [questions]}):
        with pytest.raises(ModuleNotFoundError, match="pip install lm-eval"):
            run_benchmarks([folders.sft], **asked)


def answers(value: float, stderr: float | None, questions: list[float] | None) -> TaskResult:
    by_question = {} if questions is None else {"acc": questions}
    return TaskResult(
        part="",
        values={"acc": MetricValue(value=value, stderr=stderr)},
        by_question=by_question,
        questions=4,
        higher_is_better={"acc": True},
        cut=0,
    )


def test_differences_are_paired_where_questions_can_be() -> None:
    before, after = [1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0]
    sft, ppo = answers(0.5, 0.25, before), answers(0.75, 0.25, after)
    (row,) = compare_results({"sft": {"b": [sft]}, "ppo": {"b": [ppo]}})
    assert row.scores["sft"] == BenchmarkScore(0.5, 0.25)
    # steps 0 1 0 0: variance 1/4, over 4 questions
    assert row.scores["ppo"] == BenchmarkScore(0.75, 0.25, 0.25, pytest.approx(0.25))


@pytest.mark.parametrize(
    ("before", "after", "error"),
    [
        (answers(3.0, 0.3, None), answers(2.0, 0.4, [0.0, 1.0]), pytest.approx(0.5)),
        (answers(3.0, None, None), answers(2.0, 0.4, None), None),
    ],
)
def test_other_differences_are_unpaired(before: TaskResult, after: TaskResult, error: Any) -> None:
    (row,) = compare_results({"sft": {"b": [before]}, "ppo": {"b": [after]}})
    assert row.scores["ppo"] == BenchmarkScore(2.0, 0.4, -1.0, error)
