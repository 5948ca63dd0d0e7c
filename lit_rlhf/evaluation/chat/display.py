"""How a chat looks in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lit_rlhf.evaluation.output import NAME, REMARK, print_text, remove_control_characters

Show: TypeAlias = Callable[[str], None]
"""Takes the next piece of a response."""


Ask: TypeAlias = Callable[[Show], str]
"""Has a model answer, showing the response as it grows; returns a remark on it, mostly empty."""


_MIN_COLUMN = 24  # characters


_CTRL_C = len("^C")  # terminals echo it behind the table; on a new line it would break the redraw


_FRAME = 5  # lines of the table around the responses, and the one that the cursor is in


def show_replies(console: Console, asks: Mapping[str, Ask]) -> None:
    """Have models answer one after the other.

    In a terminal that is wide enough, several stand side by side; elsewhere and for one model,
    plain text grows line by line.

    Args:
        console: Where to.
        asks: By the models' names.
    """
    redraws = console.is_terminal and not console.is_dumb_terminal
    if len(asks) > 1 and redraws and console.width // len(asks) >= _MIN_COLUMN:
        _side_by_side(console, asks)
    else:
        _in_turn(console, asks)


def _in_turn(console: Console, asks: Mapping[str, Ask]) -> None:
    for name, ask in asks.items():
        print_text(console, f"{name}: ", NAME, end="")
        remark = ask(lambda text: print_text(console, text, end=""))
        print_text(console, "")
        if remark:
            print_text(console, f"({remark})", REMARK)


def _side_by_side(console: Console, asks: Mapping[str, Ask]) -> None:
    texts, remarks = [""] * len(asks), [""] * len(asks)
    with Live(console=console, auto_refresh=False) as live:
        for column, ask in enumerate(asks.values()):

            def show(text: str, column: int = column) -> None:
                texts[column] += remove_control_characters(text)
                last = console.height - _FRAME
                live.update(_columns(console, list(asks), texts, remarks, last), refresh=True)

            show("")
            remarks[column] = ask(show)
        live.update(_columns(console, list(asks), texts, remarks))  # drawn whole when `live` ends


def _columns(
    console: Console,
    names: Sequence[str],
    texts: Sequence[str],
    remarks: Sequence[str],
    last: int | None = None,
) -> Table:
    """A column for each model; of long responses only the `last` lines, so that growth is seen."""
    table = Table(box=box.ROUNDED, width=console.width - _CTRL_C)
    for name in names:
        table.add_column(Text(name, NAME), ratio=1)
    # a border and two blanks for each column
    width = (console.width - _CTRL_C - 1) // len(names) - 3
    cells = []
    for text, remark in zip(texts, remarks, strict=True):
        lines = Text(text.rstrip()).wrap(console, width)
        if remark:
            lines.extend(Text(f"({remark})", REMARK).wrap(console, width))
        cells.append(Text("\n").join(lines if last is None else lines[-last:]))
    table.add_row(*cells)
    return table
