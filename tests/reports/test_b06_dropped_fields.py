"""B6: what a row has is read, counted or refused, and never dropped without a word."""

from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest

from lit_rlhf.data import (
    DataSource,
    DemonstrationDataModule,
    Message,
    RecordError,
    load_records,
    prompt_of,
)
from lit_rlhf.data.counts import DataCounts
from lit_rlhf.data.records import RecordKind
from tests.support.tiny_models import tiny_tokenizer

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}
DIALOGUE = "\n\nHuman: hi\n\nAssistant:"
HISTORY = [["who?", "me"], ["why?", "so"]]
EARLIER = [
    Message("user", "who?"),
    Message("assistant", "me"),
    Message("user", "why?"),
    Message("assistant", "so"),
]


def read(kind: RecordKind, row: Mapping[str, Any], counts: DataCounts | None = None) -> Any:
    (record,) = load_records(kind, [DataSource([row])], counts=counts)
    return record


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("demonstration", {"instruction": "hi", "output": "hello"}),
        ("prompt", {"instruction": "hi", "input": "", "output": "hello"}),
        ("preference", {"instruction": "hi", "chosen": "hello", "rejected": "no"}),
        ("demonstration", {"prompt": "hi", "response": "hello"}),
        ("prompt", {"prompt": [USER]}),
    ],
)
def test_history_becomes_earlier_turns(kind: RecordKind, row: dict[str, Any]) -> None:
    record = read(kind, row | {"history": HISTORY})
    assert list(prompt_of(record)) == [*EARLIER, Message("user", "hi")]
    record = read(kind, row | {"history": HISTORY, "system": "be brief"})
    assert list(prompt_of(record)) == [
        Message("system", "be brief"),
        *EARLIER,
        Message("user", "hi"),
    ]
    for nothing in (None, [], ""):
        assert list(prompt_of(read(kind, row | {"history": nothing}))) == [Message("user", "hi")]


@pytest.mark.parametrize("history", ["who? me", [["who?"]], [["who?", 3]], {"who?": "me"}])
def test_history_of_another_form_is_refused(history: object) -> None:
    with pytest.raises(RecordError, match="field 'history': not a list of pairs"):
        read("prompt", {"instruction": "hi", "history": history})


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("demonstration", {"messages": [USER, ANSWER]}),
        ("demonstration", {"conversations": [USER, ANSWER]}),
        ("demonstration", {"turns": ["hi", "hello"]}),
        ("demonstration", {"question": "hi", "options": ["a", "b"], "answer": "A"}),
        ("demonstration", {"instruction": "hi", "instances": [{"input": "", "output": "a"}]}),
        ("preference", {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER | {"content": "no"}]}),
        ("preference", {"chosen": f"{DIALOGUE} a", "rejected": f"{DIALOGUE} b"}),
    ],
)
def test_history_beside_whole_dialogues_is_refused(kind: RecordKind, row: dict[str, Any]) -> None:
    read(kind, row | {"history": []})
    for form in (HISTORY, "who? me"):
        with pytest.raises(RecordError, match="field 'history': expected a prompt without earlier"):
            read(kind, row | {"history": form})


def test_history_of_a_comparison_becomes_earlier_turns() -> None:
    row = {"prompt": "hi", "response_0": "a", "response_1": "b", "better_response_id": 1}
    record = read("preference", row | {"history": HISTORY})
    assert list(prompt_of(record)) == [*EARLIER, Message("user", "hi")]
    shp = {"history": "hi", "human_ref_A": "a", "human_ref_B": "b", "labels": 1}
    assert list(prompt_of(read("preference", shp))) == [Message("user", "hi")]


