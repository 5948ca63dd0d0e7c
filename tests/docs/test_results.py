"""Pages that quote results of a benchmark agree with the numbers in its JSON file."""

from __future__ import annotations

import json
from typing import Any

from benchmarks import collapse, five_seeds
from tests.docs.blocks import ROOT


def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


def missing(text: str, page: str) -> list[str]:
    """Parts of a benchmark's text, which empty lines separate, that are not on a page."""
    shown = (ROOT / "docs" / page).read_text("utf-8")
    return [part for part in text.strip().split("\n\n") if part not in shown]


def test_the_tables_of_the_detector_are_those_of_its_results() -> None:
    assert missing(collapse.format_tables(result("collapse")["seeds"]), "collapse.md") == []


def test_the_table_of_seeds_is_that_of_the_results() -> None:
    assert missing(five_seeds.format_table(result("five_seeds")), "five_seeds.md") == []
