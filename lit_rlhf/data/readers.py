"""Rows of local files and hub datasets, each with the line it stands in.

Everything is a dataset of ``datasets``: hub datasets and parquet files by its loaders. Its JSON
loader infers one schema for a whole file and, like its text loader, tells neither the line of a
broken record nor that of a wrong byte, so JSON and text files become datasets of raw lines, which
are decoded and parsed here one by one.
"""

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import datasets
from datasets.iterable_dataset import ExamplesIterable

from lit_rlhf.data.records import RecordError

_LINE_SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
_JSON_SUFFIXES = (*_LINE_SUFFIXES, ".json", ".json.gz")
_TEXT_SUFFIXES = (".txt", ".txt.gz")
_PARQUET_SUFFIXES = (".parquet",)
FILE_SUFFIXES = (*_JSON_SUFFIXES, *_TEXT_SUFFIXES, *_PARQUET_SUFFIXES)


class RawRow(NamedTuple):
    """One row as read.

    Attributes:
        line: Line of the file or row of the dataset, counted from 1.
        value: The row, or why there is none.
    """

    line: int
    value: Mapping[str, Any] | RecordError


def is_file_path(path: str) -> bool:
    """Whether a path names a data file by its suffix, rather than a dataset.

    Args:
        path: The path of a data source.

    Returns:
        True for the suffixes in :data:`FILE_SUFFIXES`.
    """
    return path.lower().endswith(FILE_SUFFIXES)


def file_rows(path: str) -> Iterator[RawRow]:
    """Read a local file.

    Args:
        path: A file with one of the suffixes of :data:`FILE_SUFFIXES`.

    Yields:
        The rows. Blank lines are left out but counted; a ``.txt`` file is one row with the whole
        text.

    Raises:
        RecordError: If the file is missing, empty or cannot be read as a whole. Bad rows are not
            raised but yielded.
    """
    if not Path(path).is_file():
        raise RecordError(path, 0, "no such file")
    if Path(path).stat().st_size == 0:
        raise RecordError(path, 0, "empty file")
    lower = path.lower()
    try:
        if lower.endswith(_PARQUET_SUFFIXES):
            rows = datasets.load_dataset(
                "parquet", data_files=[path], split="train", streaming=True
            )
            yield from (RawRow(number, row) for number, row in enumerate(rows, start=1))
        elif lower.endswith(_TEXT_SUFFIXES):
            yield RawRow(1, {"text": _whole_text(path)})
        else:
            yield from _json_rows(path)
    except RecordError:
        raise
    except Exception as error:  # whatever the decompressor or pyarrow raises on a damaged file
        detail = f"{type(error).__name__}: {error}"
        raise RecordError(path, 0, "cannot be read", detail=detail) from error


def hub_rows(path: str, split: str, subset: str | None, data_dir: str | None) -> Iterator[RawRow]:
    """Read a dataset of the Hugging Face hub, or a local folder that ``datasets`` understands.

    Args:
        path: The hub id or the folder.
        split: The split, slices allowed (``"train[:10%]"``).
        subset: Name of the configuration.
        data_dir: Folder within the dataset.

    Yields:
        The rows.

    Raises:
        RecordError: If the dataset cannot be loaded.
    """
    try:
        rows = datasets.load_dataset(path, name=subset, data_dir=data_dir, split=split)
    except Exception as error:  # hub, network and builder errors have no common class
        detail = f"{type(error).__name__}: {error}"
        reason = "neither a known kind of file nor a dataset that can be loaded"
        raise RecordError(path, 0, reason, detail=detail) from error
    yield from (RawRow(number, row) for number, row in enumerate(rows, start=1))


def _raw_lines(path: str) -> Iterator[tuple[int, dict[str, bytes]]]:
    is_compressed = path.lower().endswith(".gz")
    with gzip.open(path, "rb") if is_compressed else open(path, "rb") as file:
        for number, line in enumerate(file):
            yield number, {"line": line}


def _lines(path: str) -> Iterator[bytes]:
    # from_generator would do too, but it takes a lock in the user's cache for every file read.
    rows = datasets.IterableDataset(ExamplesIterable(_raw_lines, {"path": path}))
    return (row["line"] for row in rows)


def _decoded(line: bytes, path: str, number: int) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise RecordError(path, number, "not UTF-8", detail=str(error)) from error


def _whole_text(path: str) -> str:
    return "".join(_decoded(line, path, number) for number, line in enumerate(_lines(path), 1))


def _json_rows(path: str) -> Iterator[RawRow]:
    for number, line in enumerate(_lines(path), start=1):
        row: Mapping[str, Any] | RecordError
        try:
            text = _decoded(line, path, number).strip()
            if not text:
                continue
            is_array = text.startswith("[") and not path.lower().endswith(_LINE_SUFFIXES)
            row = {} if is_array else _json_line(text, path, number)
        except RecordError as error:
            is_array, row = False, error
        if is_array:  # its errors are not caught: what is behind them cannot be read
            yield from _array_rows(path)
            return
        yield RawRow(number, row)


def _json_line(text: str, path: str, line: int) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        detail = f"{error.msg} at column {error.colno}"
        raise RecordError(path, line, "broken JSON", detail=detail) from error
    if not isinstance(value, dict):
        raise RecordError(path, line, "not a JSON object", detail=f"a {type(value).__name__}")
    return value


def _array_rows(path: str) -> Iterator[RawRow]:
    text = _whole_text(path)
    decoder = json.JSONDecoder()
    position = _past_blanks(text, text.index("[") + 1)
    while text[position : position + 1] != "]":
        line = text.count("\n", 0, position) + 1
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise _BrokenArrayError(path, error.lineno, error.msg) from error
        if isinstance(value, dict):
            yield RawRow(line, value)
        else:
            detail = f"a {type(value).__name__}"
            yield RawRow(line, RecordError(path, line, "not a JSON object", detail=detail))
        position = _past_blanks(text, position)
        if text[position : position + 1] == ",":
            position = _past_blanks(text, position + 1)
        elif text[position : position + 1] != "]":
            line = text.count("\n", 0, position) + 1
            raise _BrokenArrayError(path, line, "expected ',' or ']'")


class _BrokenArrayError(RecordError):
    """Where the next record of the array starts cannot be told, so this ends the file."""

    def __init__(self, path: str, line: int, detail: str) -> None:
        super().__init__(path, line, "broken JSON array", detail=detail)


def _past_blanks(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position
