"""Files and datasets as rows: suffixes, compression, encodings, and the lines of what is wrong."""

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lit_rlhf import data
from tests.support.record_reading import Writer, read, read_good

ASK, REPLY, ASK_MORE = (
    data.Message("user", "q"),
    data.Message("assistant", "a"),
    data.Message("user", "r"),
)
CHAT_ASK, CHAT_REPLY = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def test_text_file_is_one_record_and_a_folder_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n", encoding="utf-8")
    assert read("text", str(tmp_path / "a.txt")) == [data.TextRecord("one\n\ntwo\n", "s")]
    (tmp_path / "folder").mkdir()
    content = gzip.compress(json.dumps({"prompt": "你好"}, ensure_ascii=False).encode())
    (tmp_path / "folder/train.jsonl.gz").write_bytes(content)
    for path in ("folder", "folder/train.jsonl.gz"):
        (record,) = read("prompt", str(tmp_path / path))
        assert record == data.PromptRecord((data.Message("user", "你好"),), "s")


@pytest.mark.parametrize("name", ["data.json", "data.json.gz"])
@pytest.mark.parametrize("indent", [None, 2])
def test_json_array_is_read_as_records(tmp_path: Path, name: str, indent: int | None) -> None:
    content = json.dumps([{"prompt": "q"}, {"prompt": "r"}], indent=indent).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    records = read("prompt", str(tmp_path / name))
    assert records == [data.PromptRecord((ASK,), "s"), data.PromptRecord((ASK_MORE,), "s")]


def test_byte_order_mark_and_blank_lines_are_no_records(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "q"}\r\n\r\n  \n{"prompt": "r"}')
    assert [str(r.location) for r in read("prompt", str(path))] == [f"{path}:1", f"{path}:4"]


