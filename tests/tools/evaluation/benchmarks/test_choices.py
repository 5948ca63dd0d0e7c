"""Multiple-choice questions from files."""

import json
from pathlib import Path
from typing import Any

import pytest

from lit_rlhf.data import RecordError
from lit_rlhf.tools.evaluation.benchmarks.choices import choice_task, read_questions
from tests.support.evaluation_folders import CHOICE_RECORDS, write_lines


def test_a_question_that_is_too_long_is_refused_before_it_is_tokenized(tmp_path: Path) -> None:
    record = CHOICE_RECORDS[0] | {"question": "why " * 250_000}
    file = write_lines(tmp_path / "q.jsonl", [CHOICE_RECORDS[0], record])
    with pytest.raises(RecordError, match=r"q\.jsonl:2: a question is too long \(1,000,0"):
        read_questions(file)


def test_a_question_is_never_among_its_own_examples(tmp_path: Path) -> None:
    from lm_eval.tasks import TaskManager

    task = choice_task("q.jsonl", read_questions(write_lines(tmp_path / "q.jsonl", CHOICE_RECORDS)))
    loaded = TaskManager(include_defaults=False).load([task])["tasks"]["q.jsonl"]
    loaded.set_config("num_fewshot", 4)
    loaded.set_fewshot_seed(0)
    loaded.build_all_requests(rank=0, world_size=1)
    contexts = {request.args[0] for request in loaded.instances}
    assert len(contexts) == len(CHOICE_RECORDS)
    for context in contexts:
        parts = context.split("\n\n")
        assert len(parts) == 5
        assert len({part.split("\n")[0] for part in parts}) == 5
        assert all(part[-2:] in (" A", " B", " C", " D") for part in parts[:4])


AB: dict[str, Any] = {"question": "q", "choices": ["a", "b"]}


def test_a_question_is_asked_as_mmlu_asks_it(tmp_path: Path) -> None:
    (question,) = read_questions(write_lines(tmp_path / "q.jsonl", [AB | {"answer": "B"}]))
    text = "q\nA. a\nB. b\nAnswer:"
    assert question == {"text": text, "letters": ["A", "B"], "answer": 1, "subject": ""}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"choices": ["a", "b"], "answer": 0}, "field 'question': missing"),
        ({"question": "q", "answer": 0}, "field 'choices': missing (expected a list of two"),
        ({"question": "q", "choices": "ab", "answer": 0}, "field 'choices': not a list of texts"),
        ({"question": "q", "choices": ["a"], "answer": 0}, "field 'choices': not 2 to 26 of them"),
        (AB, "field 'answer': missing (expected a letter"),
        (
            AB | {"answer": "C"},
            "field 'answer': not one of the choices (expected a letter up to B or an index from 0 "
            "to 1, got 2)",
        ),
        (AB | {"answer": "b or a"}, "got 'b or a')"),
        (AB | {"answer": True}, "got True)"),
        ("{", "bad.jsonl:2: "),
        (AB | {"answer": 0, "subject": 3}, "field 'subject': not a string (int)"),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, record: Any, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    text = record if isinstance(record, str) else json.dumps(record)
    path.write_text(f"{json.dumps(CHOICE_RECORDS[0])}\n{text}\n", "utf-8")
    with pytest.raises(RecordError) as error:
        read_questions(str(path))
    assert "bad.jsonl:2: " in str(error.value)
    assert message in str(error.value)
