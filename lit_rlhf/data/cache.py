"""The cache of encoded examples: Arrow files that all ranks of a node map into memory.

An entry is a folder below `$HF_DATASETS_CACHE/lit_rlhf` with the examples of one part of a
datamodule and a report of what was read and left out. Its name is a hash of everything that the
examples depend on, so an entry is never updated. It is written under a hidden name that tells its
process, and renamed when it is complete.
"""

import hashlib
import json
import logging
import os
import pickle
import re
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast, overload

import datasets
import numpy as np
import pyarrow as pa
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_rlhf.data.dataset import Example, PreferenceExample, PromptExample, TokenExample
from lit_rlhf.data.encoding import (
    DialogueEncoder,
    EncodingCounts,
    EncodingError,
    ResponseTooLongError,
    encode_records,
    leave_out,
    locate,
)
from lit_rlhf.data.records import Location, PreferenceRecord, PromptRecord, Record
from lit_rlhf.data.sources import LoadedRecords, OnBadRecord
from lit_rlhf.files import PARTIAL, delete, fsync

MIN_CACHED_RECORDS = 1000
"""Number of records from which examples are cached; fewer are encoded in a second or two."""

_EXAMPLES_FILE, _REPORT_FILE = "examples.arrow", "report.json"
_ROWS = 1000  # rows of an Arrow batch
_RECORDS_PER_WORKER = 500  # fewer take less time than a worker needs to start
_MAX_WORKERS = 32
_SECONDS_OF_A_DAY = 86_400

_log_warning = rank_zero_only(logging.getLogger(__name__).warning)


class RecordEncoder(Protocol):
    """A function that encodes one record into its examples."""

    def __call__(self, record: Any) -> Sequence[Any]:  # noqa: ANN401 - of any kind
        """Encode a record."""


class PartRecords(NamedTuple):
    """The records of one part of a datamodule, and what was read.

    Attributes:
        records: The records.
        n_read: Number of records of all parts that are read together.
        loaded: What was read, by part, without the records.
        n_shared: Number of training records whose prompts are also held out.
    """

    records: Sequence[Record]
    n_read: int
    loaded: dict[str, LoadedRecords[Any]]
    n_shared: int = 0


class EncodedPart(NamedTuple):
    """The examples of one part of a datamodule, and what it took to make them.

    Attributes:
        examples: The examples: a list, or stored ones.
        counts: What encoding left out.
        loaded: What was read, by part, without the records.
        n_shared: Number of training records whose prompts are also held out.
    """

    examples: Sequence[Any]
    counts: EncodingCounts
    loaded: dict[str, LoadedRecords[Any]]
    n_shared: int


def encode_part(
    part: str,
    key: str | None,
    read: Callable[[], PartRecords],
    encode: RecordEncoder,
    on_bad_record: OnBadRecord,
) -> EncodedPart:
    """Open the examples of a part in the cache, or encode its records.

    If at least `MIN_CACHED_RECORDS` were read, worker processes encode them into a new entry of the
    cache. Fewer are encoded in this process. The examples and counts are the same in all cases.

    Args:
        part: Name of the part.
        key: Hash of everything that the examples depend on; `None` for no cache.
        read: Reads the records; not called if the cache has the examples.
        encode: Encodes a record. It is sent to the workers.
        on_bad_record: As for `encode_records`.

    Returns:
        The examples and counts.

    Raises:
        RecordError: At the first bad record, if `on_bad_record` is `"error"`.
        ValueError: If no example is left.
    """
    entry = None if key is None else cache_folder() / f"{part}-{key}"
    if entry is not None and entry.is_dir():
        return _open_entry(entry)
    part_records = read()
    records = part_records.records
    # All parts of a split are cached, or none: for a small one alone, everything would be read.
    is_large = part_records.n_read >= MIN_CACHED_RECORDS
    if entry is not None and is_large and _are_storable(records):
        try:
            _write_entry(entry, part, part_records, encode, on_bad_record)
            return _open_entry(entry)
        except OSError as error:
            _log_warning(
                f"{entry.parent}: the encoded {part} data cannot be cached there ({error}), so "
                "every start encodes them again; set HF_DATASETS_CACHE to a folder on a disk with "
                "room that can be written"
            )
    counts = EncodingCounts()
    examples = encode_records(records, encode, counts, on_bad_record)
    _check_any_left(part, len(examples), counts)
    return EncodedPart(examples, counts, part_records.loaded, part_records.n_shared)


