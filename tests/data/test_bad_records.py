"""Bad input: an error that names file, line and field, or a count."""

import logging
from typing import Any

import pytest
from lightning.pytorch.utilities import rank_zero_only

from lit_rlhf.data.records import RecordError, RecordKind
from lit_rlhf.data.sources import DataSource, load_records
from tests.support.record_reading import Writer, read, read_good


def hh(*turns: str) -> str:
    """Turns "H: text" or "A: text" as a dialogue string."""
    names = {"H": "Human", "A": "Assistant"}
    return "".join(f"\n\n{names[turn[0]]}:{turn[2:]}" for turn in turns)


def chat(*turns: str) -> dict[str, Any]:
    roles = {"H": "user", "A": "assistant", "S": "system", "T": "tool"}
    return {"messages": [{"role": roles[t[0]], "content": t[3:]} for t in turns]}


GOOD_PAIR = {"chosen": hh("H: q", "A: a"), "rejected": hh("H: q", "A: b")}
GOOD_CHAT = chat("H: q", "A: a")
FROM_HUMAN = {"from": "human", "value": "a"}

DIALOGUE = "missing, or no assistant turn at the end"
BAD_PAIRS: list[tuple[Any, str, str]] = [
    ('{"chosen": "x', "", "broken JSON"),
    ('{"id": ' + "9" * 5000 + "}", "", "broken JSON"),
    ("[" * 100_000, "", "broken JSON"),
    ("[1, 2]", "", "not a JSON object"),
    ({"rejected": GOOD_PAIR["rejected"]}, "chosen", "missing"),
    ({"chosen": GOOD_PAIR["chosen"]}, "rejected", DIALOGUE),
    *(
        ({**GOOD_PAIR, field: value}, field, reason)
        for field, value, reason in [
            ("chosen", " ", "empty"),
            ("chosen", 3, "not a string"),
            ("rejected", hh("H: q", "A: a "), "chosen and rejected are equal"),
            ("rejected", hh("H: r", "A: b"), "chosen and rejected have different prompts"),
            ("chosen", hh("H: q", "H: r", "A: a"), "two human turns in a row"),
            ("chosen", hh("H: q", "A: r", "A: a"), "two assistant turns in a row"),
            ("chosen", hh("H: q"), DIALOGUE),
            ("rejected", hh("H: q", "A: "), "empty assistant turn"),
            ("chosen", hh("H: ", "A: a"), "empty human turn"),
            ("chosen", "hello", "the dialogue does not start with '\\n\\nHuman:'"),
            ("margin", -1, "not a number of at least 0"),
            ("margin", 10**400, "not a number of at least 0"),
            ("margin", 1e39, "not a number of at least 0"),  # beyond float32
        ]
    ),
]
TOOLS = "calls of tools are not supported"
BAD_CHATS: list[tuple[Any, str, str]] = [
    ({"other": 1}, "messages", "not a list of turns"),
    ({"messages": []}, "messages", "empty"),
    (chat("H: q", "H: r", "A: a"), "messages", "two human turns in a row"),
    (chat("H: q", "A: r", "A: a"), "messages", "two assistant turns in a row"),
    (chat("H: q"), "messages", DIALOGUE),
    (chat("A: a"), "messages", "no human turn"),
    (chat("A: a", "H: q", "A: a"), "messages", "the dialogue starts with an assistant turn"),
    (chat("H: q", "S: s", "A: a"), "messages", "a system turn after the first turn"),
    (chat("H: ", "A: a"), "messages", "empty human turn"),
    (chat("H: q", "A: "), "messages", "empty assistant turn"),
    ({"messages": [{"role": "critic", "content": "a"}]}, "messages.role", "unknown role"),
    (chat("H: q", "T: a"), "messages.role", TOOLS),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        "messages.tool_calls",
        TOOLS,
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "messages.content",
        "a part is not a text",
    ),
    ({"messages": [{"role": "user"}]}, "messages.content", "missing"),
    ({"messages": ["q"]}, "messages", "a turn is not an object"),
]
PAIR, ASKED = {"prompt": "q", "chosen": "a", "rejected": "b"}, {"instruction": "q", "output": "a"}
OPTIONS = {"question": "q", "A": "x", "B": "y", "answer": "A"}
TALK = {"conversations": [{"from": "human", "value": "q"}], "chosen": "a", "rejected": "b"}
HALF = "half of a surrogate pair"
OTHERS: list[tuple[RecordKind, dict[str, Any], dict[str, Any], str, str]] = [
    ("preference", PAIR, PAIR | {"rejected": "a\n"}, "rejected", "chosen and rejected are equal"),
    ("preference", PAIR, PAIR | {"rejected": "b\ud800"}, "rejected", HALF),
    ("preference", TALK, TALK | {"chosen": FROM_HUMAN}, "chosen", "not an assistant turn"),
    ("demonstration", ASKED, ASKED | {"instruction": ""}, "instruction", "empty"),
    ("demonstration", ASKED, ASKED | {"output": ""}, "output", "empty assistant turn"),
    ("demonstration", ASKED, ASKED | {"input": 3}, "input", "not a string"),
    ("demonstration", {"question": "q", "answer": "a"}, {"question": "q"}, "answer", DIALOGUE),
    (
        "demonstration",
        OPTIONS,
        OPTIONS | {"answer": "E"},
        "answer",
        "not the letter or the index of an option",
    ),
    (
        "demonstration",
        {"instruction": "q", "instances": [{"output": "a"}]},
        {"instruction": "q", "instances": []},
        "instances",
        "not a list of at least one instance",
    ),
    ("demonstration", GOOD_CHAT, chat("H: q\udfff", "A: a"), "messages", HALF),
    ("prompt", {"prompt": "q"}, {"prompt": None}, "prompt", "missing"),
    ("prompt", {"prompt": "q"}, {"prompt": "q\ud800"}, "prompt", HALF),
    ("text", {"text": "q"}, {"text": "  "}, "text", "empty"),
    ("text", {"text": "q"}, {"text": "q\ud800"}, "text", HALF),
]
CASES: list[Any] = [
    *(("preference", GOOD_PAIR, *case) for case in BAD_PAIRS),
    *(("demonstration", GOOD_CHAT, *case) for case in BAD_CHATS),
    *OTHERS,
]


