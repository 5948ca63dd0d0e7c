"""Output of the commands: files written whole, tables and text on the terminal, a progress bar."""

from __future__ import annotations

import json
import os
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

NAME, REMARK = "bold cyan", "dim"


def write_text(path: str | Path, text: str) -> Path:
    """Write `text` as UTF-8 beside `path` and rename it; missing folders are made.

    Returns:
        The path.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8", newline="\n")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def write_json_lines(path: str | Path, records: Iterable[Mapping[str, Any]]) -> Path:
    """Write one JSON object per line. Halves of surrogate pairs, which UTF-8 lacks, are escaped.

    Returns:
        The path.
    """
    return write_text(path, json_lines(records))


def json_lines(records: Iterable[Mapping[str, Any]]) -> str:
    """The text of a JSON lines file."""
    # UTF-8 has no bytes for half a surrogate pair
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    return text.encode(errors="backslashreplace").decode()


_ANY_WIDTH = 100_000  # characters; a console measures a table up to its own width


def print_table(table: Table) -> None:
    """Print a table on standard output; in a file it is as wide as it needs to be."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=Console(width=_ANY_WIDTH).measure(table).maximum)
    console.print(table)


def print_text(console: Console, text: str, style: str = "", end: str = "\n") -> None:
    """Print text as it is: no markup, no folding, and no control characters of a model's making."""
    console.print(Text(remove_control_characters(text), style), end=end, soft_wrap=True)


def remove_control_characters(text: str) -> str:
    """`text` without control characters, which could move the cursor or recolour the terminal."""
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char) != "Cc")


@contextmanager
def progress_bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show how far a piece of work is, on standard error: standard output keeps the results.

    In a terminal the line is redrawn in place; in a log file its last state is one line.

    Args:
        label: What is running.
        total: How much there is to do.

    Yields:
        A function that is told how much more has been done.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=22),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("elapsed,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(label, total=total)
        yield lambda done: progress.update(task, advance=done)
