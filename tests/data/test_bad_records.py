"""Bad input: an error that names file, line and field, or a count."""

import logging
from typing import Any

import pytest
from lightning.pytorch.utilities import rank_zero_only

from lit_rlhf.data.records import RecordError, RecordKind
from lit_rlhf.data.sources import DataSource, load_records
from tests.data.reading import Writer, read, read_good


def hh(*turns: str) -> str:
    """Turns "H: text" or "A: text" as a dialogue string."""
    names = {"H": "Human", "A": "Assistant"}
    return "".join(f"\n\n{names[turn[0]]}:{turn[2:]}" for turn in turns)


def chat(*turns: str) -> dict[str, Any]:
    roles = {"H": "user", "A": "assistant", "S": "system", "T": "tool"}
    return {"messages": [{"role": roles[t[0]], "content": t[3:]} for t in turns]}


GOOD_PAIR = {"chosen": hh("H: q", "A: a"), "rejected": hh("H: q", "A: b")}
GOOD_CHAT = chat("H: q", "A: a")

BAD_PAIRS: dict[str, tuple[Any, str, str]] = {
    "broken JSON": ('{"chosen": "x', "", "broken JSON"),
    "not an object": ("[1, 2]", "", "not a JSON object"),
    "missing field": ({"rejected": GOOD_PAIR["rejected"]}, "chosen", "missing"),
    "missing half": (
        {"chosen": GOOD_PAIR["chosen"]},
        "rejected",
        "missing, or no assistant turn at the end",
    ),
    "empty field": ({**GOOD_PAIR, "chosen": " "}, "chosen", "empty"),
    "not a string": ({**GOOD_PAIR, "chosen": 3}, "chosen", "not a string"),
    "equal": (
        {"chosen": hh("H: q", "A: a"), "rejected": hh("H: q", "A: a ")},
        "rejected",
        "chosen and rejected are equal",
    ),
    "different prompts": (
        {"chosen": hh("H: q", "A: a"), "rejected": hh("H: other", "A: b")},
        "rejected",
        "chosen and rejected have different prompts",
    ),
    "two human turns": (
        {**GOOD_PAIR, "chosen": hh("H: q", "H: r", "A: a")},
        "chosen",
        "two human turns in a row",
    ),
    "two assistant turns": (
        {**GOOD_PAIR, "chosen": hh("H: q", "A: r", "A: a")},
        "chosen",
        "two assistant turns in a row",
    ),
    "no assistant turn": (
        {**GOOD_PAIR, "chosen": hh("H: q")},
        "chosen",
        "missing, or no assistant turn at the end",
    ),
    "empty assistant turn": (
        {**GOOD_PAIR, "rejected": hh("H: q", "A: ")},
        "rejected",
        "empty assistant turn",
    ),
    "empty human turn": ({**GOOD_PAIR, "chosen": hh("H: ", "A: a")}, "chosen", "empty human turn"),
    "no markers": (
        {**GOOD_PAIR, "chosen": "hello"},
        "chosen",
        "the dialogue does not start with '\\n\\nHuman:'",
    ),
    "bad margin": ({**GOOD_PAIR, "margin": -1}, "margin", "not a number of at least 0"),
    "huge margin": ({**GOOD_PAIR, "margin": 10**400}, "margin", "not a number of at least 0"),
    "margin beyond float32": (
        {**GOOD_PAIR, "margin": 1e39},
        "margin",
        "not a number of at least 0",
    ),
    "huge integer": ('{"id": ' + "9" * 5000 + "}", "", "broken JSON"),
    "deep nesting": ("[" * 100_000, "", "broken JSON"),
}
BAD_CHATS: dict[str, tuple[Any, str, str]] = {
    "missing": ({"other": 1}, "messages", "not a list of turns"),
    "empty": ({"messages": []}, "messages", "empty"),
    "two human turns": (chat("H: q", "H: r", "A: a"), "messages", "two human turns in a row"),
    "two assistant turns": (
        chat("H: q", "A: r", "A: a"),
        "messages",
        "two assistant turns in a row",
    ),
    "no assistant turn": (
        chat("H: q"),
        "messages",
        "missing, or no assistant turn at the end",
    ),
    "only an assistant turn": (chat("A: a"), "messages", "no human turn"),
    "assistant first": (
        chat("A: a", "H: q", "A: a"),
        "messages",
        "the dialogue starts with an assistant turn",
    ),
    "late system turn": (
        chat("H: q", "S: s", "A: a"),
        "messages",
        "a system turn after the first turn",
    ),
    "empty turn": (chat("H: ", "A: a"), "messages", "empty human turn"),
    "empty answer": (chat("H: q", "A: "), "messages", "empty assistant turn"),
    "unknown role": (
        {"messages": [{"role": "critic", "content": "a"}]},
        "messages.role",
        "unknown role",
    ),
    "tool": (chat("H: q", "T: a"), "messages.role", "calls of tools are not supported"),
    "tool calls": (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        "messages.tool_calls",
        "calls of tools are not supported",
    ),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "messages.content",
        "a part is not a text",
    ),
    "no content": ({"messages": [{"role": "user"}]}, "messages.content", "missing"),
    "turn is a string": ({"messages": ["q"]}, "messages", "a turn is not an object"),
}
OTHERS: dict[str, tuple[RecordKind, dict[str, Any], dict[str, Any], str, str]] = {
    "equal but for whitespace": (
        "preference",
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": "a", "rejected": "a\n"},
        "rejected",
        "chosen and rejected are equal",
    ),
    "instruction": (
        "demonstration",
        {"instruction": "q", "output": "a"},
        {"instruction": "", "output": "a"},
        "instruction",
        "empty",
    ),
    "output": (
        "demonstration",
        {"instruction": "q", "output": "a"},
        {"instruction": "q", "output": ""},
        "output",
        "empty assistant turn",
    ),
    "input": (
        "demonstration",
        {"instruction": "q", "output": "a"},
        {"instruction": "q", "input": 3, "output": "a"},
        "input",
        "not a string",
    ),
    "answer": (
        "demonstration",
        {"question": "q", "answer": "a"},
        {"question": "q"},
        "question",
        "missing, or no assistant turn at the end",
    ),
    "option": (
        "demonstration",
        {"question": "q", "A": "x", "B": "y", "answer": "A"},
        {"question": "q", "A": "x", "B": "y", "answer": "E"},
        "answer",
        "not the letter or the index of an option",
    ),
    "instances": (
        "demonstration",
        {"instruction": "q", "instances": [{"output": "a"}]},
        {"instruction": "q", "instances": []},
        "instances",
        "not a list of at least one instance",
    ),
    "chosen turn": (
        "preference",
        {"conversations": [{"from": "human", "value": "q"}], "chosen": "a", "rejected": "b"},
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "human", "value": "a"},
            "rejected": "b",
        },
        "chosen",
        "not an assistant turn",
    ),
    "prompt": ("prompt", {"prompt": "q"}, {"prompt": None}, "prompt", "missing"),
    "text": ("text", {"text": "q"}, {"text": "  "}, "text", "empty"),
    "half a surrogate pair in a prompt": (
        "prompt",
        {"prompt": "q"},
        {"prompt": "q\ud800"},
        "prompt",
        "half of a surrogate pair",
    ),
    "half a surrogate pair in a turn": (
        "demonstration",
        GOOD_CHAT,
        chat("H: q\udfff", "A: a"),
        "messages",
        "half of a surrogate pair",
    ),
    "half a surrogate pair in a response": (
        "preference",
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": "a", "rejected": "b\ud800"},
        "rejected",
        "half of a surrogate pair",
    ),
    "half a surrogate pair in a text": (
        "text",
        {"text": "q"},
        {"text": "q\ud800"},
        "text",
        "half of a surrogate pair",
    ),
}
CASES: list[Any] = [
    *(("preference", GOOD_PAIR, *case) for case in BAD_PAIRS.values()),
    *(("demonstration", GOOD_CHAT, *case) for case in BAD_CHATS.values()),
    *OTHERS.values(),
]
NAMES = [*BAD_PAIRS, *(f"chat {name}" for name in BAD_CHATS), *OTHERS]