@pytest.mark.parametrize(("kind", "good", "bad", "field", "reason"), CASES, ids=range(len(CASES)))
def test_bad_record_is_named_or_counted(
    *, write_lines: Writer, kind: RecordKind, good: Any, bad: Any, field: str, reason: str
) -> None:
    path = write_lines(good, "", bad)
    with pytest.raises(RecordError) as caught:
        read(kind, path)
    error = caught.value
    assert (error.file, error.line, error.field, error.reason) == (path, 3, field, reason)
    assert str(error).startswith(f"{path}:3: " + (f"field '{field}': " if field else ""))
    path = write_lines(good, bad, bad, good)
    records, counts = read_good(kind, path)
    assert (len(records), counts.skipped) == (2, {reason: 2})
    assert counts.skipped_examples[0].startswith(f"{path}:2: ")
    assert counts.kept == {"data": 2}


def test_skipped_records_are_logged_with_the_first_few_on_the_first_rank(
    write_lines: Writer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(*["{"] * 7, {"prompt": "q"})
    with caplog.at_level(logging.WARNING):
        load_records("prompt", [DataSource(path)], on_bad_record="skip")
    assert "skipped 7 of 8 records as bad: 7 x broken JSON" in caplog.text
    assert f"{path}:5: broken JSON" in caplog.text
    assert f"{path}:6" not in caplog.text
    caplog.clear()
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    load_records("prompt", [DataSource(path)], on_bad_record="skip")
    assert not caplog.records


def test_file_with_bad_records_only_shows_the_first(write_lines: Writer) -> None:
    path = write_lines({"prompt": "q"}, {"prompt": "r"})
    with pytest.raises(RecordError, match=r"the first bad one: .*data\.jsonl:1: field 'chosen'"):
        load_records("preference", [DataSource(path, format="pairs")], "skip")
