"""Readers: the rows of local files and of hub datasets, each with its location.

Hub datasets and parquet files are loaded by `datasets`. JSON and text files are read here, line by
line: the JSON loader of `datasets` infers one schema for a whole file, and neither it nor the text
loader tells the line of a broken record or of a byte that is not UTF-8.
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import datasets

from lit_rlhf.data.records import Location, RecordError, Row

_LINE_SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
_JSON_SUFFIXES = (*_LINE_SUFFIXES, ".json", ".json.gz")
_TEXT_SUFFIXES = (".txt", ".txt.gz")
_PARQUET_SUFFIXES = (".parquet",)
FILE_SUFFIXES = (*_JSON_SUFFIXES, *_TEXT_SUFFIXES, *_PARQUET_SUFFIXES)
"""The suffixes of data files. Any other path is a dataset."""


def is_file_path(path: str) -> bool:
    """Whether a path names a data file, as opposed to a dataset.

    Args:
        path: Path of a data source.

    Returns:
        True for paths with one of the `FILE_SUFFIXES`. The file need not exist.
    """
    return path.lower().endswith(FILE_SUFFIXES)


def read_file(path: str, source: str = "") -> Iterator[Row | RecordError]:
    """Read the rows of a local file.

    Args:
        path: A file with one of the `FILE_SUFFIXES`.
        source: Name of the data source.

    Yields:
        The rows in order, and in place of a row that cannot be parsed the error that says why.
        Blank lines are skipped but counted. A text file is one row with the field `text`.

    Raises:
        RecordError: If the file is missing, empty or damaged.
    """
    if not Path(path).is_file():
        raise RecordError(Location(path), "no such file")
    if Path(path).stat().st_size == 0:
        raise RecordError(Location(path), "empty file")
    lower = path.lower()
    try:
        if lower.endswith(_PARQUET_SUFFIXES):
            rows = datasets.load_dataset(
                "parquet", data_files=[path], split="train", streaming=True
            )
            yield from _number_rows(rows, path, source)
        elif lower.endswith(_TEXT_SUFFIXES):
            with _open(path) as file:
                yield Row({"text": _decode_all(file, path)}, Location(path, 1), source)
        else:
            yield from _read_json(path, source)
    except RecordError:
        raise
    except Exception as error:  # gzip, zlib and pyarrow have no common class for a damaged file
        detail = f"{type(error).__name__}: {error}"
        raise RecordError(Location(path), "cannot be read", detail=detail) from error


def read_dataset(
    path: str, split: str, subset: str | None, data_dir: str | None, source: str = ""
) -> Iterator[Row | RecordError]:
    """Read the rows of a hub dataset, or of a local folder that `datasets` loads.

    Args:
        path: Hub id or folder.
        split: The split, slices allowed (`"train[:10%]"`).
        subset: Name of the configuration.
        data_dir: Folder within the dataset.
        source: Name of the data source.

    Yields:
        The rows.

    Raises:
        RecordError: If the dataset cannot be loaded.
    """
    try:
        rows = datasets.load_dataset(path, name=subset, data_dir=data_dir, split=split)
    except Exception as error:  # hub, network and builder errors have no common class
        reason = "neither a known kind of file nor a dataset that can be loaded"
        detail = f"{type(error).__name__}: {error}"
        raise RecordError(Location(path), reason, detail=detail) from error
    yield from _number_rows(rows, path, source)


def _number_rows(rows: Iterable[Mapping[str, Any]], path: str, source: str) -> Iterator[Row]:
    for number, fields in enumerate(rows, start=1):
        yield Row(fields, Location(path, number), source)


def _open(path: str) -> BufferedIOBase:
    """Open a file as bytes: every line is decoded by itself, so that an error can name it."""
    return gzip.open(path, "rb") if path.lower().endswith(".gz") else open(path, "rb")


def _decode(line: bytes, location: Location) -> str:
    try:
        # Editors on Windows start a file with a byte order mark.
        return line.decode("utf-8-sig" if location.line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise RecordError(location, "not UTF-8", detail=str(error)) from error


def _decode_all(file: BufferedIOBase, path: str) -> str:
    lines = enumerate(file, start=1)
    return "".join(_decode(line, Location(path, number)) for number, line in lines)


def _read_json(path: str, source: str) -> Iterator[Row | RecordError]:
    may_be_array = not path.lower().endswith(_LINE_SUFFIXES)
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            location = Location(path, number)
            try:
                text = _decode(line, location).strip()
                if not text:
                    continue
                if not (may_be_array and text.startswith("[")):
                    yield Row(_parse_object(text, location), location, source)
                    continue
            except RecordError as error:
                yield error
                continue
            # Outside of the try: the rows behind an error in an array cannot be found.
            file.seek(0)
            yield from _read_array(_decode_all(file, path), path, source)
            return


def _parse_object(text: str, location: Location) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        detail = f"{error.msg} at column {error.colno}"
        raise RecordError(location, "broken JSON", detail=detail) from error
    if not isinstance(value, dict):
        raise RecordError(location, "not a JSON object", detail=f"a {type(value).__name__}")
    return value


def _read_array(text: str, path: str, source: str) -> Iterator[Row | RecordError]:
    """Parse an array element by element; `json.loads` would not tell where an element starts."""
    decoder = json.JSONDecoder()
    position = _skip_blanks(text, text.index("[") + 1)
    line, counted = 1, 0  # the line of text[counted]
    while text[position : position + 1] != "]":
        line, counted = line + text.count("\n", counted, position), position
        location = Location(path, line)
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise RecordError(
                Location(path, error.lineno), "broken JSON array", detail=error.msg
            ) from error
        if isinstance(value, dict):
            yield Row(value, location, source)
        else:
            yield RecordError(location, "not a JSON object", detail=f"a {type(value).__name__}")
        position = _skip_blanks(text, position)
        if text[position : position + 1] == ",":
            position = _skip_blanks(text, position + 1)
        elif text[position : position + 1] != "]":
            location = Location(path, line + text.count("\n", counted, position))
            raise RecordError(location, "broken JSON array", detail="expected ',' or ']'")


def _skip_blanks(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position
