"""docs/data.md agrees with the code on formats, sources, templates and batches."""

from pathlib import Path
from typing import Any

import pytest

from lit_rlhf.data import DataSource, RecordKind, Row, load_records, read_file
from lit_rlhf.data.formats import FORMATS, detect_format
from tests.support.config_parsing import cli_parser
from tests.support.docs_blocks import ROOT, blocks

PAGE = ROOT / "docs" / "data.md"
EXAMPLES = {block.title: block.text for block in blocks(PAGE) if block.language == "json"}
PREFERENCES = {"hh", "pairs", "conversations", "comparison", "labels"}
DIALOGUES = {"messages", "turns", "instruction", "instances", "question", "multiple_choice"}
ANSWERED = PREFERENCES | DIALOGUES


def kinds(format: str) -> list[RecordKind]:
    """Kinds of records that a file of a format can hold."""
    if format == "text":
        return ["text", "ptx"]
    answered: list[RecordKind] = ["demonstration", "ptx"] if format in ANSWERED else []
    return ["prompt", *answered, *(["preference"] if format in PREFERENCES else [])]


@pytest.mark.parametrize("format", FORMATS)
def test_example_of_a_format_is_detected_and_loads(format: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(EXAMPLES[format], "utf-8")
    (row,) = read_file(str(file))
    assert isinstance(row, Row)
    for kind in kinds(format):
        assert detect_format(row, kind) == format
        records = load_records(kind, [DataSource(str(file))])
        assert len(records) == (2 if format == "instances" else 1)


def test_yaml_blocks_go_on_top_of_a_configuration(workspace: Path) -> None:
    files = ("configs/sft/hh_cpu.yaml", "sources.yaml", "dynamic.yaml")
    flags = [part for file in files for part in ("--config", file)]
    data = cli_parser().parse_args(["fit", *flags]).fit.data.init_args
    assert [source.weight for source in data.train_sources] == [1.0, 2.5, 1.0]
    assert data.max_samples == 64


def test_report_of_bad_rows_is_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = (b for b in blocks(PAGE) if "bad.jsonl" in b.text)
    exec(compile(block.text, "data.md", "exec"), {})
    comments = [line.partition("# ")[2] for line in block.text.splitlines() if "  # " in line]
    assert capsys.readouterr().out.splitlines() == comments
