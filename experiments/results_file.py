"""Results: a file with a JSON line for each run, and Markdown tables."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lit_rlhf.files import write_text


def read_runs(path: Path) -> dict[str, dict[str, Any]]:
    """Read the result of each run by its name; empty if there is no file."""
    if not path.is_file():
        return {}
    results = (json.loads(line) for line in path.read_bytes().splitlines())
    return {result.pop("run"): result for result in results}


def read_run(path: Path, name: str) -> dict[str, Any] | None:
    """Read the result of one run; None if it has none."""
    start = f'{{"run": {json.dumps(name)}, '.encode()
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        if line.startswith(start):  # the others are not parsed
            result: dict[str, Any] = json.loads(line)
            del result["run"]
            return result
    return None


def read_lines(path: Path | str) -> list[dict[str, Any]]:
    """Read a file of JSON lines."""
    return [json.loads(line) for line in Path(path).read_bytes().splitlines()]


def write_run(path: Path, name: str, result: dict[str, Any]) -> None:
    """Add the result of a run, or replace an earlier one.

    The file is always complete, and several processes may write to it.

    Args:
        path: File of the results.
        name: Name of the run.
        result: Its result, of JSON types.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # lock the folder: the file itself is replaced
        runs = sorted((read_runs(path) | {name: result}).items())
        lines = (json.dumps({"run": run, **content}) + "\n" for run, content in runs)
        write_text(path, "".join(lines))
    finally:
        os.close(folder)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format a Markdown table; a bar within a cell is escaped.

    Args:
        head: Titles of the columns.
        rows: Cells of each row.
    """
    lines = [head, ["---"] * len(head), *rows]
    cells = ([str(cell).replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)
