"""Errors of writing files."""

import errno
import os
from pathlib import Path

import pytest

from lit_callbacks.files import name_file


def test_an_error_of_writing_is_named_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No space left on device: 'a.jsonl'"), name_file("a.jsonl"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(FileNotFoundError, match=r"missing'"), name_file("a.jsonl"):
        (tmp_path / "missing").read_text()
