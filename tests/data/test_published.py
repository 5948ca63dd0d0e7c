"""Rows of published datasets load as what they are, and docs/data.md lists how."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lit_rlhf import data
from lit_rlhf.data.splits import prompt_of
from tests.support.docs_blocks import ROOT, blocks
from tests.support.published_rows import ASK, BAD, BE_BRIEF, GOOD, PUBLISHED, PublishedRow

PAGE = ROOT / "docs" / "data.md"
KINDS: tuple[data.RecordKind, ...] = ("preference", "demonstration", "prompt")


@pytest.fixture(autouse=True)
def maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of the page's function for `map`."""
    (block,) = (block for block in blocks(PAGE) if block.title == "my_maps.py")
    (tmp_path / "my_maps.py").write_text(block.text, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)


def load(kind: data.RecordKind, row: PublishedRow, folder: Path) -> list[data.Record]:
    path = folder / "rows.json"
    path.write_text(json.dumps([row.fields]), "utf-8")
    return data.load_records(kind, [data.DataSource(str(path), **row.settings)])


def responses(record: data.Record) -> list[str]:
    if isinstance(record, data.PreferenceRecord):
        return [record.chosen, record.rejected]
    return [record.messages[-1].content] if isinstance(record, data.DemonstrationRecord) else []


@pytest.mark.parametrize("name", PUBLISHED)
def test_row_loads_as_every_kind_that_it_serves_as(name: str, tmp_path: Path) -> None:
    row = PUBLISHED[name]
    expected = {"preference": [GOOD, BAD], "demonstration": [GOOD], "prompt": []}
    for kind in row.kinds:
        (record,) = load(kind, row, tmp_path)
        *system, ask = prompt_of(record)
        assert responses(record) == expected[kind]
        if isinstance(record, data.PreferenceRecord):
            assert record.margin == (abs(row.fields[row.margin]) if row.margin else 0)
        assert ask.role == "user"
        assert ASK in ask.content
        given = isinstance(row.fields, dict) and "system" in row.fields
        assert [turn.content for turn in system] == ([BE_BRIEF] if given else [])


@pytest.mark.parametrize("name", PUBLISHED)
def test_row_is_refused_as_any_other_kind(name: str, tmp_path: Path) -> None:
    row = PUBLISHED[name]
    for kind in set(KINDS) - set(row.kinds):
        with pytest.raises(data.RecordError):
            load(kind, row, tmp_path)


def test_page_lists_the_datasets() -> None:
    table = "\n".join(published_table())
    assert table in PAGE.read_text("utf-8"), f"docs/data.md: expected the table\n{table}"


def published_table() -> Iterator[str]:
    """The table of docs/data.md."""
    yield "| dataset | preferences | demonstrations | prompts | margin | fields of the source |"
    yield "|---|---|---|---|---|---|"
    for name, row in PUBLISHED.items():
        served = " | ".join("yes" if kind in row.kinds else "no" for kind in KINDS)
        settings = f"`{flow(row.settings)}`" if row.settings else ""
        margin = f"`{row.margin}`" if row.margin else ""
        label = name if "`" in name or "," in name else f"`{name.split(' ')[0]}`"
        rest = name.partition(" ")[2] if label.startswith("`") else ""
        yield f"| {label}{' ' + rest if rest else ''} | {served} | {margin} | {settings} |"


def flow(value: Any) -> str:
    """A setting as YAML shows it on one line."""
    if isinstance(value, dict):
        return ", ".join(
            f"{name}: {{{flow(inner)}}}" if isinstance(inner, dict) else f"{name}: {inner}"
            for name, inner in value.items()
        )
    return str(value)
