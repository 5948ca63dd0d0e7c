"""Labels by people as preferences, demonstrations and prompts."""

import logging
from pathlib import Path
from typing import Any

import pytest

from lit_rlhf.data import DataCounts, DataSource, PreferenceRecord, RecordError, load_records
from tests.support.labels import make_label


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
    ]
    path.write_bytes(b"".join(line.as_line() for line in lines))
    counts = DataCounts()
    assert len(load_records("preference", [DataSource(str(path))], counts=counts)) == 1
    assert counts.undecided == {
        "tie": 2,
        "skipped": 1,
        "both bad": 1,
        "second look": 1,
        "empty response": 1,
    }
    assert counts.label_false.total() == 0
    assert len(load_records("prompt", [DataSource(str(path))])) == 7
    with caplog.at_level(logging.INFO, "lit_rlhf.data.counts"):
        counts.log_read()
    assert "left out 6 labels without a preference: 2 x tie, " in caplog.text


def test_choice_that_is_none_of_the_known_is_an_error(tmp_path: Path) -> None:
    source = write_labels(tmp_path / "labels.jsonl", "left")
    with pytest.raises(RecordError, match="not one of a, b, tie, both_bad, skip"):
        load_records("preference", [source])
