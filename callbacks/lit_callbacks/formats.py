"""Reads the records of log files of all kinds: numbers and texts by key, one record after another.

Each format has a function that takes a file and yields its records. To add one, write such a
function and name it in `READERS`, by the ending of the file's name. Errors of the content name the
file and the place in it.
"""

from __future__ import annotations

import ast
import csv
import io
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from reprlib import Repr
from typing import Any, NamedTuple

from lit_callbacks.files import RepeatedKeyError, check_file, find_repeated, parse_json, split_lines


class Record(NamedTuple):
    """What a log has of a step.

    Attributes:
        place: Number of its line, or of the entry of an array, from 1.
        values: Values by key; others than numbers may be among them.
    """

    place: int
    values: Mapping[str, Any]


_LARGEST_LOG = 2**30  # bytes
_LONGEST_CELL = 2**31 - 1  # characters; the largest that every platform takes
_METRICS = "a JSON object of metrics"
_EACH_ONCE = "each key of a JSON object once"
_SHORT = Repr()
_SHORT.maxstring = 80
_SHORT.maxother = 80
_LARGEST_NUMBER = 1e100
_LARGEST_STEP = 2**53  # the integers up to here are exact as floats
_DOWNLOAD = ["Wall time", "Step", "Value"]
_PANEL_SEPARATOR = " - "
_PANEL_EXTREMES = ("__MIN", "__MAX")
_DECIMAL_COMMA = re.compile(r"-?\d*,\d+(?:[eE][+-]?\d+)?")
_TAG_OF_DOWNLOAD = re.compile(r"-tag-(.+?)(?: \(\d+\))?$")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_STEP_OF_VERL = re.compile(r"\bstep:(\d+) - ")
_DICT_IN_LINE = re.compile(r"(?:\b[a-z_]+ (?P<step>\d+): )?(?P<dict>\{['\"].*\})\s*$")
_WRAPPED_NUMBER = re.compile(r"(?:np|numpy)\.\w+\(([^()]*)\)|tensor\(([^,()]*)[^()]*\)")
_BARE_NON_FINITE = re.compile(r"(?<![\w'\"/.-])(-?(?:nan|inf))(?![\w'\"/.-])")


@dataclass(frozen=True)
class LogFile:
    """A file of a log.

    Attributes:
        path: Its path. Messages name it, and some exports have the name of a curve in it.
        text: Its text, without a byte order mark.
    """

    path: Path
    text: str

    @classmethod
    def read(cls, path: Path) -> LogFile:
        """Read a file in UTF-8, or in UTF-16 with a byte order mark, as Windows writes it."""
        check_file(path, _LARGEST_LOG)
        data = path.read_bytes()
        is_utf16 = data[:2] in (b"\xff\xfe", b"\xfe\xff")
        return cls(path, data.decode("utf-16" if is_utf16 else "utf-8-sig", errors="replace"))


def content_error(path: Path, place: int, *, expected: str, got: object) -> ValueError:
    """An error of the content of a file.

    Args:
        path: The file.
        place: Number of the line, or of the entry of an array.
        expected: What should be there.
        got: What is there; it may be long or nested deeply.
    """
    return ValueError(f"{path}:{place}: expected {expected}, got {_SHORT.repr(got)}")


def read_records(path: Path) -> list[Record]:
    """Read the records of a file, in its order.

    Args:
        path: A file with one of the endings of `READERS`, or `.wandb`.

    Raises:
        ValueError: If the content is not what the ending says.
    """
    if path.suffix == ".wandb":
        return list(read_wandb(path))
    return list(READERS[path.suffix](LogFile.read(path)))


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Read the responses of a file of JSON lines, as `SampleTimeline` writes it.

    Args:
        path: The file.

    Returns:
        For each response `step`, `prompt` and `response`, and what else there is.

    Raises:
        ValueError: If a line is not a JSON object, or has another kind of value under a key that
            reports read.
    """
    samples = []
    for place, values in read_json_lines(LogFile.read(path)):
        sample = {"step": 0, "prompt": "", "response": "", **values}
        for key in ("prompt", "response"):
            if not isinstance(sample[key], str):
                raise content_error(path, place, expected=f"a text as {key}", got=sample[key])
        sample["step"] = parse_step(sample["step"], path, place)
        for key in ("score", "length", "truncated"):
            value = sample.get(key)
            if value is None:
                sample.pop(key, None)
            elif not isinstance(value, bool):
                sample[key] = parse_number(value)
            number = sample.get(key, 0.0)
            if number is None:
                raise content_error(path, place, expected=f"a number as {key}", got=value)
            if key != "score" and not math.isfinite(number):
                raise content_error(path, place, expected=f"a finite number as {key}", got=value)
        samples.append(sample)
    return samples


def parse_number(value: object) -> float | None:
    """Parse a value of a record, which may be a number as text; `None` for anything else.

    Numbers so large that sums of them would overflow are infinite.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    except OverflowError:  # an integer beyond the floats
        number = math.inf if int(value) > 0 else -math.inf
    return math.copysign(math.inf, number) if abs(number) > _LARGEST_NUMBER else number


