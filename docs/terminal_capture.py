"""Draws the end of what a command printed as a picture of a terminal.

`lit_rlhf quickstart | tee quickstart.txt`, then
`python docs/terminal_capture.py quickstart.txt quickstart.png --title "make quickstart"`.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from jsonargparse import auto_cli
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

WIDTH = 80
"""Characters of a line; longer ones are wrapped, as in a terminal."""
FONT = FontProperties(family="monospace", size=9)
CHARACTER_WIDTH, LINE_HEIGHT = 0.0753, 0.155  # inches, of this font
MARGIN = 0.15
BACKGROUND, FOREGROUND, TITLE = "#1f2430", "#d8dee9", "#8b93a5"


def draw_terminal(text: str, output: str, title: str = "", lines: int = 36) -> None:
    """Draw the last lines of a file.

    Args:
        text: File with the output of a command, as `tee` wrote it.
        output: Path of the picture, a PNG or SVG by its suffix.
        title: What is written above the lines, as the command that printed them.
        lines: How many lines are shown, from the end.
    """
    kept = Path(text).read_text("utf-8").rstrip().splitlines()[-lines:]
    shown = [
        part
        for line in kept
        for part in textwrap.wrap(line, WIDTH, drop_whitespace=False, break_on_hyphens=False)
        or [""]
    ]
    rows = [*([f"$ {title}", ""] if title else []), *shown]
    width = WIDTH * CHARACTER_WIDTH + 2 * MARGIN
    height = len(rows) * LINE_HEIGHT + 2 * MARGIN
    figure = Figure(figsize=(width, height), dpi=160, facecolor=BACKGROUND)
    for number, row in enumerate(rows):
        figure.text(
            MARGIN / width,
            1 - (MARGIN + (number + 0.8) * LINE_HEIGHT) / height,
            row,
            color=TITLE if title and number == 0 else FOREGROUND,
            fontproperties=FONT,
            parse_math=False,
        )
    figure.savefig(output, facecolor=BACKGROUND)


if __name__ == "__main__":
    auto_cli(draw_terminal)
