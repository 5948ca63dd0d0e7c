"""Output of the command-line tools: result files, tables and text in the terminal, a progress bar.

Results go to standard output; progress goes to standard error.
"""

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

NAME_STYLE, NOTE_STYLE = "bold cyan", "dim"
_UNBOUNDED_WIDTH = 100_000  # characters; rich measures a table up to the console's own width


def write_text(path: str | Path, text: str) -> Path:
    """Write a text file atomically: readers see the old file or the complete new one.

    The text is written as UTF-8 to a hidden file in the same folder, which then takes the name. A
    failed write leaves the old file as it was. Missing folders are created.

    Args:
        path: The file.
        text: Its content.

    Returns:
        The path.

    Raises:
        OSError: If the file cannot be written.
        UnicodeEncodeError: If the text has half of a surrogate pair; see `json_lines`.
    """
    # One rename is enough here. Checkpoints are folders that several ranks write and that have to
    # survive a power failure: lit_rlhf.strategies does that.
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
    """Write one JSON object per line, atomically like `write_text`.

    Args:
        path: The file.
        records: The objects.

    Returns:
        The path.
    """
    return write_text(path, json_lines(records))


def json_lines(records: Iterable[Mapping[str, Any]]) -> str:
    """Format objects as JSON lines.

    Text outside ASCII stays readable. Halves of surrogate pairs, which a model's response may
    contain and UTF-8 cannot encode, become JSON escapes.
    """
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    # Python's escape of a lone surrogate, \ud800, is JSON's escape of it too
    return text.encode(errors="backslashreplace").decode()


def print_table(table: Table) -> None:
    """Print a table on standard output; outside of a terminal no column is folded."""
    console = Console()
    if not console.is_terminal:
        # rich assumes 80 columns for a file or a pipe and would break names and numbers
        console = Console(width=Console(width=_UNBOUNDED_WIDTH).measure(table).maximum)
    console.print(table)


def print_text(console: Console, text: str, style: str = "", end: str = "\n") -> None:
    """Print text literally, without markup, line breaks of rich's own, or control characters.

    Args:
        console: Where to print.
        text: For example the response of a model.
        style: A rich style.
        end: Printed after the text.
    """
    console.print(Text(remove_control_characters(text), style), end=end, soft_wrap=True)


def remove_control_characters(text: str) -> str:
    """Remove the characters by which a response could move the cursor or recolour the terminal."""
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char) != "Cc")


@contextmanager
def progress_bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar with the remaining time on standard error.

    In a terminal the bar is redrawn in place; a log file gets its final state as one line.

    Args:
        label: What is running.
        total: Number of steps.

    Yields:
        A function that is called with the number of steps just completed.
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
