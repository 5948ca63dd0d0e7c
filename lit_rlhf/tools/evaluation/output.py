"""Output of the command-line tools: tables and text in the terminal, a progress bar.

Results go to standard output; progress goes to standard error.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
_UNBOUNDED_WIDTH = 100_000  # characters


def print_table(table: Table, narrow: Table | None = None) -> None:
    """Print a table on standard output; outside of a terminal no column is folded.

    Names, for instance of folders, are printed as they are, also where rich would read markup.

    Args:
        table: The table.
        narrow: The same table in fewer columns of the terminal, for one in which `table` would be
            folded.
    """
    console = Console(markup=False, emoji=False)
    # measured without bounds, as rich measures a table up to the console's own width
    width = Console(width=_UNBOUNDED_WIDTH, markup=False, emoji=False).measure(table).maximum
    if not console.is_terminal:
        # rich assumes 80 columns for a file or a pipe and would break names and numbers
        console = Console(width=width, markup=False, emoji=False)
    console.print(narrow if narrow is not None and width > console.width else table)


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
        TextColumn("{task.description}", markup=False),
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