@pytest.mark.parametrize(("kind", "good", "bad", "field", "reason"), CASES, ids=NAMES)
def test_bad_record_is_named_or_counted(
    write_lines: Writer, kind: RecordKind, good: Any, bad: Any, field: str, reason: str
) -> None:
    path = write_lines(good, "", bad)
    with pytest.raises(RecordError) as caught:
        read(kind, path)
    error = caught.value
    assert (error.file, error.line, error.field, error.reason) == (path, 3, field, reason)
    assert str(error).startswith(f"{path}:3: " + (f"field '{field}': " if field else ""))

    path = write_lines(good, bad, bad, good)
    records, counts = read_good(kind, path)
    assert len(records) == 2
    assert counts.skipped == {reason: 2}
    assert counts.skipped_examples[0].startswith(f"{path}:2: ")
    assert counts.kept == {"data": 2}


def test_skipped_records_are_logged_with_the_first_few(
    write_lines: Writer, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_lines(*["{"] * 7, {"prompt": "q"})
    with caplog.at_level(logging.WARNING):
        load_records("prompt", [DataSource(path)], on_bad_record="skip")
    assert "skipped 7 of 8 records as bad: 7 x broken JSON" in caplog.text
    assert f"{path}:5: broken JSON" in caplog.text
    assert f"{path}:6" not in caplog.text


def test_file_with_bad_records_only_shows_the_first(write_lines: Writer) -> None:
    path = write_lines({"prompt": "q"}, {"prompt": "r"})
    with pytest.raises(RecordError, match=r"the first bad one: .*data\.jsonl:1: field 'chosen'"):
        load_records("preference", [DataSource(path, format="pairs")], "skip")


def test_skipped_records_are_logged_on_the_first_rank_only(
    write_lines: Writer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    with caplog.at_level(logging.WARNING):
        load_records("prompt", [DataSource(write_lines("{", {"prompt": "q"}))], "skip")
    assert not caplog.records
