"""A progress line with the time left, for work that no Lightning trainer runs."""

from __future__ import annotations

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


@contextmanager
def progress_line(label: str, total: int) -> Iterator[Callable[[int], None]]:
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
