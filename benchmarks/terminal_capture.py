"""Draws the end of what a command printed as an SVG, as a terminal shows it.

`lit_rlhf quickstart | tee quickstart.txt`, then
`python benchmarks/terminal_capture.py quickstart.txt quickstart.svg --title "make quickstart"`.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

from jsonargparse import auto_cli
from rich.console import Console
from rich.text import Text

WIDTH = 100
"""Characters of a line; longer ones are wrapped, as in a terminal."""


def draw_terminal(text: str, output: str, title: str = "", lines: int = 36) -> None:
    """Draw the last lines of a file.

    Args:
        text: File with the output of a command, as `tee` wrote it.
        output: Path of the SVG.
        title: Title of the window.
        lines: How many lines are shown, from the end.
    """
    shown = Path(text).read_text("utf-8").rstrip().splitlines()[-lines:]
    console = Console(record=True, width=WIDTH, file=io.StringIO(), legacy_windows=False)
    console.print(Text("\n".join(shown), overflow="fold"))
    svg = console.export_svg(title=title)
    # rich asks another host for its font; without, the reader's monospaced one is used
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    Path(output).write_text(svg, "utf-8")


if __name__ == "__main__":
    auto_cli(draw_terminal)
