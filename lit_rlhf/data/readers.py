"""Readers: the rows of local files and of hub datasets, each with its location.

Hub datasets, folders, Parquet and Arrow files are loaded by `datasets`. JSON, CSV and text files
are read here, line by line: the JSON loader of `datasets` infers one schema for a whole file, its
CSV loader takes texts such as `None` and `007` for missing values and numbers, and none of them
tells the line of a broken record or of a byte that is not UTF-8.
"""

import codecs
import csv
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from glob import escape
from io import BufferedIOBase
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # in its docs

from lit_rlhf.data.records import Location, RecordError, Row
from lit_rlhf.files import RepeatedKeyError, find_repeated, parse_json
from lit_rlhf.hub import find_hub_problem
from lit_rlhf.paths import (
    CSV_SUFFIXES,
    FILE_SUFFIXES,
    LINE_SUFFIXES,
    TABLE_SUFFIXES,
    TEXT_SUFFIXES,
)
from lit_rlhf.paths import is_file_path as is_file_path

_KNOWN_KINDS = "known ones end in " + ", ".join(s for s in FILE_SUFFIXES if ".gz" not in s)
_NUMBER_COLUMNS = {"label", "labels", "margin", "choice", "better_response_id"}
_NUMBER_COLUMNS |= {"preference_strength"}
_LONGEST_CELL = 2**31 - 1  # the largest that every platform takes; the default is 131,072


def read_file(path: str, source: str = "") -> Iterator[Row | RecordError]:
    """Read the rows of a local file in order, or the error in place of one that cannot be parsed.

    The suffix of `path` decides how it is read, and `source` is the rows' data source. Blank lines
    are skipped but counted. A text file is one row with the field `text`.
    """
    if not Path(path).is_file():
        raise RecordError(Location(path), "no such file")
    if Path(path).stat().st_size == 0:
        raise RecordError(Location(path), "empty file")
    lower = path.lower()
    try:
        if lower.endswith(TABLE_SUFFIXES):
            if twice := find_repeated(_read_column_names(path)):
                raise RecordError(Location(path), "a column twice", detail=repr(twice))
            # `datasets` takes a path for a pattern: `pairs[1].parquet` would be `pairs1.parquet`
            rows = datasets.load_dataset(
                lower.rpartition(".")[2],
                data_files=[escape(str(Path(path).absolute()))],
                split="train",
                streaming=True,
            )
            yield from number_rows(rows, path, source)
            return
        with gzip.open(path) if lower.endswith(".gz") else open(path, "rb") as file:
            if lower.endswith(TEXT_SUFFIXES):
                yield Row({"text": _decode_all(file, path)}, Location(path, 1), source)
            elif lower.endswith(CSV_SUFFIXES):
                yield from _read_csv(file, path, source)
            elif _starts_array(file, of_objects=lower.endswith(LINE_SUFFIXES)):
                # elements are numbered like the rows of a dataset
                values = _parse_json(_decode_all(file, path), Location(path), "broken JSON array")
                for number, value in enumerate(values, start=1):
                    yield _make_row(value, Location(path, number), source)
            else:
                yield from _read_lines(file, path, source)
    except RecordError:
        raise
    except Exception as error:  # gzip, zlib and pyarrow have no common class for a damaged file
        detail = f"{type(error).__name__}: {error}"
        raise RecordError(Location(path), "cannot be read", detail=detail) from error


def load_dataset(
    path: str, *, split: str, subset: str | None, data_dir: str | None
) -> datasets.Dataset:
    """Load a hub dataset, or a local folder, mapped into memory.

    The hub is not asked for an existing file, nor for what cannot be a dataset's id.

    Args:
        path: Hub id, or a folder of files or of `Dataset.save_to_disk`.
        split: Name of the split; slices are allowed (`"train[:10%]"`).
        subset: Configuration of a hub dataset.
        data_dir: Folder within a hub dataset.
    """
    if Path(path).is_file():
        raise RecordError(Location(path), "an unknown kind of file", detail=_KNOWN_KINDS)
    try:
        if Path(path).is_dir():
            if any((Path(path) / name).is_file() for name in ("state.json", "dataset_dict.json")):
                saved = datasets.load_from_disk(path)
                return saved if isinstance(saved, datasets.Dataset) else saved[split]
        else:
            validate_repo_id(path)
    except (ValueError, KeyError) as error:
        reason = "no such split" if Path(path).is_dir() else "no such file or folder"
        raise RecordError(Location(path), reason, detail=str(error).partition(":")[0]) from error
    if not Path(path).is_dir() and (problem := find_hub_problem(path, "README.md", "dataset")):
        raise RecordError(Location(path), "no such file or folder", detail=problem)
    place = str(Path(path).resolve())
    if Path(path).is_dir() and escape(place) != place:  # other folders would be read
        raise RecordError(Location(path), "a folder with *, ? or [ in its path; rename it")
    try:
        return datasets.load_dataset(path, name=subset, data_dir=data_dir, split=split)
    except Exception as error:  # hub, network and builder errors have no common class
        reason = "not a dataset that can be loaded"
        detail = f"{type(error).__name__}: {error}"
        raise RecordError(Location(path), reason, detail=detail) from error


