"""Multiple-choice questions from a file, and the task of lm-evaluation-harness that asks them."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_rlhf.data import EncodingError, Location, RecordError, Row, check_size, read_file

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_CHINESE = re.compile("[\u4e00-\u9fff]")


def read_questions(path: str) -> list[dict[str, Any]]:
    """Read multiple-choice questions from the file `path`, one record each.

    A record has the fields `question`, `choices` (a list of texts), `answer` (a letter, or an index
    from 0) and optionally `subject`.

    The file may be `.jsonl`, `.json` or `.parquet`, or one of these with `.gz`. An error names the
    line and the field.

    Returns:
        For each question its `text` in the form of MMLU and C-Eval, the `letters` that the model
        chooses among, the index of the right one as `answer`, and the `subject`, perhaps empty.
    """
    questions = []
    for row in read_file(path):
        if isinstance(row, RecordError):
            raise row
        questions.append(_parse_question(row))
    if not questions:
        raise RecordError(Location(path), "no question")
    return questions


def choice_task(path: str, questions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Build the task of lm-evaluation-harness that asks multiple-choice questions.

    Args:
        path: File of the questions. The task has its name.
        questions: The questions, as from `read_questions`.
    """
    import datasets

    def load_dataset(**_: object) -> Mapping[str, datasets.Dataset]:
        return {"test": datasets.Dataset.from_list([*questions])}

    return {
        "task": Path(path).name,
        "custom_dataset": load_dataset,
        "test_split": "test",
        # the harness leaves a question out of its few-shot examples only if they come from the
        # split that is tested, by name
        "fewshot_split": "test",
        "output_type": "multiple_choice",
        # functions: as Jinja templates, braces in a question would be evaluated
        "doc_to_text": lambda record: str(record["text"]),
        "doc_to_choice": lambda record: list(record["letters"]),
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }


def _parse_question(row: Row) -> dict[str, Any]:
    question = row.read_string("question")
    choices = row.get("choices")
    if choices is None:
        raise row.error("missing", field="choices", detail="expected a list of two or more texts")
    if not isinstance(choices, list) or not all(isinstance(c, str) and c.strip() for c in choices):
        raise row.error("not a list of texts", field="choices", detail=repr(choices)[:80])
    if not 2 <= len(choices) <= len(LETTERS):
        raise row.error(
            f"not 2 to {len(LETTERS)} of them", field="choices", detail=str(len(choices))
        )
    try:
        check_size("a question", [question, *choices])
    except EncodingError as error:
        raise row.error(error.reason, detail=error.detail) from error
    subject = row.get("subject")
    if not isinstance(subject, str | None):
        raise row.error("not a string", field="subject", detail=type(subject).__name__)
    lines = [f"{letter}. {text}" for letter, text in zip(LETTERS, choices, strict=False)]
    end = "答案：" if _CHINESE.search(question) else "Answer:"  # which the model continues
    return {
        "text": "\n".join([question.strip(), *lines, end]),
        "letters": list(LETTERS[: len(choices)]),
        "answer": _parse_answer(row, len(choices)),
        "subject": subject or "",
    }


def _parse_answer(row: Row, n_choices: int) -> int:
    answer = row.get("answer")
    if answer is None:
        raise row.error("missing", field="answer", detail="expected a letter, or an index from 0")
    if isinstance(answer, str) and answer.strip().upper() in tuple(LETTERS):
        answer = LETTERS.index(answer.strip().upper())
    # bool is a subclass of int, and `true` in JSON is not an index
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < n_choices:
        raise row.error(
            "not one of the choices",
            field="answer",
            detail=f"expected a letter up to {LETTERS[n_choices - 1]} or an index from 0 to "
            f"{n_choices - 1}, got {answer!r}",
        )
    return answer
