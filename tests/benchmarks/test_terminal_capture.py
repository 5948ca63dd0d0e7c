"""The picture of a terminal."""

from __future__ import annotations

from pathlib import Path

from benchmarks.terminal_capture import draw_terminal


def test_the_last_lines_are_shown_and_nothing_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "output.txt").write_text("first\nsecond [0.1, 0.2]\n  third <b>\n", "utf-8")
    draw_terminal(str(tmp_path / "output.txt"), str(tmp_path / "a.svg"), "a title", lines=2)
    svg = (tmp_path / "a.svg").read_text("utf-8").replace("&#160;", " ")
    assert "first" not in svg
    assert "second [0.1, 0.2]" in svg
    assert "third &lt;b&gt;" in svg
    assert "a title" in svg
    assert "url(http" not in svg