def _check_any_left(part: str, n_examples: int, counts: EncodingCounts) -> None:
    """Check that encoding left any examples of a part.

    Raises:
        ValueError: If there are none.
    """
    if not n_examples:
        raise ValueError(
            f"{part}: no example is left of {counts.records} records; left out: "
            f"{dict(counts.dropped_records)}"
        )


def cache_folder() -> Path:
    """The folder of the entries, in the cache of `datasets`."""
    return Path(datasets.config.HF_DATASETS_CACHE) / "lit_rlhf"


def hash_part(
    encode: Callable[..., Any], encoder: DialogueEncoder, settings: Mapping[str, object]
) -> str | None:
    """Hash of everything that the examples of a part depend on.

    Args:
        encode: The function that encodes a record: a `functools.partial` of a function of
            `lit_rlhf.data` with its options as keywords.
        encoder: The encoder that it uses.
        settings: Everything that decides on the records and their order, as plain data.

    Returns:
        Hexadecimal digits; `None` if the code of the function is not known.
    """
    # a function of a user's datamodule may use anything, which no hash of ours covers
    if not isinstance(encode, partial) or not encode.func.__module__.startswith("lit_rlhf.data."):
        return None
    options = {name: value for name, value in encode.keywords.items() if name != "encoder"}
    content = [
        _hash_code(),
        [encode.func.__qualname__, options],
        [asdict(encoder.contract), encoder.max_prompt_length, _hash_tokenizer(encoder.tokenizer)],
        settings,
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


@cache
def _hash_code() -> str:
    """Hash of the code that turns files into token ids."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    for package in ("datasets", "jinja2", "tokenizers", "transformers"):
        digest.update(version(package).encode())
    return digest.hexdigest()


def _hash_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of everything that a tokenizer saves, and its class."""
    digest = hashlib.sha256(type(tokenizer).__qualname__.encode())
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for file in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            content = file.read_bytes()
            if file.name == "tokenizer_config.json":
                config = json.loads(content)
                # it also says where the tokenizer was loaded from
                for name in ("is_local", "local_files_only", "name_or_path"):
                    config.pop(name, None)
                content = json.dumps(config).encode()
            digest.update(file.relative_to(folder).as_posix().encode())
            digest.update(content)
    return digest.hexdigest()


class StoredExamples(Sequence[Any]):
    """Examples in an Arrow file, which is mapped into memory.

    Args:
        file: The file.
    """

    def __init__(self, file: Path) -> None:
        rows = datasets.Dataset.from_file(str(file))
        self._columns = next(c for c in _COLUMNS if set(c.types) == set(rows.column_names))
        self._rows = rows.with_format("arrow")

    def __len__(self) -> int:
        """Number of examples."""
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        """The example at a position, or those of a slice."""
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        (example,) = self._columns.read(self._rows[int(index)])
        return cast(Example, example)

    def __getitems__(self, indices: list[int]) -> list[Example]:
        """The examples of a batch, read at once; torch's loader calls it instead of `[]`."""
        return self._columns.read(self._rows[indices])

    def __iter__(self) -> Iterator[Example]:
        """All examples in order, many times faster than one by one."""
        for table in self._rows.iter(batch_size=_ROWS):
            yield from self._columns.read(table)


class _Columns(Protocol):
    """The columns in which examples of one class are stored."""

    @property
    def types(self) -> Mapping[str, pa.DataType]:
        """The Arrow type of each column."""

    def write(self, examples: Sequence[Any]) -> dict[str, list[Any]]:
        """The values of the columns; where there is no example, None."""

    def read(self, table: pa.Table) -> list[Any]:
        """The examples of the rows of a table."""


class _TokenColumns:
    """The columns of `TokenExample`s, with a prefix to their names."""

    def __init__(self, prefix: str = "") -> None:
        counts = dict.fromkeys(("dropped_turns", "cut_tokens", "escaped_tokens"), pa.int64())
        types = {"input_ids": pa.list_(pa.int32()), "completion_mask": pa.list_(pa.bool_())}
        self._names = {name: prefix + name for name in types | counts}
        self.types = {prefix + name: type for name, type in (types | counts).items()}

    def write(self, examples: Sequence[TokenExample | None]) -> dict[str, list[Any]]:
        return {
            stored: [None if e is None else _to_plain(getattr(e, name)) for e in examples]
            for name, stored in self._names.items()
        }

    def read(self, table: pa.Table) -> list[TokenExample]:
        columns = {name: table[stored] for name, stored in self._names.items()}
        return [
            TokenExample(*values)
            for values in zip(
                _read_tensors(columns.pop("input_ids")),
                _read_tensors(columns.pop("completion_mask")),
                *(column.to_pylist() for column in columns.values()),
                strict=True,
            )
        ]


class _PreferenceColumns:
    """The columns of `PreferenceExample`s."""

    def __init__(self) -> None:
        self._chosen, self._rejected = _TokenColumns("chosen_"), _TokenColumns("rejected_")
        own = {"margin": pa.float64(), "source": pa.int64()}
        self.types = {**self._chosen.types, **self._rejected.types, **own}

    def write(self, examples: Sequence[PreferenceExample | None]) -> dict[str, list[Any]]:
        return {
            **self._chosen.write([None if e is None else e.chosen for e in examples]),
            **self._rejected.write([None if e is None else e.rejected for e in examples]),
            "margin": [None if e is None else e.margin for e in examples],
            "source": [None if e is None else e.source for e in examples],
        }

    def read(self, table: pa.Table) -> list[PreferenceExample]:
        halves = self._chosen.read(table), self._rejected.read(table)
        own = table["margin"].to_pylist(), table["source"].to_pylist()
        return [PreferenceExample(*values) for values in zip(*halves, *own, strict=True)]


class _PromptColumns:
    """The columns of `PromptExample`s; `fields` and `turns` are stored as JSON."""

    types: Mapping[str, pa.DataType] = {
        "input_ids": pa.list_(pa.int32()),
        "text": pa.string(),
        "dropped_turns": pa.int64(),
        "cut_tokens": pa.int64(),
        "fields": pa.string(),
        "turns": pa.string(),
    }
    _json = ("fields", "turns")

    def write(self, examples: Sequence[PromptExample | None]) -> dict[str, list[Any]]:
        def plain(name: str, value: object) -> object:
            return json.dumps(value) if name in self._json else _to_plain(value)

        return {
            name: [None if e is None else plain(name, getattr(e, name)) for e in examples]
            for name in self.types
        }

    def read(self, table: pa.Table) -> list[PromptExample]:
        values = {name: table[name].to_pylist() for name in self.types if name != "input_ids"}
        for name in self._json:
            values[name] = [json.loads(text) for text in values[name]]
        rows = zip(_read_tensors(table["input_ids"]), *values.values(), strict=True)
        return [PromptExample(**dict(zip(self.types, row, strict=True))) for row in rows]


_TOKENS, _PREFERENCES, _PROMPTS = _TokenColumns(), _PreferenceColumns(), _PromptColumns()
_COLUMNS: tuple[_Columns, ...] = (_TOKENS, _PREFERENCES, _PROMPTS)


def _columns_of(record: Record) -> _Columns:
    """The columns of the examples of a record."""
    if isinstance(record, PreferenceRecord):
        return _PREFERENCES
    return _PROMPTS if isinstance(record, PromptRecord) else _TOKENS


def _to_plain(value: Any) -> Any:  # noqa: ANN401 - a field of an example
    return value.numpy() if isinstance(value, Tensor) else value


def _read_tensors(column: pa.ChunkedArray) -> Sequence[Tensor]:
    """The tensors of a column of lists."""
    lists = column.combine_chunks()
    lengths = lists.value_lengths().to_pylist()
    # a copy, since a tensor must not be of memory that cannot be written
    values = np.array(lists.flatten().to_numpy(zero_copy_only=False))
    return torch.split(torch.from_numpy(values), lengths)


class _EncodeRows:
    """Encodes pickled records in a worker process; `datasets.Dataset.map` calls it.

    Each row that it returns is an example, or has in `error` why a record is left out.
    """

    def __init__(self, encode: RecordEncoder, columns: _Columns) -> None:
        self.encode = encode
        self.columns = columns
        self.schema = pa.schema({**columns.types, "error": pa.string()})

    def __call__(self, rows: Mapping[str, list[bytes]]) -> pa.Table:
        examples: list[Any] = []
        errors: list[str | None] = []
        for pickled in rows["record"]:
            record = pickle.loads(pickled)  # our own: `_map_records` has pickled it just now
            try:
                encoded = self.encode(record)
            except EncodingError as error:
                too_long = isinstance(error, ResponseTooLongError)
                errors.append(json.dumps([locate(record), too_long, error.reason, error.detail]))
                examples.append(None)
            else:
                errors += [None] * len(encoded)
                examples += encoded
        return pa.table({**self.columns.write(examples), "error": errors}, self.schema)


def _map_records(
    folder: Path, part: str, records: Sequence[Record], encode: RecordEncoder
) -> datasets.Dataset:
    """Encode records with all processors; the rows of the result are in the order of the records.

    Args:
        folder: Folder for the files of the result.
        part: Name of the part, for the progress bar.
        records: The records.
        encode: Encodes a record.

    Returns:
        The rows of `_EncodeRows`.
    """
    encode_rows = _EncodeRows(encode, _columns_of(records[0]))
    workers = min(_count_processors(), len(records) // _RECORDS_PER_WORKER, _MAX_WORKERS)
    return datasets.Dataset.from_dict({"record": [pickle.dumps(r) for r in records]}).map(
        encode_rows,
        batched=True,
        batch_size=_ROWS,
        remove_columns=["record"],
        features=datasets.Features.from_arrow_schema(encode_rows.schema),
        cache_file_name=str(folder / "rows.arrow"),
        new_fingerprint=part,  # nobody reads it; the default would hash the records
        num_proc=workers if workers > 1 else None,
        desc=f"Encoding {part}",
    )


def _write_entry(
    entry: Path,
    part: str,
    read: PartRecords,
    encode: RecordEncoder,
    on_bad_record: OnBadRecord,
) -> None:
    """Encode records into an entry of the cache, which appears when it is complete."""
    _delete_abandoned(entry.parent)
    hidden = entry.with_name(f".{entry.name}.{os.getpid()}@{socket.gethostname()}.{PARTIAL}")
    scratch = hidden / "scratch"
    columns = _columns_of(read.records[0])
    schema = pa.schema(columns.types)
    counts = EncodingCounts(len(read.records))
    n_examples = 0
    try:
        scratch.mkdir(parents=True)
        rows = _map_records(scratch, part, read.records, encode).with_format("arrow")
        with (
            pa.OSFile(str(hidden / _EXAMPLES_FILE), "wb") as file,
            pa.ipc.new_stream(file, schema) as writer,
        ):
            for table in rows.iter(batch_size=_ROWS):
                for error in table["error"].drop_null().to_pylist():
                    location, too_long, *message = json.loads(error)
                    error_class = ResponseTooLongError if too_long else EncodingError
                    leave_out(Location(*location), error_class(*message), counts, on_bad_record)
                good = table.filter(table["error"].is_null()).select(schema.names)
                for example in columns.read(good):
                    counts.add(example)
                writer.write_table(good)
                n_examples += len(good)
        _check_any_left(part, n_examples, counts)
        report = {
            "counts": vars(counts),
            "loaded": {name: vars(loaded) for name, loaded in read.loaded.items()},
            "n_shared": read.n_shared,
        }
        (hidden / _REPORT_FILE).write_text(json.dumps(report), encoding="utf-8")
        delete(scratch)
        for path in (hidden / _EXAMPLES_FILE, hidden / _REPORT_FILE, hidden):
            fsync(path)
        try:
            hidden.rename(entry)
        except OSError:
            if not entry.is_dir():  # or else another process was faster
                raise
        fsync(entry.parent)
    finally:
        delete(hidden)


def _open_entry(entry: Path) -> EncodedPart:
    """Open an entry of the cache."""
    report = json.loads((entry / _REPORT_FILE).read_text("utf-8"))
    counts = EncodingCounts(**report["counts"])
    counts.dropped_records = Counter(counts.dropped_records)
    loaded = {}
    for name, values in report["loaded"].items():
        counters = {key: Counter(value) for key, value in values.items() if type(value) is dict}
        loaded[name] = LoadedRecords[Any](**{**values, **counters})
    return EncodedPart(StoredExamples(entry / _EXAMPLES_FILE), counts, loaded, report["n_shared"])


def _delete_abandoned(folder: Path) -> None:
    """Delete what processes that were killed have left in the folder of the cache."""
    for path in folder.glob(f".*.{PARTIAL}"):
        found = re.search(r"\.(\d+)@(.*)\." + PARTIAL, path.name)
        if found and found[2] == socket.gethostname():
            abandoned = int(found[1]) == os.getpid() or not _is_alive(int(found[1]))
        else:  # of another machine, whose processes cannot be seen from here
            with suppress(FileNotFoundError):
                abandoned = time.time() - path.stat().st_mtime > _SECONDS_OF_A_DAY
        if abandoned:
            delete(path)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        return True
    return True


def _count_processors() -> int:
    """Number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _are_storable(records: Sequence[Record]) -> bool:
    """Whether JSON holds all fields of prompts, so that rewards get the same ones from the cache.

    Rows in memory and in Parquet files may hold objects of any class.
    """
    return all(_is_json(r.fields) for r in records if isinstance(r, PromptRecord))


def _is_json(value: object) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError, RecursionError):
        return False
