"""Errors of writing files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def name_file(path: str | Path) -> Iterator[None]:
    """Name a file in the errors of writing it. The error of a full disk has no name by itself."""
    try:
        yield
    except OSError as error:
        # only errors of the operating system have a number
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
