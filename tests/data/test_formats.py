"""Every record format, read from a file as each kind of record."""

import logging
from typing import Any

import pytest

from lit_rlhf.data import DemonstrationRecord
from lit_rlhf.data.records import Message, PreferenceRecord, PromptRecord, RecordError, TextRecord
from tests.support.record_reading import Writer, read

ASK, REPLY, ASK_MORE = Message("user", "q"), Message("assistant", "a"), Message("user", "r")
SYSTEM = Message("system", "be kind")
CHAT_ASK, CHAT_REPLY = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
FROM_ASK, FROM_REPLY = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}

TURNS = "\n\nHuman: q\n\nAssistant: a\n\nHuman: r\n\nAssistant: "
HH = {"chosen": f"{TURNS}good", "rejected": f"{TURNS}bad"}
MULTI = (ASK, REPLY, ASK_MORE)
ROW = {"prompt": "q", "chosen": "good", "rejected": "bad"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("good", "bad"))
WHOLE = {"chosen": [CHAT_ASK, GOOD], "rejected": [CHAT_ASK, BAD]}
PREFERENCES: dict[str, tuple[dict[str, Any], tuple[Message, ...]]] = {
    "hh": (HH, MULTI),
    "pairs of strings": (ROW, (ASK,)),
    "pairs with an HH prompt": (ROW | {"prompt": "\n\nHuman: q\n\nAssistant:"}, (ASK,)),
    "pairs of turns": (
        {
            "prompt": [{"role": "system", "content": "be kind"}, CHAT_ASK],
            **{"chosen": [GOOD], "rejected": [BAD]},
        },
        (SYSTEM, ASK),
    ),
    "pairs that repeat the prompt": ({"prompt": [CHAT_ASK], **WHOLE}, (ASK,)),
    "pairs of whole dialogues": (WHOLE, (ASK,)),
    "pairs beside messages": ({"prompt": "q", "messages": [CHAT_ASK, GOOD], **WHOLE}, (ASK,)),
    "pairs of strings in turn": ({"chosen": ["q", "good"], "rejected": ["q", "bad"]}, (ASK,)),
    "pairs of an instruction": (
        {"system": "be kind", "instruction": "q", "chosen": "good", "rejected": "bad"},
        (SYSTEM, ASK),
    ),
    "the first response is better": (
        {"prompt": "q", "response_1": "good", "response_2": "bad"}
        | {"preference_strength": -1, "margin": 0},
        (ASK,),
    ),
    "conversations": (
        {
            "system": "be kind",
            "conversations": [FROM_ASK, FROM_REPLY, {"from": "human", "value": "r"}],
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
        },
        (SYSTEM, *MULTI),
    ),
}
DEMONSTRATIONS: dict[str, tuple[dict[str, Any], str, str]] = {
    "messages": ({"messages": [CHAT_ASK, CHAT_REPLY]}, "q", "a"),
    "conversations": ({"conversations": [FROM_ASK, FROM_REPLY]}, "q", "a"),
    "instruction": ({"instruction": "q", "input": "", "output": "a"}, "q", "a"),
    "instruction with input": ({"instruction": "q", "input": "x", "output": "a"}, "q\n\nx", "a"),
    "dolly's own names": ({"instruction": "q", "context": "x", "response": "a"}, "q\n\nx", "a"),
    "question": ({"question": "q", "answer": "a"}, "q", "a"),
    "standard answer": ({"question": "q", "class": "c", "std_answer": "a"}, "q", "a"),
    "completion of turns": ({"prompt": [CHAT_ASK], "completion": [CHAT_REPLY]}, "q", "a"),
    "answer to KTO's liking": ({"prompt": "q", "completion": "a", "label": True}, "q", "a"),
    "number of turns": ({"turns": 1, "question": "q", "answer": "a"}, "q", "a"),
    "strings in turn": ({"turns": ["q", "a"]}, "q", "a"),
    "strings with markers": ({"turns": ["Human: q", "Assistant: a"]}, "q", "a"),
    "strings with the Chinese markers": ({"turns": ["<|Human|>q", "<|MOSS|>a"]}, "q", "a"),
    "prompt and completion": ({"prompt": "q", "completion": "a"}, "q", "a"),
    "letters": ({"question": "q", "A": "x", "B": "y", "answer": "B"}, "q\nA. x\nB. y", "B. y"),
    "list": ({"question": "q", "options": ["x", "y"], "answer": 1}, "q\nA. x\nB. y", "B. y"),
}
PROMPTS: dict[str, dict[str, Any]] = {
    "prompt": {"id_": 1, "prompt": "q"},
    "prompt as turns": {"prompt": [CHAT_ASK]},
    "question": {"question": "q"},
    "instruction": {"instruction": "q"},
    "messages that end with the human": {"messages": [CHAT_ASK]},
    "messages that end with the assistant": {"messages": [CHAT_ASK, CHAT_REPLY]},
}


