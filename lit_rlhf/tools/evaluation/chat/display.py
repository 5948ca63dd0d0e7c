"""Show the replies of a chat in the terminal: one after the other, or side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lit_rlhf.tools.evaluation.output import (
    NAME_STYLE,
    NOTE_STYLE,
    print_text,
    remove_control_characters,
)

ShowText: TypeAlias = Callable[[str], None]
"""Takes the next piece of a reply."""
Replier: TypeAlias = Callable[[ShowText], str]
"""Samples a reply and shows it as it grows; returns a note on it, which may be empty."""

_MIN_COLUMN = 24  # characters; narrower columns are hard to read
_CTRL_C = len("^C")  # the terminal echoes it behind the table; a line break would spoil the redraw
_FRAME_LINES = 5  # lines of the table that are not text, and the line of the cursor


def show_replies(console: Console, repliers: Mapping[str, Replier]) -> None:
    """Let models reply one after the other, and show the replies as they grow.

    Several models stand side by side in a terminal that is wide enough. Elsewhere, and for a single
    model, the replies are printed as plain text.

    Args:
        console: Where to print.
        repliers: The models by name.
    """
    redraws = console.is_terminal and not console.is_dumb_terminal
    if len(repliers) > 1 and redraws and console.width // len(repliers) >= _MIN_COLUMN:
        _show_side_by_side(console, repliers)
    else:
        _show_in_turn(console, repliers)


def _show_in_turn(console: Console, repliers: Mapping[str, Replier]) -> None:
    for name, replier in repliers.items():
        print_text(console, f"{name}: ", NAME_STYLE, end="")
        note = replier(lambda text: print_text(console, text, end=""))
        print_text(console, "")
        if note:
            print_text(console, f"({note})", NOTE_STYLE)


def _show_side_by_side(console: Console, repliers: Mapping[str, Replier]) -> None:
    texts, notes = [""] * len(repliers), [""] * len(repliers)
    with Live(console=console, auto_refresh=False) as live:
        for column, replier in enumerate(repliers.values()):

            def show(text: str, column: int = column) -> None:
                texts[column] += remove_control_characters(text)
                # A table higher than the screen cannot be redrawn in place: only the last lines are
                # shown while it grows.
                visible = console.height - _FRAME_LINES
                live.update(_columns(console, list(repliers), texts, notes, visible), refresh=True)

            show("")
            notes[column] = replier(show)
        live.update(_columns(console, list(repliers), texts, notes))  # complete, drawn on exit


def _columns(
    console: Console,
    names: Sequence[str],
    texts: Sequence[str],
    notes: Sequence[str],
    last_lines: int | None = None,
) -> Table:
    """Build a table with a column per model; `last_lines` keeps only the end of each reply."""
    table = Table(box=box.ROUNDED, width=console.width - _CTRL_C)
    for name in names:
        table.add_column(Text(name, NAME_STYLE), ratio=1)
    # each column has a border and two blanks, and the table one border more
    width = (console.width - _CTRL_C - 1) // len(names) - 3
    cells = []
    for text, note in zip(texts, notes, strict=True):
        lines = Text(text.rstrip()).wrap(console, width)
        if note:
            lines.extend(Text(f"({note})", NOTE_STYLE).wrap(console, width))
        cells.append(Text("\n").join(lines if last_lines is None else lines[-last_lines:]))
    table.add_row(*cells)
    return table