def parse_step(value: object, path: Path, place: int) -> int:
    """Parse the number of a step.

    Args:
        value: The step, which may be a number as text.
        path: The file that it is in.
        place: Number of its line, or of the entry of an array.
    """
    step = parse_number(value)
    if step is None or not abs(step) <= _LARGEST_STEP:  # NaN, too
        raise content_error(path, place, expected="the number of a step", got=value)
    return int(step)


def is_curve_export(path: Path) -> bool:
    """Whether a file is a tracker's export of one curve or panel, so that a run has several."""
    if path.suffix not in (".csv", ".tsv"):
        return False
    columns = _columns(LogFile.read(path))
    return columns == _DOWNLOAD or _is_panel(columns)


def read_table(file: LogFile) -> Iterator[Record]:
    """A table with commas, semicolons or tabs, and exports of trackers, which are tables, too."""
    columns = _columns(file)
    delimiter = _delimiter(file)
    rows = _read_rows(file, delimiter)
    if delimiter == ";":  # a spreadsheet in a language that writes 0,5
        rows = (
            Record(place, {key: _with_point(value) for key, value in row.items()})
            for place, row in rows
        )
    if columns == _DOWNLOAD:
        return _read_download(file, rows)
    if _is_panel(columns):
        return _read_panel(file, rows, columns)
    return rows


def _read_rows(file: LogFile, delimiter: str) -> Iterator[Record]:
    """The rows of a table below the names of its columns."""
    csv.field_size_limit(_LONGEST_CELL)
    reader = csv.DictReader(io.StringIO(file.text, newline=""), delimiter=delimiter)
    try:
        for row in reader:
            yield Record(reader.line_num, row)
    except csv.Error as error:
        raise content_error(
            file.path, reader.line_num, expected="a row of a table", got=error
        ) from error


def _with_point(value: object) -> object:
    """A cell with a decimal point, if it is a number with a decimal comma."""
    if isinstance(value, str) and _DECIMAL_COMMA.fullmatch(value):
        return value.replace(",", ".")
    return value


def _delimiter(file: LogFile) -> str:
    head = next((line.text for line in split_lines(file.text)), "")
    return max(",;\t", key=head.count)


def _columns(file: LogFile) -> list[str]:
    csv.field_size_limit(_LONGEST_CELL)
    rows = csv.reader(io.StringIO(file.text, newline=""), delimiter=_delimiter(file))
    try:
        columns = next((row for row in rows if row), [])
    except csv.Error as error:
        raise content_error(
            file.path, rows.line_num, expected="the names of columns", got=error
        ) from error
    # spreadsheets write several columns without a name
    if twice := find_repeated(filter(None, columns)):
        raise content_error(file.path, rows.line_num, expected="each column once", got=twice)
    return columns


def _read_download(file: LogFile, rows: Iterator[Record]) -> Iterator[Record]:
    """TensorBoard's download of one curve, which is named in the file's name."""
    match = _TAG_OF_DOWNLOAD.search(file.path.stem)
    key = match[1] if match else file.path.stem
    for place, row in rows:
        yield Record(place, {"step": row["Step"], key: row["Value"]})


def _is_panel(columns: list[str]) -> bool:
    return len(columns) > 1 and all(_PANEL_SEPARATOR in name for name in columns[1:])


def _read_panel(file: LogFile, rows: Iterator[Record], columns: list[str]) -> Iterator[Record]:
    """The export of a panel of Weights & Biases, with columns `run - key` and `run - key__MIN`."""
    keys: dict[str, str] = {}
    runs: set[str] = set()
    axis, *curves = columns
    for name in curves:
        run, _, key = name.rpartition(_PANEL_SEPARATOR)
        if not key.endswith(_PANEL_EXTREMES) and key != "_step":
            keys[name] = key
            runs.add(run)
    if len(runs) != 1:
        raise ValueError(
            f"log: expected a panel of one run, got {file.path} with {', '.join(sorted(runs))}; "
            "hide the others before the export"
        )
    has_steps = "step" in axis.lower()  # and not the time
    for place, row in rows:
        values = {key: row[name] for name, key in keys.items()}
        yield Record(place, {"step": row[axis], **values} if has_steps else values)


