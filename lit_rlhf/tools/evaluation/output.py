"""Output of the tools: tables and text in the terminal, a progress bar, reports as JSON.

Results go to standard output; progress goes to standard error.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

from rich import box
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

from lit_rlhf.functional import Interval
from lit_rlhf.terminal import printable, printable_line

NAME_STYLE = "bold cyan"
NOTE_STYLE = "dim"
_UNBOUNDED_WIDTH = 100_000  # characters


class PrintableConsole(Console):
    """A console that shows the control characters of texts, such as names in tables."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Render a text, see the base class.

        Args:
            text: The text.
            **options: Further arguments of rich.
        """
        return super().render_str(printable(text), **options)


def make_table(
    title: str,
    headings: Sequence[str],
    *,
    n_names: int = 1,
    no_wrap: bool = False,
    caption: str | None = None,
) -> Table:
    """Build a table without rows.

    Args:
        title: Text above the table.
        headings: Headings of the columns.
        n_names: Number of columns with names, from the left. The others hold numbers.
        no_wrap: Whether a narrow terminal folds the names before the numbers.
        caption: Text below the table.
    """
    table = Table(box=box.HORIZONTALS, padding=(0, 1), title=title, caption=caption)
    for place, heading in enumerate(headings):
        is_name = place < n_names
        table.add_column(
            heading,
            justify="left" if is_name else "right",
            overflow="fold",
            no_wrap=no_wrap and not is_name,
        )
    return table


def print_table(table: Table) -> None:
    """Print a table on standard output; outside of a terminal no column is folded.

    Names are printed literally, even where rich would read markup.
    """
    console = PrintableConsole(markup=False, emoji=False)
    if not console.is_terminal:
        # rich assumes 80 columns for a file or a pipe, and measures up to the console's own width
        console.width = _UNBOUNDED_WIDTH
        console.width = console.measure(table).maximum
    console.print(table)


def print_text(console: Console, text: str, *, style: str = "", end: str = "\n") -> None:
    """Print text, such as a model's response, without markup and wrapping; see `printable`.

    Args:
        console: Where to print.
        text: What to print.
        style: Style of rich, such as `NAME_STYLE`.
        end: What to print after the text.
    """
    console.print(Text(printable(text), style), end=end, soft_wrap=True)


@contextmanager
def progress_bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error; a log file gets its final state as one line.

    Args:
        label: Name of the bar.
        total: Number of steps at which the bar is full.

    Yields:
        A function that takes the number of steps just completed.
    """
    console = Console(stderr=True)  # in a notebook rich would leave an empty output
    progress = Progress(console=console, disable=console.is_jupyter)
    progress.columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=22),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("elapsed,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with progress:
        task = progress.add_task(printable_line(label), total=total)
        yield lambda done: progress.update(task, advance=done)


def to_json_types(value: Any) -> Any:  # noqa: ANN401  # a report or any part of one
    """Convert dataclasses and named tuples to dictionaries, and inf and nan to `None`.

    An `Interval` becomes the list of its ends.
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    elif hasattr(value, "_asdict") and not isinstance(value, Interval):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {key: to_json_types(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_types(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