def test_parquet_file_is_read_with_numbers_of_rows(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    rows = [{"messages": [CHAT_ASK, CHAT_REPLY]}, {"messages": [CHAT_ASK, CHAT_REPLY]}]
    pq.write_table(pa.Table.from_pylist(rows), path)
    records = read("demonstration", str(path))
    assert records == [data.DemonstrationRecord((ASK, REPLY), "s")] * 2
    assert str(records[1].location) == f"{path}:2"


@pytest.mark.parametrize("compressed", [False, True])
def test_wrong_byte_costs_its_line(tmp_path: Path, compressed: bool) -> None:
    content = '{"prompt": "q"}\n{"prompt": "café"}\n'.encode("latin-1") + b'{"prompt": "r"}\n'
    path = tmp_path / ("data.jsonl.gz" if compressed else "data.jsonl")
    path.write_bytes(gzip.compress(content) if compressed else content)
    with pytest.raises(data.RecordError, match=r"data\.jsonl(\.gz)?:2: not UTF-8"):
        read("prompt", str(path))
    records, counts = read_good("prompt", str(path))
    assert (len(records), counts.skipped) == (2, {"not UTF-8": 1})


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.txt", "one\ntwo\ncafé\n"), ("a.json", '[{"prompt": "q"},\n\n{"prompt": "é"}]')],
)
def test_wrong_byte_of_file_read_as_whole_has_line(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(data.RecordError, match=rf"{name}:3: not UTF-8"):
        read_good("text", str(tmp_path / name))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[\n{"prompt": "q"},\n{"prompt": \n]\n', r":4: broken JSON array \(Expecting value"),
        ('[{"prompt": "q"}\n3]', r":2: broken JSON array \(Expecting ',' delimiter"),
        ("[" * 100_000, r": broken JSON array \(.*recursion"),
        ('[{"id": ' + "9" * 5000 + "}]", r": broken JSON array \(.*4300 digits"),
    ],
    ids=["value", "delimiter", "deep", "huge"],
)
def test_broken_array_is_always_an_error(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(data.RecordError, match=r"a\.json" + message):
        read_good("prompt", str(tmp_path / "a.json"))


def test_array_elements_are_numbered(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf\n [\n{"prompt": "q"}, 3,\n{"prompt": ""}]')
    counts = read_good("prompt", str(path)).counts
    assert counts.skipped == {"not a JSON object": 1, "empty": 1}
    assert [example.split(": ")[0] for example in counts.skipped_examples] == [
        f"{path}:2",
        f"{path}:3",
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
    kind: data.RecordKind = "text" if name.endswith("txt") else "prompt"
    with pytest.raises(data.RecordError, match=reason) as caught:
        data.load_records(kind, [data.DataSource(str(tmp_path / name))], on_bad_record)
    assert caught.value.file == str(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("data.xlsx", r"an unknown kind of file \(known ones end in \.jsonl, .*\.csv, "),
        ("nowhere.xlsx", "no such file or folder"),
        ("nowhere.jsonl", "no such file"),
        ("nowhere/", "no such file or folder"),
    ],
)
def test_local_path_is_not_asked_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    (tmp_path / "data.xlsx").write_bytes(b"PK")
    monkeypatch.setattr(datasets, "load_dataset", None)
    with pytest.raises(data.RecordError, match=f"{name}: {reason}"):
        read("prompt", f"{tmp_path}/{name}")


PAIR = {"prompt": "q, really", "chosen": 'say "a"\nb', "rejected": "None", "margin": "0.5"}


@pytest.mark.parametrize(
    ("name", "separator"), [("a.csv", ","), ("a.csv", ";"), ("a.tsv", "\t"), ("a.csv.gz", ",")]
)
def test_table_of_texts_is_read_with_lines_of_rows(
    tmp_path: Path, name: str, separator: str
) -> None:
    text = io.StringIO()
    table = csv.DictWriter(text, [*PAIR, "note"], delimiter=separator)
    table.writeheader()
    table.writerows([PAIR, PAIR | {"prompt": "007"}])
    content = ("\ufeff" + text.getvalue()).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    first, second = read("preference", str(tmp_path / name))
    assert first.prompt == (data.Message("user", "q, really"),)
    assert (first.chosen, first.rejected, first.margin) == ('say "a"\nb', "None", 0.5)
    assert (second.prompt[0].content, second.location.line) == ("007", 4)


def test_wrong_rows_of_a_table_have_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('prompt,chosen,rejected\nq,a,b\nq,"a\nb"\n\nq,a,\nq,a,"b\n"\n')
    records, counts = read_good("preference", str(path))
    assert [record.location.line for record in records] == [2, 7]
    assert [t.partition(": ")[0] for t in counts.skipped_examples] == [f"{path}:3", f"{path}:6"]
    path.write_text('prompt\nq\n"q\n')
    with pytest.raises(data.RecordError, match=r"a\.csv:3: broken CSV"):
        read("prompt", str(path))


def test_saved_dataset_is_read_as_records(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list([{"prompt": "q"}, {"prompt": "r"}])
    rows.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=rows.select([1])).save_to_disk(tmp_path / "splits")
    (file,) = (tmp_path / "saved").glob("*.arrow")
    for path, expected in (("saved", "qr"), ("splits", "r"), (f"saved/{file.name}", "qr")):
        records = read("prompt", str(tmp_path / path))
        assert [record.prompt[0].content for record in records] == [*expected]
    with pytest.raises(data.RecordError, match="splits: no such split"):
        read("prompt", str(tmp_path / "splits"), split="test")


def test_array_in_a_file_of_lines_and_lines_in_one_of_an_array(
    tmp_path: Path, write_lines: Writer
) -> None:
    assert len(read("prompt", write_lines({"prompt": "q"}, {"prompt": "r"}, name="data.json"))) == 2
    path = tmp_path / "data.jsonl"
    for content in ('[{"prompt": "q"}, {"prompt": "r"}]', '[\n{"prompt": "q"},\n{"prompt": "r"}]'):
        path.write_text(content)
        assert [r.prompt for r in read("prompt", str(path))] == [(ASK,), (ASK_MORE,)]
    path.write_text('["q", "a"]\n["r", "a"]\n')  # turns, one dialogue per line
    assert [r.messages[0] for r in read("demonstration", str(path))] == [ASK, ASK_MORE]


def test_duplicates_are_counted_and_dropped_if_asked(write_lines: Writer) -> None:
    path = write_lines({"prompt": "q", "id": 1}, {"prompt": "r"}, {"prompt": "q", "id": 2})
    assert read_good("prompt", path).counts.duplicates == {"data": 1}
    assert [record.location.line for record in read("prompt", path, drop_duplicates=True)] == [1, 2]


def test_rows_know_their_source(write_lines: Writer) -> None:
    (row,) = data.read_file(write_lines({"prompt": "q"}), "s")
    assert not isinstance(row, data.RecordError)
    assert (row.fields, row.source) == ({"prompt": "q"}, "s")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        (
            "a.jsonl",
            '{"prompt": "q"}\n{"prompt": "q", "prompt": "r"}',
            r":2: a key twice .'prompt'",
        ),
        ("a.jsonl", '{"m": [{"role": "a", "role": "b"}]}', r":1: a key twice .'role'"),
        ("a.json", '[{"prompt": "q", "prompt": "r"}]', r"a.json: a key twice .'prompt'"),
        ("a.csv", "prompt,id,prompt\nq,1,r", r":1: a column twice .'prompt'"),
        ("a.tsv", "prompt\tprompt\nq\tr", r":1: a column twice .'prompt'"),
    ],
)
def test_names_that_are_given_twice_are_refused(
    tmp_path: Path, name: str, content: str, problem: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(data.RecordError, match=problem):
        read("prompt", str(tmp_path / name))


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_columns_of_a_binary_table_that_are_given_twice_are_refused(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    table = pa.table([["q"], ["r"]], names=["prompt", "prompt"])
    if name.endswith("parquet"):
        pq.write_table(table, tmp_path / name)
    else:
        with pa.ipc.new_file(tmp_path / name, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(data.RecordError, match=f"{name}: a column twice .'prompt'"):
        read("prompt", str(tmp_path / name))
    assert capfd.readouterr().err == ""


def test_name_of_a_table_is_no_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, prompt in (("a[1].parquet", "q"), ("a1.parquet", "r"), ("a*.parquet", "q")):
        pq.write_table(pa.Table.from_pylist([{"prompt": prompt}]), tmp_path / name)
    for path in ("a[1].parquet", "a*.parquet"):
        records = read("prompt", str(tmp_path / path))
        assert [record.prompt for record in records] == [(ASK,)]
    for folder in ("d[1]", "d1"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a1.parquet").write_bytes((tmp_path / "a1.parquet").read_bytes())
    with pytest.raises(data.RecordError, match=r"d\[1\]: a folder with \*, \? or \[ in its path"):
        read("prompt", str(tmp_path / "d[1]"))
    monkeypatch.chdir(tmp_path / "d[1]")
    assert [record.prompt for record in read("prompt", "a1.parquet")] == [(ASK_MORE,)]


def test_header_of_a_table_may_have_several_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('"id\nof it","prompt"\n1,q\n\n2,r,3\n')
    (record,) = read_good("prompt", str(path)).records
    assert record.location.line == 3
    path.write_text("prompt,id\rq,1\rr,2")
    with pytest.raises(data.RecordError, match=r"a\.csv:1: broken CSV .*new-line"):
        read("prompt", str(path))


def test_columns_without_a_name_may_be_several(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,,\nq,,")
    assert [record.prompt for record in read("prompt", str(tmp_path / "a.csv"))] == [(ASK,)]
