"""Output streams of a command, which go on without their terminal and on a full disk."""

from __future__ import annotations

import errno
import os
import sys
from io import TextIOWrapper
from typing import Any, TextIO


class _LastingStream:
    """An output stream that becomes `/dev/null` once writing to it fails."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost: OSError | None = None  # why, unless nobody reads it
        self.is_dropped = False

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
        self.is_dropped = True
        if error.errno not in (errno.EPIPE, errno.EIO):
            self.lost = error
        # for other writers of the descriptor too, and for the buffer that is flushed at the end
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)


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


def check_output(status: int = 1, prog: str = "lit_rlhf") -> None:
    """Write what is buffered, and end with an error if some of the output could not be written.

    Args:
        status: Exit status of the error.
        prog: Name of the program, for the message.
    """
    sys.stdout.flush()
    if (lost := getattr(sys.stdout, "lost", None)) is not None:
        print(f"{prog}: the output could not be written: {lost}", file=sys.stderr)
        raise SystemExit(status) from lost


def _lasting(stream: TextIO | None) -> Any:  # noqa: ANN401  # a stream by its methods
    if isinstance(stream, TextIOWrapper):  # for a terminal that has no letter of a text
        stream.reconfigure(errors="backslashreplace")
    return _LastingStream(open(os.devnull, "w") if stream is None else stream)
