"""The terminal: messages of one line, the width of help, and output that never ends a run."""

import logging
import re
import shutil
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

from lit_callbacks.streams import check_output as check_output
from lit_callbacks.streams import outlive_terminal as outlive_terminal
from lit_callbacks.words import hide_passwords as hide_passwords
from lit_callbacks.words import printable as printable
from lit_callbacks.words import printable_line as printable_line

MAX_SHOWN = 200
"""Characters of a prompt, response or answer that a message shows."""

_LONGEST_LINE = 4000  # characters


def one_line(text: str) -> str:
    """Make one printable line of a message, which may quote text of other people's or passwords."""
    line = hide_passwords(" ".join(printable(text).split()))
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} ..."


def print_line(line: str, *, flush: bool = False) -> None:
    """Print a line, of which a part may be other people's: a name of a file, column or model.

    Args:
        line: The line; control characters, tabs and line ends in it are shown.
        flush: Whether it is written at once.
    """
    print(printable_line(line), flush=flush)


def show_control_characters() -> None:
    """Show control characters in all warnings and logs of this process, as `printable` does.

    They quote records, answers and names of other people, also in the libraries.
    """

    def show(*parts: Any) -> None:
        # the parts behind the place in the code are a file and a line, which nobody gives
        sys.stderr.write(printable(warnings.formatwarning(*parts[:4])))

    warnings.showwarning = show  # type: ignore[assignment]  # called by position
    logging.setLogRecordFactory(_PrintableRecord)


class _PrintableRecord(logging.LogRecord):
    """A record of a log whose control characters are shown."""

    def getMessage(self) -> str:
        """The message."""
        return printable(super().getMessage())


def shorten(text: str) -> str:
    """Quote the beginning of `text` for a message."""
    return repr(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")


def fold(text: str) -> str:
    """Fold the lines of a help text that are wider than the terminal, under their last column."""
    width = shutil.get_terminal_size().columns
    folder = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    lines = []
    for line in text.splitlines():
        head = re.match(r" *\S.*?  +(?=\S)| *", line)
        folder.subsequent_indent = " " * (head.end() if head else 0)
        lines += folder.wrap(line) or [""]
    return "\n".join(lines)


def help_text(part: str) -> str:
    """A part of the file of help texts: of the program, a stage, `fit` alone, or a command."""
    text = Path(__file__).with_name("help.txt").read_text("utf-8")
    return text.partition(f"=== {part}\n")[2].partition("\n=== ")[0]
