"""Mixing sources by weight, and splitting by prompt."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest

from lit_rlhf.data import DataSource, Row
from lit_rlhf.data.records import Message, PromptRecord, RecordError
from lit_rlhf.data.sources import load_records
from lit_rlhf.data.splits import prompt_of, repeat_by_weight, split_records
from tests.support.record_reading import Writer, read, read_good


def prompts(n: int, source: str = "s") -> list[PromptRecord]:
    return [PromptRecord((Message("user", f"q{i}"),), source) for i in range(n)]


@pytest.mark.parametrize(
    ("weight", "counts"), [(1.0, {1: 10}), (3.0, {3: 10}), (0.3, {1: 3}), (2.5, {2: 5, 3: 5})]
)
def test_weight_is_a_multiple_of_the_size_drawn_by_the_seed(
    weight: float, counts: dict[int, int]
) -> None:
    mixed = repeat_by_weight(prompts(10), [DataSource("x", weight, name="s")], seed=0)
    assert Counter(Counter(mixed).values()) == counts
    half = [DataSource("x", 0.5, name="s")]
    first, repeated, other = (repeat_by_weight(prompts(40), half, seed) for seed in (1, 1, 2))
    assert first == repeated
    assert first != other


def test_records_are_loaded_once_and_repeated_by_weight(write_lines: Writer) -> None:
    one = write_lines(*[{"prompt": f"a{i}"} for i in range(4)], name="one.jsonl")
    two = write_lines(*[{"prompt": f"b{i}"} for i in range(4)], name="two.jsonl")
    sources = [DataSource(one, 0.5), DataSource(two, 3)]
    records = load_records("prompt", sources)
    assert Counter(record.source for record in records) == {"one": 4, "two": 4}
    repeated = repeat_by_weight(records, sources, seed=3)
    assert Counter(record.source for record in repeated) == {"one": 2, "two": 12}


def test_label_of_a_source_is_its_name_or_its_path() -> None:
    assert DataSource("folder/hh.train.jsonl.gz").label == "hh"
    assert DataSource("owner/name").label == "owner/name"
    assert DataSource("owner/name", data_dir="harmless").label == "owner/name/harmless"
    assert DataSource("a.jsonl", name="mine").label == "mine"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight": 0}, "weight"),
        ({"weight": float("nan")}, "weight"),
        ({"format": "xml"}, "xml"),
        ({"columns": {"prompt": "text"}, "map": "a:b"}, "columns, map: expected one of them"),
    ],
)
def test_source_out_of_range_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataSource("x.jsonl", **settings)
    with pytest.raises(ValueError, match="expected different names"):
        load_records("prompt", [DataSource("a/x.jsonl"), DataSource("b/x.jsonl")])
    with pytest.raises(ValueError, match="got none"):
        load_records("prompt", [])


def test_named_columns_go_before_others(write_lines: Writer) -> None:
    """A named prompt is preferred to the dialogue beside it."""
    turn = {"role": "user", "content": "q1"}
    row = {"context_messages": [turn], "messages": [{"role": "user", "content": "other"}]}
    records = read("prompt", write_lines(row), columns={"prompt": "context_messages"})
    assert records == [PromptRecord((Message("user", "q1"),), "s")]


def test_column_that_no_record_has_is_named(write_lines: Writer) -> None:
    source = DataSource(write_lines({"text": "q"}), columns={"prompt": "txet"})
    with pytest.raises(RecordError, match=r"data.jsonl:1: field 'txet'.*it has \['text'\]"):
        load_records("prompt", [source], on_bad_record="skip")


def split_lines(row: dict[str, Any]) -> list[dict[str, Any]] | dict[str, Any] | None:
    """A function for `map`: one prompt per line, none for an empty text."""
    prompts = [{"prompt": line} for line in row["text"].splitlines()]
    return prompts if len(prompts) > 1 else prompts[0] if prompts else None


def test_named_columns_replace_a_field_and_may_lack_in_later_rows(write_lines: Writer) -> None:
    path = write_lines({"prompt": "own", "text": "asked", "id": 1}, {"prompt": "own"})
    rows = DataSource(path, columns={"prompt": "text"}).read_rows()
    fields = [row.fields for row in rows if isinstance(row, Row)]
    assert fields == [{"prompt": "asked", "id": 1}, {"prompt": None}]


def test_map_gives_one_record_several_or_none(write_lines: Writer) -> None:
    path = write_lines(*[{"text": text} for text in ("q1\nq2", "", "q3")], {"other": 1})
    records, counts = read_good("prompt", path, map=f"{__name__}:split_lines")
    assert [prompt_of(r)[0].content for r in records] == ["q1", "q2", "q3"]
    failed = f"{path}:4: {__name__}:split_lines failed (KeyError: 'text')"
    assert counts.skipped_examples == [failed]


def test_map_may_be_a_callable(write_lines: Writer) -> None:
    def change(row: dict[str, str]) -> dict[str, str] | None:
        return {"prompt": row["q"].upper()} if row["q"] != "b" else None

    path = write_lines({"q": "a"}, {"q": "b"}, {"other": "c"})
    (record,), counts = read_good("prompt", path, map=change)
    assert record.prompt == (Message("user", "A"),)
    assert counts.skipped_examples[0].endswith("change failed (KeyError: 'q')")
    settings = DataSource(path, map=change).settings()
    assert json.loads(json.dumps(settings))["map"].endswith("<locals>.change")
    with pytest.raises(ValueError, match=r"map: expected .* or a callable, got int"):
        DataSource("x.jsonl", map=3)


def test_splits_are_disjoint_complete_and_depend_on_the_seed_alone() -> None:
    records = prompts(100)
    parts, repeated, other = (
        split_records(records, val_fraction=0.2, test_fraction=0.1, seed=seed) for seed in (0, 0, 1)
    )
    assert [len(part) for part in parts] == [70, 20, 10]
    assert sorted(map(str, [r for part in parts for r in part])) == sorted(map(str, records))
    assert parts == repeated
    assert parts.val != other.val
    few = split_records(prompts(5), val_fraction=0.01, test_fraction=0, seed=0)
    assert len(few.val) == 1


def test_splits_share_no_prompt() -> None:
    parts = split_records(prompts(50) * 3, val_fraction=0.2, test_fraction=0.2, seed=0)
    part_prompts = [{prompt_of(record) for record in part} for part in parts]
    assert sum(map(len, part_prompts)) == len(set.union(*part_prompts)) == 50
    assert len(parts.val) == 30


def test_other_records_hardly_move_the_split() -> None:
    """A stage that keeps a few records more holds out the same prompts."""
    small, large = (
        split_records(prompts(n), val_fraction=0.2, test_fraction=0, seed=0) for n in (100, 105)
    )
    assert set(small.val) <= set(large.val)


@pytest.mark.parametrize(("val_fraction", "test_fraction"), [(-0.1, 0), (0, 1), (0.5, 0.5)])
def test_fractions_out_of_range_are_refused(val_fraction: float, test_fraction: float) -> None:
    with pytest.raises(ValueError, match="fraction"):
        split_records(prompts(10), val_fraction=val_fraction, test_fraction=test_fraction, seed=0)


ROWS = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}, {"prompt": ""}]


@pytest.mark.parametrize("kind", ["list", "dataset", "numpy", "iterable"])
def test_rows_in_memory_are_records(kind: str) -> None:
    rows: Any = ROWS
    if kind != "list":
        rows = datasets.Dataset.from_list(ROWS)
        rows = rows.to_iterable_dataset() if kind == "iterable" else rows
        rows = rows.with_format("numpy") if kind == "numpy" else rows
    records, counts = read_good("prompt", rows, name="mine")
    assert [record.prompt[0].content for record in records] == ["a", "b"]
    assert [record.fields["answer"] for record in records] == [1, 2]
    assert type(records[0].fields["answer"]) is int
    assert [record.location for record in records] == [("mine", 1), ("mine", 2)]
    assert counts.skipped_examples == ["mine:3: field 'prompt': empty"]
    assert len(load_records("prompt", [DataSource(rows)], limit=1)) == 1


def test_rows_are_no_setting() -> None:
    settings = DataSource(ROWS, weight=2.0).settings()
    assert (settings["path"], settings["weight"]) == ("rows", 2.0)
    assert DataSource(Path("a") / "b.jsonl").settings()["path"] == str(Path("a") / "b.jsonl")


@pytest.mark.parametrize(
    ("path", "message"), [(5, "int"), ({"train": ROWS, "test": ROWS}, "dict with train, test")]
)
def test_path_is_a_text_or_rows(path: Any, message: str) -> None:
    expected = f"path: expected a file, .* a list of dicts, got {message}"
    with pytest.raises(ValueError, match=expected):
        DataSource(path)
    with pytest.raises(RecordError, match=r"rows:1: not a row of fields \(a str\)"):
        load_records("prompt", [DataSource(["text"])])