def number_rows(rows: Iterable[Any], path: str, source: str = "") -> Iterator[Row | RecordError]:
    """Number the rows of a dataset or list, with an error in place of anything but a mapping.

    Args:
        rows: The rows.
        path: What error messages call the dataset or list.
        source: Name of the data source.
    """
    if isinstance(rows, datasets.Dataset | datasets.IterableDataset):
        rows = rows.with_format(None)
    for number, fields in enumerate(rows, start=1):
        location = Location(path, number)
        if isinstance(fields, Mapping):
            yield Row(fields, location, source)
        else:
            yield RecordError(location, "not a row of fields", detail=f"a {type(fields).__name__}")


def _read_column_names(path: str) -> list[str]:
    """The names of the columns of a Parquet or Arrow file."""
    names: list[str]
    if path.lower().endswith(".parquet"):
        names = pq.read_schema(path).names
        return names
    with pa.memory_map(path) as file:
        try:
            names = pa.ipc.open_stream(file).schema.names
        except pa.ArrowInvalid:  # Arrow has two formats of files
            names = pa.ipc.open_file(file).schema.names
    return names


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


def _starts_array(file: BufferedIOBase, of_objects: bool) -> bool:
    """Whether the first line that is not blank opens an array (`of_objects`); rewinds the file.

    In a file of lines, `["a", "b"]` is a record.
    """
    stripped = (line.removeprefix(codecs.BOM_UTF8).strip() for line in file)
    first = next((line for line in stripped if line), b"")
    file.seek(0)
    follows = first.removeprefix(b"[").lstrip()
    return first.startswith(b"[") and (not of_objects or follows[:1] in (b"", b"{"))


def _read_csv(file: BufferedIOBase, path: str, source: str) -> Iterator[Row | RecordError]:
    """Read a table whose first line names its columns; a cell without text is missing.

    The header tells the separator: the most frequent of tab, comma and semicolon.
    """
    csv.field_size_limit(_LONGEST_CELL)
    lines = (_decode(line, Location(path, number)) for number, line in enumerate(file, start=1))
    header = next(lines, "")
    separator = max(",\t;", key=header.count)
    reader = csv.reader(chain([header], lines), delimiter=separator, strict=True)
    first = 1  # the first line of a row, which may have several
    try:
        names = next(reader, [])
        # spreadsheets write several columns without a name
        if twice := find_repeated(filter(None, names)):
            raise RecordError(Location(path, 1), "a column twice", detail=repr(twice))
        first = reader.line_num + 1
        for cells in reader:
            location = Location(path, first)
            first = reader.line_num + 1
            if len(cells) not in (0, len(names)):
                detail = f"{len(cells)} cells under {len(names)} column names"
                yield RecordError(location, "another number of cells than columns", detail=detail)
            elif any(cells):
                filled = [(name, text) for name, text in zip(names, cells, strict=True) if text]
                yield Row({n: _read_cell(n, text) for n, text in filled}, location, source)
    except csv.Error as error:
        raise RecordError(Location(path, first), "broken CSV", detail=str(error)) from error


def _read_cell(column: str, text: str) -> object:
    """The text of a cell; in columns of choices and margins its number or truth value."""
    try:
        return json.loads(text.lower()) if column in _NUMBER_COLUMNS else text
    except ValueError:
        return text  # refused when it is parsed


def _read_lines(file: BufferedIOBase, path: str, source: str) -> Iterator[Row | RecordError]:
    for number, line in enumerate(file, start=1):
        location = Location(path, number)
        try:
            text = _decode(line, location).strip()
            if text:
                yield _make_row(_parse_json(text, location, "broken JSON"), location, source)
        except RecordError as error:
            yield error


def _parse_json(text: str, location: Location, reason: str) -> Any:  # noqa: ANN401
    try:
        return parse_json(text)
    except RepeatedKeyError as error:
        raise RecordError(location, "a key twice", detail=repr(error.key)) from None
    except json.JSONDecodeError as error:
        if not location.line:
            location = Location(location.file, error.lineno)
        detail = f"{error.msg} at column {error.colno}"
        raise RecordError(location, reason, detail=detail) from error
    # Python reads neither integers of more than 4300 digits, nor nesting beyond its stack.
    except ValueError as error:
        raise RecordError(location, reason, detail=str(error.__cause__ or error)) from error


def _make_row(value: object, location: Location, source: str) -> Row | RecordError:
    """The row of an object, or of a list of strings, which is its field `turns`."""
    if isinstance(value, list) and value and all(isinstance(turn, str) for turn in value):
        value = {"turns": value}
    if not isinstance(value, dict):
        return RecordError(location, "not a JSON object", detail=f"a {type(value).__name__}")
    return Row(value, location, source)
