"""Puts the tables of the result files into `docs/speed.md`.

    python -m benchmarks.speed.page

A table stands between `<!-- results: NAME -->` and `<!-- end -->`, with NAME that of the JSON file.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.speed.tables import comparison_tables, scaling_tables

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "speed.md"
RESULTS = ROOT / "benchmarks" / "results"
PLACE = re.compile(r"<!-- results: (?P<name>\w+) -->\n.*?<!-- end -->", re.DOTALL)


def tables_of(result: dict[str, Any]) -> str:
    """The tables of any script's results."""
    return scaling_tables(result) if "sweeps" in result else comparison_tables(result)


def filled(page: str, results: Path) -> str:
    """The page with every table as its results say; results may be missing.

    Args:
        page: Markdown.
        results: Folder of the JSON files.
    """

    def place(found: re.Match[str]) -> str:
        file = results / f"{found['name']}.json"
        text = f"Not measured yet: `python -m benchmarks.{found['name']}` does.\n"
        if file.is_file():
            text = tables_of(json.loads(file.read_text("utf-8")))
        return f"<!-- results: {found['name']} -->\n\n{text}\n<!-- end -->"

    return PLACE.sub(place, page)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text("utf-8"), RESULTS), "utf-8")
