"""docs/data.md agrees with the code on formats, sources, templates and batches."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from lit_rlhf.data import (
    CHAT_TEMPLATES,
    FILE_SUFFIXES,
    FORMATS,
    DataSource,
    DialogueEncoder,
    Format,
    Message,
    RecordKind,
    Row,
    detect_format,
    load_records,
    read_file,
)
from tests.configs.parsing import cli_parser
from tests.docs.blocks import ROOT, blocks
from tests.support.tiny_models import tiny_tokenizer

PAGE = ROOT / "docs" / "data.md"
TEXT = PAGE.read_text("utf-8")
EXAMPLES = {block.title: block.text for block in blocks(PAGE) if block.language == "json"}
PREFERENCES = {"hh", "pairs", "conversations", "comparison"}
ANSWERED = PREFERENCES | {
    "messages",
    "turns",
    "instruction",
    "instances",
    "question",
    "multiple_choice",
}


def kinds(format: str) -> list[RecordKind]:
    """Kinds of records that a file of a format can hold."""
    if format == "text":
        return ["text", "ptx"]
    answered: list[RecordKind] = ["demonstration", "ptx"] if format in ANSWERED else []
    return ["prompt", *answered, *(["preference"] if format in PREFERENCES else [])]


def test_every_format_has_one_example() -> None:
    assert sorted(EXAMPLES) == sorted(FORMATS)
    assert {*FORMATS, "auto"} == set(get_args(Format))


@pytest.mark.parametrize("format", EXAMPLES)
def test_an_example_is_taken_for_its_format(format: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(EXAMPLES[format], "utf-8")
    (row,) = read_file(str(file))

    assert isinstance(row, Row)
    for kind in kinds(format):
        assert detect_format(row, kind) == format


@pytest.mark.parametrize("format", EXAMPLES)
def test_an_example_loads_as_what_it_serves_as(format: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(EXAMPLES[format], "utf-8")

    for kind in kinds(format):
        loaded = load_records(kind, [DataSource(str(file))])
        assert len(loaded.records) == (2 if format == "instances" else 1)


def test_the_fields_of_a_source_are_in_the_table() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| `")]

    for field in fields(DataSource):
        assert any(f"`{field.name}`" in row.split("|")[1] for row in rows), field.name


def test_the_kinds_of_files_are_named() -> None:
    for suffix in FILE_SUFFIXES:
        assert f"`{suffix.removesuffix('.gz')}`" in TEXT


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_the_table_of_templates_shows_what_they_render(name: str) -> None:
    encoder = DialogueEncoder(tiny_tokenizer(), name, max_length=128)
    question, answer = Message("user", "Name two metals."), Message("assistant", "Iron and zinc.")
    prompt = encoder.encode_prompt([question]).text
    dialogue = encoder.encode_dialogue([question, answer])
    response = encoder.tokenizer.decode(dialogue.input_ids).removeprefix(prompt)

    (row,) = (line for line in TEXT.splitlines() if line.startswith(f"| `{name}` |"))
    cells = [shown(cell) for cell in row.replace("\\|", "\0").split("|")[2:4]]
    eos = encoder.eos_token
    assert cells[0].replace("EOS", eos) == prompt
    assert cells[1].replace("EOS", eos) == response


def shown(cell: str) -> str:
    """Text of a table cell: code spans as they are, words between them without spaces."""
    parts = cell.replace("\0", "|").strip().split("`")
    code = [part.replace("\\n", "\n") for part in parts[1::2]]
    words = [part.replace("and", "").strip() for part in parts[2::2]]
    return "".join(piece for pair in zip(code, words, strict=True) for piece in pair)


def test_the_yaml_blocks_go_on_top_of_a_configuration(workspace: Path) -> None:
    files = ("configs/sft/hh_cpu.yaml", "sources.yaml", "dynamic.yaml")
    flags = [part for file in files for part in ("--config", file)]
    data = cli_parser().parse_args(["fit", *flags]).fit.data.init_args

    assert [source.weight for source in data.train_sources] == [1.0, 2.5, 1.0]
    assert data.max_samples == 64


def test_bad_records_are_reported_as_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = (b for b in blocks(PAGE) if "bad.jsonl" in b.text)

    exec(compile(block.text, "data.md", "exec"), {})

    comments = [line.partition("# ")[2] for line in block.text.splitlines() if "  # " in line]
    assert capsys.readouterr().out.splitlines() == comments


def test_the_encoding_example_trains_on_the_response_and_eos(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = (b for b in blocks(PAGE) if "encode_dialogue" in b.text)

    exec(compile(block.text, "data.md", "exec"), {})

    text, counts = capsys.readouterr().out.splitlines()
    assert text == repr("\n\nHuman: name two metals.\n\nAssistant: iron and zinc.<|endoftext|>")
    # " iron", " and", " zinc", "." and EOS
    assert counts.startswith("5 of ")