def read_json_lines(file: LogFile) -> Iterator[Record]:
    """A JSON object of metrics in each line that is not blank; an unfinished last one is left."""
    for line in split_lines(file.text):
        try:
            content = parse_json(line.text)
        except RepeatedKeyError as error:
            raise content_error(
                file.path, line.number, expected=_EACH_ONCE, got=error.key
            ) from error
        except ValueError as error:
            if not line.is_complete:  # still being written
                return
            raise content_error(file.path, line.number, expected=_METRICS, got=line.text) from error
        metrics = content.get("metrics") or {} if isinstance(content, dict) else None
        if not isinstance(metrics, dict):
            raise content_error(file.path, line.number, expected=_METRICS, got=line.text)
        yield Record(line.number, {**content, **metrics})


def read_json(file: LogFile) -> Iterator[Record]:
    """An array of JSON objects, or an object with one as `log_history`, as a Trainer writes it."""
    try:
        content = parse_json(file.text)
    except RepeatedKeyError as error:
        raise content_error(file.path, 1, expected=_EACH_ONCE, got=error.key) from error
    except ValueError:
        yield from read_json_lines(file)  # many call these `.json`
        return
    records = content.get("log_history") if isinstance(content, dict) else content
    if not isinstance(records, list):
        expected = "an object with log_history, as trainer_state.json, or an array of objects"
        raise content_error(file.path, 1, expected=expected, got=content)
    for place, record in enumerate(records, start=1):
        if not isinstance(record, dict):
            raise content_error(file.path, place, expected=_METRICS, got=record)
        yield Record(place, record)


def read_console(file: LogFile) -> Iterator[Record]:
    """What a trainer printed: verl's lines of `step:1 - key:value - ...`, or dictionaries.

    A dictionary ends its line. Before it may be the number of the step, as in `rollout 3: {...}`.
    """
    # bars end with \r
    for place, raw, _ in split_lines(file.text.replace("\r\n", "\n").replace("\r", "\n")):
        line = _ESCAPES.sub("", raw)
        if match := _STEP_OF_VERL.search(line):
            pairs = [part.rpartition(":") for part in line[match.end() :].split(" - ")]
            values = {key.strip(): _unwrap(value.strip()) for key, _, value in pairs}
            yield Record(place, {"step": match[1], **values})
        elif match := _DICT_IN_LINE.search(line):
            values = _parse_dict(match["dict"])
            step = {} if match["step"] is None else {"step": match["step"]}
            yield Record(place, {**step, **values})


def _parse_dict(text: str) -> dict[str, Any]:
    """A dictionary of JSON or of Python; empty if it is neither."""
    with suppress(ValueError):
        return dict(parse_json(text))
    # Python's parser reports what is nested too deeply in three ways.
    with suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        # as text, which is no name of Python's
        return dict(ast.literal_eval(_BARE_NON_FINITE.sub(r"'\1'", _unwrap(text))))
    return {}


def _unwrap(text: str) -> str:
    """The numbers alone of `np.float64(0.5)` and `tensor(0.5, device='cuda:0')`."""
    return _WRAPPED_NUMBER.sub(lambda match: match[1] or match[2] or "", text)


def read_wandb(path: Path) -> Iterator[Record]:
    """The offline file of Weights & Biases, which its package decodes."""
    try:
        messages = import_module("wandb.proto.wandb_internal_pb2")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{path} is read with wandb: pip install wandb") from error
    check_file(path, _LARGEST_LOG)
    for place, data in enumerate(_read_blocks(path.read_bytes()), start=1):
        record = messages.Record()
        try:
            record.ParseFromString(data)
            items = record.history.item if record.WhichOneof("record_type") == "history" else ()
            values = {i.key or "/".join(i.nested_key): parse_json(i.value_json) for i in items}
        except Exception as error:  # protobuf's implementations have no common class
            expected = "a record of Weights & Biases"
            raise content_error(path, place, expected=expected, got=error) from error
        if values:
            yield Record(place, values)


def _read_blocks(data: bytes, header: int = 7, size: int = 32768) -> Iterator[bytes]:
    """Records of a file in the format of LevelDB's logs, behind the header of wandb.

    A block has parts of records, each behind its checksum (4 bytes), length (2) and kind (1): a
    whole one, or the first, a middle or the last part of one.
    """
    place = header
    record = b""
    while place + 7 <= len(data):
        if size - place % size < 7:  # the rest of a block is too short for a part
            place += size - place % size
            continue
        length = int.from_bytes(data[place + 4 : place + 6], "little")
        kind = data[place + 6]
        part = data[place + 7 : place + 7 + length]
        if kind == 0 or len(part) < length:  # still being written
            return
        record = part if kind in (1, 2) else record + part
        if kind in (1, 4):
            yield record
        place += 7 + length


READERS: dict[str, Callable[[LogFile], Iterator[Record]]] = {
    ".csv": read_table,
    ".tsv": read_table,
    ".jsonl": read_json_lines,
    ".json": read_json,
    ".log": read_console,
    ".out": read_console,
    ".txt": read_console,
}
"""Formats of text by the ending of the file's name."""
