"""Writing files so that they stay whole, and reading lines of JSON.

Outputs are paths on this machine, without what only a shell replaces.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from secrets import token_hex
from typing import IO, Any, NamedTuple, TypeVar

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_OF_SHELL = re.compile(r"^~[^/]*|\$[A-Za-z_]\w*|\$\{[^}]*\}")
"""What a shell replaces in a word that is not quoted: a home folder, and variables."""

Json = TypeVar("Json", dict[str, Any], list[Any])

LARGEST_TEXT = 100_000_000
"""Most bytes of a text that is read as a whole, such as a template or a model's tokenizer.json."""


def check_output_path(name: str, path: str) -> str:
    """Refuse what is no path of this machine, and return the path.

    Args:
        name: Option that names it.
        path: Path of a file or folder to write.
    """
    if _SCHEME.match(path):
        raise ValueError(f"{name}: expected a path on this machine, got the address {path}")
    if part := _OF_SHELL.search(path):
        replaced = os.path.expandvars(os.path.expanduser(path))
        advice = f"; write {replaced}" if replaced != path else ""
        raise ValueError(
            f"{name}: expected a path without {part[0]}, which only a shell replaces, got "
            f"{path}{advice}"
        )
    if not path.strip() or "\0" in path or path == "-":
        raise ValueError(f"{name}: expected a path, got {path!r}")
    return path


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


@contextmanager
def replace_file(path: str | Path) -> Iterator[IO[bytes]]:
    """A binary file that takes the name `path` when the context ends without an error.

    Readers see the old file or the new one, after a power cut too. After an error the old file is
    as it was, and the OSError names `path`. Missing folders are created. A device or pipe is
    written directly.

    The content is first written to a new, hidden file in the same folder, whose name is random: in
    a folder that several accounts share, no link to another file can lie in wait there. What an
    earlier writer left when it was killed is deleted.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir():
        raise IsADirectoryError(f"{target}: expected a file or a free name, got a folder")
    if target.exists() and not target.is_file():  # a device or a pipe, which stays one
        with name_file(target), target.open("wb") as stream:
            yield stream
        return
    for leftover in target.parent.glob(f".{escape(target.name)}.*.partial"):
        with suppress(OSError):  # the file may belong to another account
            leftover.unlink()
    partial = target.with_name(f".{target.name}.{token_hex(4)}.partial")
    try:
        with name_file(target), partial.open("xb") as file:  # "x" never opens what is there
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except OSError as error:
        if error.filename == str(partial):
            raise OSError(error.errno, error.strerror, str(target)) from error
        raise
    finally:
        with suppress(OSError):  # it has its name
            partial.unlink()
    if os.name == "posix":
        fsync(target.parent)  # a rename survives a power cut once its folder is on disk


def write_text(path: str | Path, text: str) -> Path:
    """Write a text as UTF-8, see `replace_file`, and return its path."""
    content = text.encode()  # before anything is written
    with replace_file(path) as file:
        file.write(content)
    return Path(path)


def check_file(path: str | Path, largest: int) -> None:
    """Refuse what is no file, which may never end, and what is too large to be read as a whole.

    A path that does not exist is left to whoever opens it.

    Args:
        path: The file.
        largest: Largest size in bytes.
    """
    file = Path(path)
    if not file.exists():
        return
    if not file.is_file():
        raise ValueError(f"{path}: expected a file, got a folder, pipe or device")
    if (size := file.stat().st_size) > largest:
        raise ValueError(f"{path}: expected at most {largest:,} bytes, got {size:,}")


def read_text(path: str | Path) -> str:
    """Read a text in UTF-8; the error for another encoding is a ValueError that names the file.

    See `check_file` for what else is refused.
    """
    check_file(path, LARGEST_TEXT)
    try:
        return Path(path).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: expected text in UTF-8, got another encoding: {error}"
        ) from error


def begins_like(content: bytes, beginning: bytes) -> bool:
    """Whether some content, which may be cut off, begins as it should.

    Args:
        content: The content.
        beginning: What the whole content begins with.
    """
    return content[: len(beginning)] == beginning[: len(content)]


@contextmanager
def append_to(path: str | Path) -> Iterator[IO[bytes]]:
    """The end of a binary file, which is created if it is missing, with its folders.

    A link is refused: in a folder that several accounts share it may lead to any file.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with name_file(path):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        descriptor = os.open(path, flags, 0o666)
        with open(descriptor, "ab") as file:
            yield file


def fsync(path: Path) -> None:
    """Force the content of a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some network and FUSE file systems cannot do it for folders
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def json_lines(records: Iterable[Mapping[str, Any]]) -> str:
    """Format objects as JSON lines.

    Text outside ASCII stays readable. Halves of surrogate pairs, which a model's response may
    contain and UTF-8 cannot encode, become JSON escapes.
    """
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    # Python's escape of a lone surrogate, \ud800, is JSON's escape of it too
    return text.encode(errors="backslashreplace").decode()


class Line(NamedTuple):
    """A line of a file.

    Attributes:
        number: Its number, from 1.
        text: Its text, without the line feed.
        is_complete: Whether it ends with a line feed. The last line of a file that is being written
            does not.
    """

    number: int
    text: str
    is_complete: bool


def split_lines(text: str) -> Iterator[Line]:
    r"""Split a text at line feeds, and at nothing else.

    `str.splitlines` would also split at characters that JSON has inside its strings, such as U+2028
    and U+0085. Blank lines are skipped.
    """
    *lines, last_line = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield Line(number=number, text=line, is_complete=True)
    if last_line.strip():
        yield Line(number=len(lines) + 1, text=last_line, is_complete=False)


class RepeatedKeyError(ValueError):
    """A JSON object that gives a key twice, of which Python's parser takes the last.

    Attributes:
        key: The key.

    Args:
        key: The key.
    """

    def __init__(self, key: str) -> None:
        super().__init__(f"{key!r} twice")
        self.key = key


def parse_json(text: str | bytes) -> Any:  # noqa: ANN401  # JSON types
    """Parse JSON; whatever Python cannot read, nesting beyond its stack too, is a ValueError.

    Raises:
        RepeatedKeyError: If an object gives a key twice.
    """
    try:
        if isinstance(text, bytes):  # finds the encoding
            return json.loads(text, object_pairs_hook=_make_object)
        return _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_json(path: str | Path, kind: type[Json]) -> Json:
    """Read a file that holds a JSON object or array; the error for another names the file.

    Args:
        path: The file.
        kind: `dict` or `list`.
    """
    text = read_text(path)
    try:
        content = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON: {error}") from error
    if not isinstance(content, kind):
        expected = "an object" if kind is dict else "an array"
        raise ValueError(f"{path}: expected {expected} of JSON, got {type(content).__name__}")
    return content


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    repeated = find_repeated(key for key, _ in pairs) if len(content) < len(pairs) else None
    if repeated is not None:
        raise RepeatedKeyError(repeated)
    return content


# `json.loads` would build a decoder for each line, which takes as long as reading the line
_DECODER = json.JSONDecoder(object_pairs_hook=_make_object)


def find_repeated(names: Iterable[str]) -> str | None:
    """Find the first name that occurs a second time; `None` if there is none."""
    earlier: set[str] = set()
    for name in names:
        if name in earlier:
            return name
        earlier.add(name)
    return None
