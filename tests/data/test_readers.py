"""Files and datasets as rows: suffixes, compression, encodings, and the lines of what is wrong."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lit_rlhf.data import readers
from lit_rlhf.data.readers import read_file
from lit_rlhf.data.records import (
    DemonstrationRecord,
    Message,
    PromptRecord,
    Record,
    RecordError,
    RecordKind,
    Row,
    TextRecord,
)
from lit_rlhf.data.sources import DataSource, load_records

Writer = Callable[..., str]
ASK, REPLY, ASK_MORE = Message("user", "q"), Message("assistant", "a"), Message("user", "r")
CHAT_ASK, CHAT_REPLY = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def read(kind: RecordKind, path: str, **settings: Any) -> list[Record]:
    return load_records(kind, [DataSource(path, name="s", **settings)]).records


def test_text_file_is_one_record(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n", encoding="utf-8")
    assert read("text", str(tmp_path / "a.txt")) == [TextRecord("one\n\ntwo\n", "s")]


def test_compressed_lines(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"prompt": "你好"}, ensure_ascii=False).encode()))
    assert read("prompt", str(path)) == [PromptRecord((Message("user", "你好"),), "s")]


@pytest.mark.parametrize("name", ["data.json", "data.json.gz"])
@pytest.mark.parametrize("indent", [None, 2])
def test_json_array(tmp_path: Path, name: str, indent: int | None) -> None:
    content = json.dumps([{"prompt": "q"}, {"prompt": "r"}], indent=indent).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    records = read("prompt", str(tmp_path / name))
    assert records == [PromptRecord((ASK,), "s"), PromptRecord((ASK_MORE,), "s")]


def test_json_file_of_lines(write_lines: Writer) -> None:
    path = write_lines({"prompt": "q"}, {"prompt": "r"}, name="data.json")
    assert len(read("prompt", path)) == 2


def test_byte_order_mark_and_blank_lines_are_no_records(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "q"}\r\n\r\n  \n{"prompt": "r"}')
    assert [str(r.location) for r in read("prompt", str(path))] == [f"{path}:1", f"{path}:4"]


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    rows = [{"messages": [CHAT_ASK, CHAT_REPLY]}, {"messages": [CHAT_ASK, CHAT_REPLY]}]
    pq.write_table(pa.Table.from_pylist(rows), path)
    records = read("demonstration", str(path))
    assert records == [DemonstrationRecord((ASK, REPLY), "s")] * 2
    assert str(records[1].location) == f"{path}:2"


def test_folder_is_read_as_a_dataset(tmp_path: Path, write_lines: Writer) -> None:
    (tmp_path / "folder").mkdir()
    write_lines({"prompt": "q"}, name="folder/train.jsonl")
    assert read("prompt", str(tmp_path / "folder")) == [PromptRecord((ASK,), "s")]


@pytest.mark.parametrize("compressed", [False, True])
def test_wrong_encoding(tmp_path: Path, compressed: bool) -> None:
    content = '{"prompt": "q"}\n{"prompt": "café"}\n'.encode("latin-1") + b'{"prompt": "r"}\n'
    path = tmp_path / ("data.jsonl.gz" if compressed else "data.jsonl")
    path.write_bytes(gzip.compress(content) if compressed else content)
    with pytest.raises(RecordError, match=r"data\.jsonl(\.gz)?:2: not UTF-8") as caught:
        load_records("prompt", [DataSource(str(path))])
    assert caught.value.line == 2
    loaded = load_records("prompt", [DataSource(str(path))], on_bad_record="skip")
    assert (len(loaded.records), loaded.skipped) == (2, {"not UTF-8": 1})


def test_wrong_encoding_of_a_text_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("one\ntwo\ncafé\n".encode("latin-1"))
    with pytest.raises(RecordError, match=r"a\.txt:3: not UTF-8"):
        load_records("text", [DataSource(str(tmp_path / "a.txt"))], on_bad_record="skip")


@pytest.mark.parametrize("on_bad_record", ["error", "skip"])
def test_broken_array_is_an_error_either_way(tmp_path: Path, on_bad_record: Any) -> None:
    (tmp_path / "a.json").write_text('[\n{"prompt": "q"},\n{"prompt": \n]\n')
    with pytest.raises(RecordError, match=r"a\.json:4: broken JSON array"):
        load_records("prompt", [DataSource(str(tmp_path / "a.json"))], on_bad_record)


def test_array_elements_have_lines(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[\n{"prompt": "q"},\n3,\n{"prompt": ""}]')
    loaded = load_records("prompt", [DataSource(str(tmp_path / "a.json"))], "skip")
    assert loaded.skipped == {"not a JSON object": 1, "empty": 1}
    assert [example.split(": ")[0] for example in loaded.examples] == [
        f"{tmp_path}/a.json:3",
        f"{tmp_path}/a.json:4",
    ]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        pytest.param(name, content, reason, id=name)
        for name, content, reason in (
            ("empty.jsonl", b"", "empty file"),
            ("empty.txt", b"", "empty file"),
            ("blank.jsonl", b"\n\n", "no record that can be used"),
            ("empty.jsonl.gz", gzip.compress(b""), "no record that can be used"),
            ("array.json", b"[]", "no record that can be used"),
            ("damaged.jsonl.gz", gzip.compress(b"x" * 999)[:-9], "cannot be read"),
            ("no.parquet", b"PAR1 but not really", "cannot be read"),
        )
    ],
)
@pytest.mark.parametrize("on_bad_record", ["error", "skip"])
def test_file_without_records_is_an_error_either_way(
    tmp_path: Path, name: str, content: bytes, reason: str, on_bad_record: Any
) -> None:
    (tmp_path / name).write_bytes(content)
    kind: RecordKind = "text" if name.endswith("txt") else "prompt"
    with pytest.raises(RecordError, match=reason) as caught:
        load_records(kind, [DataSource(str(tmp_path / name))], on_bad_record)
    assert caught.value.file == str(tmp_path / name)


def test_missing_file() -> None:
    with pytest.raises(RecordError, match=r"nowhere\.jsonl: no such file"):
        load_records("prompt", [DataSource("nowhere.jsonl")])


def test_what_is_neither_file_nor_dataset(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="neither a known kind of file nor a dataset"):
        load_records("prompt", [DataSource(str(tmp_path / "data.csv"))])


def test_elements_of_an_array_are_counted_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('\n[{"prompt":\n"q"}, 1,\n\n2,\n{"prompt": "r"}\n3]')
    lines, error = [], None
    try:
        for row in read_file(str(path)):
            lines.append((type(row).__name__, row.location.line))
    except RecordError as caught:
        error = caught
    assert lines == [("Row", 2), ("RecordError", 3), ("RecordError", 5), ("Row", 6)]
    assert error is not None
    assert str(error) == f"{path}:7: broken JSON array (expected ',' or ']')"


def test_rows_know_their_source(write_lines: Writer) -> None:
    (row,) = read_file(write_lines({"prompt": "q"}), "s")
    assert not isinstance(row, RecordError)
    assert (row.fields, row.source) == ({"prompt": "q"}, "s")


@pytest.mark.parametrize("window", [4, 7, 64])
@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int, indent: int | None
) -> None:
    monkeypatch.setattr(readers, "_WINDOW", window)
    path = tmp_path / "a.json"
    values = [{"text": "你好\n, ] }" * n, "n": n} for n in (1, 50, 2)] + [12345, 6]
    text = json.dumps(values, indent=indent, ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf\n " + text.encode())
    rows = list(read_file(str(path)))
    assert [row.fields for row in rows if isinstance(row, Row)] == values[:3]
    assert [row.detail for row in rows if isinstance(row, RecordError)] == ["a int", "a int"]
    lines = ("\n" + text).splitlines()
    for row, value in zip(rows, values, strict=True):
        if indent is not None:
            assert lines[row.location.line - 1].strip(", ") == (
                "{" if row in rows[:3] else str(value)
            )


def test_a_wrong_byte_in_an_array_has_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_WINDOW", 11)
    path = tmp_path / "a.json"
    path.write_bytes('[{"prompt": "q"},\n{"prompt": "你"},\n\n{"prompt": "'.encode() + b'\xff"}]')
    with pytest.raises(RecordError, match=r"a\.json:4: not UTF-8"):
        load_records("prompt", [DataSource(str(path))])


@pytest.mark.parametrize(
    ("element", "detail"),
    [("[" * 100_000, "recursion"), ('{"id": ' + "9" * 5000 + "}", "4300 digits")],
    ids=["deep", "huge"],
)
def test_an_element_that_python_does_not_read_has_a_line(
    tmp_path: Path, element: str, detail: str
) -> None:
    path = tmp_path / "a.json"
    path.write_text('[\n{"prompt": "q"},\n' + element + "]")
    with pytest.raises(RecordError, match=rf"a\.json:3: broken JSON array \(.*{detail}"):
        load_records("prompt", [DataSource(str(path))])