@pytest.mark.parametrize("name", PREFERENCES)
def test_preference_row_serves_as_every_kind_of_record(write_lines: Writer, name: str) -> None:
    row, prompt = PREFERENCES[name]
    path = write_lines(row)
    assert read("preference", path) == [PreferenceRecord(prompt, "good", "bad", "s")]
    chosen = (*prompt, Message("assistant", "good"))
    assert read("demonstration", path) == [DemonstrationRecord(chosen, "s")]
    assert read("prompt", path) == [PromptRecord(prompt, "s")]


@pytest.mark.parametrize("name", DEMONSTRATIONS)
def test_demonstration_row_serves_as_demonstration_and_prompt(
    write_lines: Writer, name: str
) -> None:
    row, prompt, response = DEMONSTRATIONS[name]
    path = write_lines(row)
    turns = (Message("user", prompt), Message("assistant", response))
    assert read("demonstration", path) == [DemonstrationRecord(turns, "s")]
    assert read("prompt", path) == [PromptRecord(turns[:1], "s")]


@pytest.mark.parametrize("name", PROMPTS)
def test_prompt_row_is_read_as_a_prompt(write_lines: Writer, name: str) -> None:
    assert read("prompt", write_lines(PROMPTS[name])) == [PromptRecord((ASK,), "s")]


def test_instances_are_one_record_each(write_lines: Writer) -> None:
    instances = [{"input": "x", "output": "a"}, {"input": "", "output": "b"}]
    records = read("demonstration", write_lines({"instruction": "q", "instances": instances}))
    contents = [[m.content for m in r.messages] for r in records if hasattr(r, "messages")]
    assert contents == [["q\n\nx", "a"], ["q", "b"]]


def test_parts_of_text_are_joined_and_markers_within_a_line_are_text(write_lines: Writer) -> None:
    parts = [{"type": "text", "text": "q"}, {"type": "text", "text": "?"}]
    path = write_lines({"messages": [{"role": "user", "content": parts}]})
    assert read("prompt", path) == [PromptRecord((Message("user", "q?"),), "s")]
    response, prompt = "Human: is a marker\nAssistant: too", "\n\nHuman: q\n\nAssistant: "
    row = {"chosen": f"{prompt}{response}", "rejected": f"{prompt}no"}
    assert read("preference", write_lines(row)) == [PreferenceRecord((ASK,), response, "no", "s")]


def test_rejected_half_matters_to_preferences_only(write_lines: Writer) -> None:
    path = write_lines({"chosen": HH["chosen"], "rejected": "nonsense"})
    assert read("prompt", path) == [PromptRecord(MULTI, "s")]
    with pytest.raises(RecordError, match="rejected"):
        read("preference", path, format="hh")


def test_rejected_is_no_example(write_lines: Writer, caplog: pytest.LogCaptureFixture) -> None:
    liked = {"prompt": "q", "completion": "a", "label": True}
    path = write_lines(liked, {**liked, "completion": "b", "label": False})
    with caplog.at_level(logging.INFO):
        assert read("demonstration", path) == [DemonstrationRecord((ASK, REPLY), "s")]
    assert "s: left out 1 responses with label: false" in caplog.text
    assert len(read("prompt", path)) == 2
    with pytest.raises(RecordError, match="no record that can be used"):
        read("demonstration", write_lines({**liked, "label": False}))


@pytest.mark.parametrize("label", [0, "False", "0", 0.0])
def test_label_that_may_mean_rejected_is_refused(write_lines: Writer, label: Any) -> None:
    liked = {"prompt": "q", "completion": "a", "label": 1}
    path = write_lines(liked, {**liked, "completion": "b", "label": label})
    with pytest.raises(RecordError, match=r"data.jsonl:2: field 'label': expected true or false"):
        read("demonstration", path)
    assert len(read("prompt", path)) == 2


