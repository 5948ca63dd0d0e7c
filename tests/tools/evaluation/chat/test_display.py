from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from lit_rlhf.tools.evaluation.chat.display import Replier, ShowText, show_replies

_ESCAPES = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")


def terminal(width: int, height: int = 24) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        height=height,
        _environ={"TERM": "xterm"},
    )


def frames(console: Console) -> list[str]:
    """What stood on the screen each time that it was drawn."""
    assert isinstance(console.file, io.StringIO)
    return _ESCAPES.sub("", re.sub(r"\r(\x1b\[2K|\x1b\[1A)+", "\f", console.file.getvalue())).split(
        "\f"
    )


def saying(*pieces: str, note: str = "") -> Replier:
    def reply(show: ShowText) -> str:
        for piece in pieces:
            show(piece)
        return note

    return reply


def test_without_a_terminal_it_is_plain_text() -> None:
    console = Console(file=io.StringIO(), width=20)
    long = "as long as it is, " * 5 + "ever"  # rich 13 strips a space at the end

    show_replies(console, {"sft": saying("one ", "two", note="stopped"), "ppo": saying(long)})

    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == f"sft: one two\n(stopped)\nppo: {long}\n"


def test_several_models_stand_side_by_side() -> None:
    console = terminal(80)

    show_replies(console, {"sft": saying("one ", "two"), "ppo": saying("three", note="stopped")})

    drawn = frames(console)
    assert re.search(r"│ sft +│ ppo +│", drawn[0])
    assert any("one " in frame and "two" not in frame for frame in drawn)  # while it grows
    assert any("one two" in frame and "three" not in frame for frame in drawn)
    assert re.search(r"│ one two +│ three +│", drawn[-1])
    assert re.search(r"│ +│ \(stopped\) +│", drawn[-1])
    assert max(map(len, drawn[-1].splitlines())) == 78  # Ctrl-C's echo fits behind the table


@pytest.mark.parametrize(
    ("width", "models", "columns"), [(80, 3, True), (80, 4, False), (80, 1, False)]
)
def test_columns_need_width(width: int, models: int, columns: bool) -> None:
    console = terminal(width)

    show_replies(console, {f"m{number}": saying("hello") for number in range(models)})

    assert ("│" in frames(console)[-1]) == columns


def test_a_terminal_that_cannot_redraw_gets_plain_text() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, _environ={"TERM": "dumb"})

    show_replies(console, {"sft": saying("a"), "ppo": saying("b")})

    assert "│" not in frames(console)[-1]


def test_of_a_long_response_the_end_is_seen_while_it_grows_and_all_of_it_afterwards() -> None:
    console = terminal(80, height=12)
    lines = [f"line {number:02}" for number in range(30)]

    show_replies(console, {"sft": saying(*(f"{line}\n" for line in lines)), "ppo": saying("end")})

    *growing, last = frames(console)
    assert all(len(frame.splitlines()) < 12 for frame in growing)
    assert any("line 29" in frame and "line 00" not in frame for frame in growing)
    assert re.findall(r"line \d\d", last) == lines
