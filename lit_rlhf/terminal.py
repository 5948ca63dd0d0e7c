"""The terminal: the width of help, and runs that survive a closed terminal or a full disk."""

import errno
import os
import re
import shutil
import sys
import textwrap
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from lit_callbacks.words import hide_passwords as hide_passwords
from lit_callbacks.words import printable as printable
from lit_callbacks.words import printable_line as printable_line

MAX_SHOWN = 200
"""Characters of a prompt, response or answer that a message shows."""

_LONGEST_LINE = 4000  # characters


class _LastingStream:
    """An output stream that becomes `/dev/null` once writing to it fails."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost: OSError | None = None  # why, unless nobody reads it

    def write(self, text: str) -> int:
        """Write a text, or drop it."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        """Write what is buffered, or drop it."""
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # whatever the stream has
        return getattr(self._stream, name)

    def _drop(self, error: OSError) -> None:
        if error.errno not in (errno.EPIPE, errno.EIO):
            self.lost = error
        # for other writers of the descriptor too, and for the buffer that is flushed at the end
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)


def one_line(text: str) -> str:
    """Make one printable line of a message, which may quote text of other people's or passwords."""
    line = hide_passwords(" ".join(printable(text).split()))
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} ..."


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


def outlive_terminal() -> None:
    """Keep output that cannot be written from ending the process."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: a file of the run would get its number, and the output of others
            os.open(os.devnull, os.O_RDWR)
    if sys.stdin is None:  # as Python has found it closed
        sys.stdin = open(os.devnull)  # noqa: SIM115  # for as long as the process
    sys.stdout = _lasting(sys.stdout)
    sys.stderr = _lasting(sys.stderr)


def check_output(status: int = 1) -> None:
    """Write what is buffered, and end with an error if some of the output could not be written.

    Args:
        status: Exit status of the error.
    """
    sys.stdout.flush()
    if (lost := getattr(sys.stdout, "lost", None)) is not None:
        print(f"lit_rlhf: the output could not be written: {lost}", file=sys.stderr)
        raise SystemExit(status) from lost


def _lasting(stream: TextIO | None) -> Any:  # noqa: ANN401  # a stream by its methods
    if isinstance(stream, TextIOWrapper):  # for a terminal that has no letter of a text
        stream.reconfigure(errors="backslashreplace")
    return _LastingStream(open(os.devnull, "w") if stream is None else stream)


def help_text(part: str) -> str:
    """A part of the file of help texts: of the program, a stage, `fit` alone, or a command."""
    text = Path(__file__).with_name("help.txt").read_text("utf-8")
    return text.partition(f"=== {part}\n")[2].partition("\n=== ")[0]
