"""The picture of a terminal."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

from matplotlib import rc_context

from benchmarks.terminal_capture import WIDTH, draw_terminal


def test_the_last_lines_are_shown_and_long_ones_wrapped(tmp_path: Path) -> None:
    long = "x" * WIDTH + "yz"
    (tmp_path / "output.txt").write_text(f"first\n$1 [0.1]$\n\n  third <b>\n{long}\n", "utf-8")
    with rc_context({"svg.fonttype": "none"}):  # text as text, not as paths
        draw_terminal(str(tmp_path / "output.txt"), str(tmp_path / "a.svg"), "a title", lines=4)
    svg = (tmp_path / "a.svg").read_text("utf-8")
    shown = [unescape(text) for text in re.findall(r"<text[^>]*>(.*?)</text>", svg)]
    assert [text.strip() for text in shown] == [
        *("$ a title", "$1 [0.1]$", "third <b>", "x" * WIDTH, "yz"),
    ]
