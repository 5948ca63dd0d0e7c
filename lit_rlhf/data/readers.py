"""Readers: the rows of local files and of hub datasets, each with its location.

Hub datasets and parquet files are loaded by `datasets`. JSON and text files are read here, line by
line: the JSON loader of `datasets` infers one schema for a whole file, and neither it nor the text
loader tells the line of a broken record or of a byte that is not UTF-8.
"""

import codecs
import gzip
import json
import re
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

_WINDOW = 2**16  # bytes of a JSON array that are read at a time
_NOT_BLANK = re.compile(r"\S")
# JSON that Python does not read: integers of more than 4300 digits, and nesting beyond its stack
_UNREADABLE = (ValueError, RecursionError)


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
            yield from number_rows(rows, path, source)
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
    yield from number_rows(load_dataset(path, split, subset, data_dir), path, source)


def load_dataset(
    path: str, split: str, subset: str | None, data_dir: str | None
) -> datasets.Dataset:
    """Load a hub dataset, or a local folder that `datasets` loads.

    Args:
        path: Hub id or folder.
        split: The split, slices allowed.
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
        rows: The rows; those of a dataset come as plain values, whatever its format.
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
    with _open(path) as file:
        if not path.lower().endswith(_LINE_SUFFIXES) and _starts_array(file):
            yield from _read_array(file, path, source)
            return
        for number, line in enumerate(file, start=1):
            location = Location(path, number)
            try:
                text = _decode(line, location).strip()
                if text:
                    yield Row(_parse_object(text, location), location, source)
            except RecordError as error:
                yield error


def _starts_array(file: BufferedIOBase) -> bool:
    """Whether the first character that is not blank opens an array; the file is read from anew."""
    first = b""
    while not first and (data := file.read(_WINDOW)):
        first = data.removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    file.seek(0)
    return first == b"["


def _parse_object(text: str, location: Location) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        detail = f"{error.msg} at column {error.colno}"
        raise RecordError(location, "broken JSON", detail=detail) from error
    except _UNREADABLE as error:
        raise RecordError(location, "broken JSON", detail=str(error)) from error
    return _check_fields(value, location)


def _check_fields(value: Any, location: Location) -> Mapping[str, Any]:  # noqa: ANN401
    """The fields of a value: an object's own, or a list of strings as the field `turns`."""
    if isinstance(value, list) and value and all(isinstance(turn, str) for turn in value):
        return {"turns": value}
    if not isinstance(value, dict):
        raise RecordError(location, "not a JSON object", detail=f"a {type(value).__name__}")
    return value


def _read_array(file: BufferedIOBase, path: str, source: str) -> Iterator[Row | RecordError]:
    """Parse an array element by element; `json.loads` would not tell where an element starts."""
    array = _ArrayText(file, path)
    array.peek()
    array.skip()
    while array.peek() != "]":
        location = array.location
        value = array.read_value()
        try:
            yield Row(_check_fields(value, location), location, source)
        except RecordError as error:
            yield error
        following = array.peek()
        if following == ",":
            array.skip()
        elif following != "]":
            raise RecordError(array.location, "broken JSON array", detail="expected ',' or ']'")


class _ArrayText:
    """The text of a JSON array, read piece by piece.

    Args:
        file: The file, from its beginning.
        path: Its path, for errors.
    """

    def __init__(self, file: BufferedIOBase, path: str) -> None:
        self._file = file
        self._path = path
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()  # as in `_decode`
        self._json = json.JSONDecoder()
        self._text = ""
        self._position = 0  # in `_text`
        self._line = 1  # the line of the position
        self._complete = False  # `_text` reaches the end of the file

    @property
    def location(self) -> Location:
        """The line of the position."""
        return Location(self._path, self._line)

    def peek(self) -> str:
        """Move to the next character that is not blank, and return it; at the end of the file ''.

        Raises:
            RecordError: If the text is not UTF-8.
        """
        while True:
            found = _NOT_BLANK.search(self._text, self._position)
            self._move(found.start() if found else len(self._text))
            if found or self._complete:
                return found[0] if found else ""
            self._read_more()

    def skip(self) -> None:
        """Move over a character."""
        self._move(self._position + 1)

    def read_value(self) -> Any:  # noqa: ANN401 - whatever the file holds
        """Parse the value at the position, and move behind it.

        Raises:
            RecordError: If it cannot be parsed. Nothing behind it can be, then.
        """
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._position)
            except json.JSONDecodeError as error:
                # it may be the text that ends early, and not the value
                if self._complete:
                    self._move(error.pos)
                    detail = error.msg
                    raise RecordError(self.location, "broken JSON array", detail=detail) from error
            except _UNREADABLE as error:
                detail = str(error)
                raise RecordError(self.location, "broken JSON array", detail=detail) from error
            else:
                # at the end of the text, a number may go on
                if end < len(self._text) or self._complete:
                    self._move(end)
                    return value
            self._read_more()

    def _move(self, position: int) -> None:
        self._line += self._text.count("\n", self._position, position)
        self._position = position

    def _read_more(self) -> None:
        """Drop the text before the position, and read as much as is left, or more.

        The text doubles until it holds a value, so all attempts to parse the value together take
        time that is linear in its length.
        """
        self._text = self._text[self._position :]
        self._position = 0
        data = self._file.read(max(_WINDOW, len(self._text)))
        self._complete = not data
        try:
            self._text += self._decoder.decode(data, final=self._complete)
        except UnicodeDecodeError as error:
            line = self._line + self._text.count("\n") + error.object.count(b"\n", 0, error.start)
            raise RecordError(Location(self._path, line), "not UTF-8", detail=str(error)) from error
