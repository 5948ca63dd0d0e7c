from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from lit_rlhf.evaluation import print_text, write_json_lines, write_text
from lit_rlhf.evaluation.output import remove_control_characters


def test_lines_are_json_in_utf_8(tmp_path: Path) -> None:
    records = [{"text": "铁、铜\n"}, {"text": "iron"}]

    path = write_json_lines(tmp_path / "new" / "records.jsonl", records)

    lines = path.read_bytes().decode("utf-8").splitlines()
    assert "铁" in lines[0]
    assert [json.loads(line) for line in lines] == records


def test_half_a_surrogate_pair_is_written_as_json_writes_it(tmp_path: Path) -> None:
    records = [{"text": "half \ud800 of a pair, 铁"}]  # a model's text read from JSON may hold it

    path = write_json_lines(tmp_path / "records.jsonl", records)

    assert "铁" in path.read_text("utf-8")
    assert [json.loads(line) for line in path.read_text("utf-8").splitlines()] == records


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    def broken() -> Iterator[dict[str, str]]:
        yield {"text": "new"}
        raise RuntimeError("on the way")

    path = write_text(tmp_path / "records.jsonl", "old\n")
    with pytest.raises(RuntimeError, match="on the way"):
        write_json_lines(path, broken())

    assert [(file.name, file.read_text("utf-8")) for file in tmp_path.iterdir()] == [
        ("records.jsonl", "old\n")
    ]


def test_a_failed_write_leaves_no_partial_file(tmp_path: Path) -> None:
    path = write_text(tmp_path / "records.jsonl", "old\n")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "new\n\ud800")

    assert [(file.name, file.read_text("utf-8")) for file in tmp_path.iterdir()] == [
        ("records.jsonl", "old\n")
    ]


def test_text_is_printed_as_it_is() -> None:
    console = Console(file=io.StringIO(), width=20)
    text = "[bold]x[/bold] :smile: 3.5 and 铁、铜"

    print_text(console, text)

    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == f"{text}\n"


def test_a_model_cannot_steer_the_terminal() -> None:
    assert remove_control_characters("a\x1b[2Jb\x07\r\x9b31mc\n\td") == "a[2Jb31mc\n\td"