@pytest.mark.parametrize("name", ["tools", "functions", "images", "videos", "audios"])
@pytest.mark.parametrize("value", [["a"], '[{"name": "f"}]', {"name": "f"}])
def test_fields_that_change_the_meaning_are_refused(name: str, value: object) -> None:
    for kind, row in (
        ("demonstration", {"messages": [USER, ANSWER]}),
        ("prompt", {"prompt": "hi"}),
        ("preference", {"prompt": "hi", "chosen": "a", "rejected": "b"}),
    ):
        with pytest.raises(RecordError, match=f"field '{name}': {name} are not supported"):
            read(kind, row | {name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [None, [], "", "[]", {}])
def test_fields_without_content_change_nothing(value: object) -> None:
    row = {"messages": [USER, ANSWER]}
    assert read("demonstration", row | {"tools": value}) == read("demonstration", row)


def test_turns_without_weight_are_refused_where_they_would_be_trained_on() -> None:
    earlier = {"messages": [USER, ANSWER | {"weight": 0}, USER, ANSWER | {"weight": 1}]}
    last = {"messages": [USER, ANSWER, USER, ANSWER | {"weight": 0}]}
    with pytest.raises(RecordError, match=r"field 'messages.weight': the last answer is not"):
        read("demonstration", last)
    for row in (earlier, last):
        assert len(read("prompt", row).prompt) == 3
    assert len(read("demonstration", earlier).messages) == 4
    # the human's turns are never trained on
    messages = [USER | {"weight": 0}, ANSWER, USER | {"weight": 0}, ANSWER]
    assert not read("demonstration", {"messages": messages}).has_untrained_turns


@pytest.mark.parametrize(
    ("train_on", "on_bad_record", "n_examples"),
    [("last", "error", 2), ("all", "skip", 1), ("all", "error", None)],
)
def test_earlier_turns_without_weight_are_refused_only_with_training_on_all(
    train_on: Any, on_bad_record: Any, n_examples: int | None
) -> None:
    rows = [
        {"messages": [USER, ANSWER | {"weight": 0}, USER, ANSWER]},
        {"messages": [USER, ANSWER]},
    ]
    data = DemonstrationDataModule(
        [DataSource(rows)],
        train_on=train_on,
        chat_template="hh",
        max_length=64,
        batch_size=1,
        on_bad_record=on_bad_record,
    )
    data.tokenizer = tiny_tokenizer()
    error = pytest.raises(ValueError, match="an answer with `weight: 0` is not to be trained on")
    with error if n_examples is None else nullcontext():
        data.setup("fit")
        assert len(data.examples["train"]) == n_examples


def test_reasoning_beside_an_answer_is_counted() -> None:
    counts = DataCounts()
    thinking = ANSWER | {"reasoning_content": "they greet"}
    read("demonstration", {"messages": [USER, thinking]}, counts)
    read("preference", {"prompt": [USER], "chosen": thinking, "rejected": "no"}, counts)
    read("demonstration", {"messages": [USER, ANSWER | {"reasoning_content": ""}]}, counts)
    read("prompt", {"messages": [USER, thinking]}, counts)
    assert counts.unused_parts == Counter(reasoning_content=2)


def test_developer_is_a_system_turn() -> None:
    record = read("prompt", {"messages": [{"role": "developer", "content": "be brief"}, USER]})
    assert record.prompt[0] == Message("system", "be brief")


@pytest.mark.parametrize("content", ["", "  ", None])
def test_system_turn_without_text_is_ignored_like_a_field_without_text(content: object) -> None:
    plain = read("demonstration", {"messages": [USER, ANSWER]})
    system = {"role": "system", "content": content}
    assert read("demonstration", {"messages": [system, USER, ANSWER]}) == plain
    assert read("demonstration", {"messages": [USER, ANSWER], "system": content}) == plain
    with pytest.raises(RecordError, match="field 'messages': empty"):
        read("demonstration", {"messages": [system]})


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("demonstration", {"messages": [USER, ANSWER]}),
        (
            "preference",
            {
                "chosen": "\n\nHuman: hi\n\nAssistant: a",
                "rejected": "\n\nHuman: hi\n\nAssistant: b",
            },
        ),
        ("preference", {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER | {"content": "no"}]}),
        ("demonstration", {"turns": ["hi", "hello"]}),
        ("demonstration", {"question": "hi", "options": ["a", "b"], "answer": "A"}),
        ("demonstration", {"instruction": "hi", "instances": [{"input": "", "output": "a"}]}),
        ("demonstration", {"conversations": [USER, ANSWER]}),
    ],
)
def test_system_field_is_read_in_every_format(kind: RecordKind, row: dict[str, Any]) -> None:
    record = read(kind, row | {"system": "be brief"})
    assert prompt_of(record)[0] == Message("system", "be brief")
    assert prompt_of(record)[1:] == prompt_of(read(kind, row))
