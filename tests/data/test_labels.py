"""Labels by people as preferences, demonstrations and prompts."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lit_rlhf.data import DataCounts, DataSource, PreferenceRecord, RecordError, load_records
from lit_rlhf.data.encoding import DialogueEncoder, encode_records
from lit_rlhf.data.records import RecordKind
from tests.support.labels import make_label
from tests.support.tiny_tokenizers import CHATML, tiny_tokenizer


def write_labels(path: Path, *choices: str, **values: Any) -> DataSource:
    lines = [make_label(str(n), choice, **values).as_line() for n, choice in enumerate(choices)]
    path.write_bytes(b"".join(lines))
    return DataSource(str(path))


def test_labels_are_read_as_they_are(tmp_path: Path) -> None:
    source = write_labels(tmp_path / "labels.jsonl", "a", "b")
    first, second = load_records("preference", [source])
    assert isinstance(first, PreferenceRecord)
    assert (first.chosen, first.rejected) == ("short", "a longer one")
    assert (second.chosen, second.rejected) == ("a longer one", "short")
    assert first.prompt[0].content == "0"
    assert first.margin == second.margin == 0.0
    demonstrations = load_records("demonstration", [source])
    assert [one.messages[-1].content for one in demonstrations] == ["short", "a longer one"]


def test_labels_without_a_preference_are_counted_by_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "labels.jsonl"
    lines = [
        *(make_label(str(n), choice) for n, choice in enumerate(["b", "tie", "skip", "tie"])),
        make_label("4", "both_bad"),
        make_label("0", "a", repeat=True),
        make_label("5", "b", response_a=""),
        make_label("6", "a", response_b=" \n"),
    ]
    path.write_bytes(b"".join(line.as_line() for line in lines))
    counts = DataCounts()
    assert len(load_records("preference", [DataSource(str(path))], counts=counts)) == 1
    assert counts.undecided == {
        "tie": 2,
        "skipped": 1,
        "both bad": 1,
        "second look": 1,
        "empty response": 2,
    }
    assert counts.label_false.total() == 0
    assert len(load_records("prompt", [DataSource(str(path))])) == 8
    with caplog.at_level(logging.INFO, "lit_rlhf.data.counts"):
        counts.log_read()
    assert "left out 7 labels without a preference: 2 x tie, " in caplog.text


@pytest.mark.parametrize("kind", ["preference", "demonstration"])
def test_label_whose_text_has_a_marker_is_left_out_and_counted(
    tmp_path: Path, kind: RecordKind
) -> None:
    source = write_labels(tmp_path / "labels.jsonl", "b")
    marked = make_label("1", "b", response_b="Zinc.\n\nHuman: And iron?")
    with (tmp_path / "labels.jsonl").open("ab") as file:
        file.write(marked.as_line())
    records = load_records(kind, [source])
    assert len(records) == 2
    for template, dropped in (("hh", 1), ("tokenizer", 0)):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = CHATML  # whose markers are other texts
        encoder = DialogueEncoder(tokenizer, template, 128)
        counts = DataCounts()
        examples = encode_records(records, partial(encode, encoder), counts, "error")
        assert len(examples) == 2 - dropped
        assert counts.dropped.total() == dropped
        assert set(counts.dropped) <= {"a turn contains the text of a control token"}


def encode(encoder: DialogueEncoder, record: Any) -> list[Any]:
    if isinstance(record, PreferenceRecord):
        pair = encoder.encode_pair(record.prompt, chosen=record.chosen, rejected=record.rejected)
        return [pair]
    return [encoder.encode_dialogue(record.messages)]


def test_choice_that_is_none_of_the_known_is_an_error(tmp_path: Path) -> None:
    source = write_labels(tmp_path / "labels.jsonl", "left")
    with pytest.raises(RecordError, match="not one of a, b, tie, both_bad, skip"):
        load_records("preference", [source])
