"""Readers: the rows of local files and of hub datasets, each with its location.

Hub datasets and parquet files are loaded by `datasets`. JSON and text files are read here, line by
line: the JSON loader of `datasets` infers one schema for a whole file, and neither it nor the text
loader tells the line of a broken record or of a byte that is not UTF-8.
"""

import codecs
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
    """Whether a path names a data file, which need not exist, as opposed to a dataset."""
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
            yield from number_rows(rows, path, source)
            return
        with gzip.open(path) if lower.endswith(".gz") else open(path, "rb") as file:
            if lower.endswith(_TEXT_SUFFIXES):
                yield Row({"text": _decode_all(file, path)}, Location(path, 1), source)
            elif not lower.endswith(_LINE_SUFFIXES) and _starts_array(file):
                yield from _read_array(_decode_all(file, path), path, source)
            else:
                yield from _read_lines(file, path, source)
    except RecordError:
        raise
    except Exception as error:  # gzip, zlib and pyarrow have no common class for a damaged file
        detail = f"{type(error).__name__}: {error}"
        raise RecordError(Location(path), "cannot be read", detail=detail) from error


def load_dataset(
    path: str, split: str, subset: str | None, data_dir: str | None
) -> datasets.Dataset:
    """Load a hub dataset, or a local folder that `datasets` loads.

    Args:
        path: Hub id or folder.
        split: The split, slices allowed (`"train[:10%]"`).
        subset: Name of the configuration.
        data_dir: Folder within the dataset.

    Returns:
        The dataset, memory-mapped.

    Raises:
        RecordError: If the dataset cannot be loaded.
    """
    try:
        return datasets.load_dataset(path, name=subset, data_dir=data_dir, split=split)
    except Exception as error:  # hub, network and builder errors have no common class
        reason = "neither a known kind of file nor a dataset that can be loaded"
        detail = f"{type(error).__name__}: {error}"
        raise RecordError(Location(path), reason, detail=detail) from error


def number_rows(rows: Iterable[Any], path: str, source: str = "") -> Iterator[Row | RecordError]:
    """Number the rows of a dataset or list.

    Args:
        rows: The rows; a dataset's come as plain values, whatever its format.
        path: What error messages call it.
        source: Name of the data source.

    Yields:
        The rows in order, and in place of anything but a mapping an error.
    """
    if isinstance(rows, datasets.Dataset | datasets.IterableDataset):
        rows = rows.with_format(None)
    for number, fields in enumerate(rows, start=1):
        location = Location(path, number)
        if isinstance(fields, Mapping):
            yield Row(fields, location, source)
        else:
            yield RecordError(location, "not a row of fields", detail=f"a {type(fields).__name__}")


def _decode(line: bytes, location: Location) -> str:
    """Decode a line; lines are decoded one by one, so that an error can name its line."""
    try:
        # Editors on Windows start a file with a byte order mark.
        return line.decode("utf-8-sig" if location.line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise RecordError(location, "not UTF-8", detail=str(error)) from error


def _decode_all(file: BufferedIOBase, path: str) -> str:
    lines = enumerate(file, start=1)
    return "".join(_decode(line, Location(path, number)) for number, line in lines)


def _starts_array(file: BufferedIOBase) -> bool:
    """Whether the first character that is not blank opens an array; rewinds the file."""
    stripped = (line.removeprefix(codecs.BOM_UTF8).strip() for line in file)
    first = next((line for line in stripped if line), b"")
    file.seek(0)
    return first.startswith(b"[")


def _read_lines(file: BufferedIOBase, path: str, source: str) -> Iterator[Row | RecordError]:
    for number, line in enumerate(file, start=1):
        location = Location(path, number)
        try:
            text = _decode(line, location).strip()
            if text:
                value = _parse_json(text, location, "broken JSON")
                yield Row(_check_fields(value, location), location, source)
        except RecordError as error:
            yield error


def _read_array(text: str, path: str, source: str) -> Iterator[Row | RecordError]:
    """Read an array; the location of an element is its number, as with the rows of a dataset."""
    values = _parse_json(text, Location(path), "broken JSON array")
    for number, value in enumerate(values, start=1):
        location = Location(path, number)
        try:
            yield Row(_check_fields(value, location), location, source)
        except RecordError as error:
            yield error


def _parse_json(text: str, location: Location, reason: str) -> Any:  # noqa: ANN401
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if not location.line:
            location = Location(location.file, error.lineno)
        detail = f"{error.msg} at column {error.colno}"
        raise RecordError(location, reason, detail=detail) from error
    # Python reads neither integers of more than 4300 digits, nor nesting beyond its stack.
    except (ValueError, RecursionError) as error:
        raise RecordError(location, reason, detail=str(error)) from error


def _check_fields(value: Any, location: Location) -> Mapping[str, Any]:  # noqa: ANN401
    """The fields of a value: an object itself, or a list of strings as the field `turns`."""
    if isinstance(value, list) and value and all(isinstance(turn, str) for turn in value):
        return {"turns": value}
    if not isinstance(value, dict):
        raise RecordError(location, "not a JSON object", detail=f"a {type(value).__name__}")
    return value