@pytest.mark.parametrize(
    "names", [("score_chosen", "score_rejected"), ("chosen_score", "rejected_score")]
)
def test_scores_against_the_choice_are_refused(write_lines: Writer, names: tuple[str, str]) -> None:
    row = {"prompt": "q", "chosen": "a", "rejected": "b"}
    equal = row | dict.fromkeys(names, 8.0)
    against = row | {names[0]: 2, names[1]: 9.5}
    assert len(read("preference", write_lines(row, equal))) == 2
    message = rf"data.jsonl:2: field '{names[0]}': below {names[1]}, .*2 and 9.5"
    with pytest.raises(RecordError, match=message):
        read("preference", write_lines(equal, against))
    assert len(read("demonstration", write_lines(equal, against))) == 2


@pytest.mark.parametrize(
    ("chosen", "rejected", "problem"),
    [
        ("9", "10", "below score_rejected"),
        ("10", "9", None),
        (" 1e1 ", 9, None),
        ("9,5", "10,5", "not a number"),
        ("", "3", None),  # not rated
    ],
)
def test_scores_of_a_table_are_compared_as_numbers(
    chosen: str, rejected: Any, problem: str | None, write_lines: Writer
) -> None:
    row = {"prompt": "q", "chosen": "a", "rejected": "b"}
    path = write_lines(row | {"score_chosen": chosen, "score_rejected": rejected})
    if problem is None:
        assert len(read("preference", path)) == 1
    else:
        with pytest.raises(RecordError, match=rf"data.jsonl:1: field 'score_chosen': {problem}"):
            read("preference", path)


@pytest.mark.parametrize(
    ("options", "letter"),
    [
        ({"A": "one", "B": "two", "C": "", "D": "four"}, "C"),
        ({"A": "one", "B": "two", "D": "four"}, "C"),
        ({"options": ["one", None, "three"]}, "B"),
        ({"options": ["one", "two", " "]}, "C"),
    ],
)
def test_option_that_is_missing_does_not_move_the_next_ones_up(
    options: dict[str, Any], letter: str, write_lines: Writer
) -> None:
    path = write_lines({"question": "q", **options, "answer": "B"})
    with pytest.raises(RecordError, match=f"'options': option {letter} is missing or empty"):
        read("demonstration", path)


@pytest.mark.parametrize("choice", [0, None, "2"])
def test_tie_is_only_a_prompt(write_lines: Writer, choice: Any) -> None:
    row = {"prompt": "q", "response_1": "a", "response_2": "b"}
    path = write_lines(*(row | {"preference_strength": strength} for strength in (-2, choice)))
    assert len(read("prompt", path)) == 2
    with pytest.raises(RecordError, match=r"data.jsonl:2: .*neither response is preferred"):
        read("preference", path)


def test_ptx_takes_text_or_demonstrations(write_lines: Writer) -> None:
    lines = write_lines({"id": 1, "text": "one"}, {"id": 2, "text": "two"})
    texts = [TextRecord("one", "s"), TextRecord("two", "s")]
    assert read("ptx", lines) == read("text", lines) == texts
    path = write_lines({"question": "q", "answer": "a"}, name="b.jsonl")
    assert read("ptx", path) == [DemonstrationRecord((ASK, REPLY), "s")]


def test_format_may_be_named_and_is_if_the_fields_are_unknown(write_lines: Writer) -> None:
    path = write_lines({"prompt": "q", "answer": "a"})
    assert read("prompt", path, format="prompt") == [PromptRecord((ASK,), "s")]
    path = write_lines({"foo": 1, "bar": 2})
    message = (
        r"data\.jsonl:1: no known format has these fields \(bar, foo; docs/data\.md .*instruction"
    )
    with pytest.raises(RecordError, match=message):
        read("prompt", path)


STRENGTH = {"prompt": "q", "response_1": "good", "response_2": "bad", "preference_strength": -3}


@pytest.mark.parametrize(
    ("row", "margin"),
    [
        ({**HH, "margin": 1.5}, 1.5),
        ({**HH, "margin": None}, 0.0),
        (STRENGTH, 3.0),
        (STRENGTH | {"margin": 0.5}, 0.5),
    ],
)
def test_margin_is_a_field_or_the_strength(
    write_lines: Writer, row: dict[str, Any], margin: float
) -> None:
    (record,) = read("preference", write_lines(row))
    assert (record.chosen, record.margin) == ("good", margin)
