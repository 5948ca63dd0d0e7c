"""The cache of encoded examples: Arrow files that all ranks of a node map into memory.

An entry is a folder below `$HF_DATASETS_CACHE/lit_rlhf`. It has the examples of one part of a
datamodule (training, validation, test, ptx or meta), as `datasets` reads them, and a report of what
was read and left out. Its name is a hash of everything that the examples depend on, so an entry is
never updated. It is written under a hidden name and renamed when it is complete.
"""

import hashlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import datasets
import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_rlhf.data.counts import DataCounts, OnBadRecord
from lit_rlhf.data.encoding import DialogueEncoder, encode_records
from lit_rlhf.data.examples import Example, PreferenceExample, PromptExample, TokenExample
from lit_rlhf.data.records import PreferenceRecord, PromptRecord, Record
from lit_rlhf.files import (
    PARTIAL,
    code_versions,
    delete,
    fsync,
    hash_files,
    listed_files,
    write_manifest,
    write_text,
)
from lit_rlhf.limits import end_with_parent
from lit_rlhf.rank_zero import rank_zero_only

MIN_CACHED_RECORDS = 1000
"""Number of records from which examples are cached; fewer are encoded in a second or two."""

_REPORT_FILE = "report.json"
_ROWS = 1000  # rows of an Arrow batch
_RECORDS_PER_WORKER = 500  # fewer take less time than a worker needs to start
_MAX_WORKERS = 32
_SECONDS_OF_A_DAY = 86_400

_log_warning = rank_zero_only(logging.getLogger(__name__).warning)

RecordEncoder = Callable[[Any], Sequence[Any]]
"""A function that encodes one record into its examples."""


class PartRecords(NamedTuple):
    """The records of one part of a datamodule.

    Attributes:
        records: The records, in the order of the examples that they become.
        read_counts: What reading left out, by the name of each part that had to be read: the parts
            of a split are read together.
    """

    records: Sequence[Record]
    read_counts: dict[str, DataCounts]


class EncodedPart(NamedTuple):
    """The examples of one part of a datamodule.

    Attributes:
        examples: The examples, in a list or mapped from the cache.
        encoding_counts: What encoding left out of the part's records.
        read_counts: What reading left out, by part, see `PartRecords`.
    """

    examples: Sequence[Any]
    encoding_counts: DataCounts
    read_counts: dict[str, DataCounts]


def encode_part(
    part: str,
    *,
    key: str | None,
    read: Callable[[], PartRecords],
    encode: RecordEncoder,
    on_bad_record: OnBadRecord,
) -> EncodedPart:
    """Open the examples of a part in the cache, or encode its records.

    If at least `MIN_CACHED_RECORDS` were read, worker processes encode them into a new entry of the
    cache. Fewer, and records without a key, are encoded in this process. The examples and counts
    are the same in all cases. The records are not read if the cache has the examples.

    Args:
        part: Name of the part, such as `train`.
        key: Hash of everything that the examples depend on, from `hash_part`; `None` does not use
            the cache.
        read: Reads the records.
        encode: Encodes one record.
        on_bad_record: What to do about a record that cannot be encoded.
    """
    entry = None if key is None else cache_folder() / f"{part}-{key}"
    if entry is not None and (cached := _open_entry(entry)) is not None:
        return cached
    source = read()
    # Cache all parts of a split or none: a small part that is not cached would have all read again.
    n_read = sum(counts.kept.total() for counts in source.read_counts.values())
    if entry is not None and n_read >= MIN_CACHED_RECORDS and _are_storable(source.records):
        try:
            _write_entry(entry, part, source, encode=encode, on_bad_record=on_bad_record)
            if (cached := _open_entry(entry)) is not None:
                return cached
        except OSError as error:
            _log_warning(
                f"{entry.parent}: the encoded {part} data cannot be cached there ({error}), so "
                "every start encodes them again; set HF_DATASETS_CACHE to a folder on a disk with "
                "room that can be written"
            )
    counts = DataCounts()
    examples = encode_records(source.records, encode, counts, on_bad_record)
    _check_any_left(part, examples, counts)
    return EncodedPart(examples, encoding_counts=counts, read_counts=source.read_counts)


def _check_any_left(part: str, examples: Sequence[Any], counts: DataCounts) -> None:
    if not examples:
        raise ValueError(
            f"{part}: no example is left of {counts.records} records; left out: "
            f"{dict(counts.dropped)}"
        )


def cache_folder() -> Path:
    """The folder of the entries, in the cache of `datasets`."""
    return Path(datasets.config.HF_DATASETS_CACHE) / "lit_rlhf"


def hash_part(
    encode: Callable[..., Any], encoder: DialogueEncoder, settings: Mapping[str, object]
) -> str | None:
    """Hash of everything that the examples of a part depend on, as hexadecimal digits.

    Args:
        encode: Encodes one record.
        encoder: The encoder that `encode` uses.
        settings: What decides on the records and their order, as plain data.

    Returns:
        The hash. `None` unless `encode` is a `functools.partial` of a function of `lit_rlhf.data`
        with its options as keywords: what other code depends on is not known.
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
    """Examples in Arrow files, mapped into memory."""

    def __init__(self, rows: datasets.Dataset) -> None:
        self._rows = rows.with_format("arrow")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int | slice) -> Any:  # noqa: ANN401 - any kind of example
        """The example at a position, or the examples of a slice."""
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        return _read_examples(self._rows[int(index)])[0]

    def __getitems__(self, indices: list[int]) -> list[Example]:
        """The examples of a batch, read at once; torch's loader calls it instead of `[]`."""
        return _read_examples(self._rows[indices])

    def __iter__(self) -> Iterator[Example]:
        """All examples in order, many times faster than one by one."""
        for table in self._rows.iter(batch_size=_ROWS):
            yield from _read_examples(table)


_JSON = dict.fromkeys(("fields", "turns"), pa.string())  # plain data, as JSON
_LOST = dict.fromkeys(("dropped_turns", "cut_tokens"), pa.int64())
_TOKENS: dict[str, pa.DataType] = {
    "input_ids": pa.list_(pa.int32()),
    "completion_mask": pa.list_(pa.bool_()),
    **_LOST,
    "escaped_tokens": pa.int64(),
}
_PAIR = {"chosen": pa.struct(_TOKENS), "rejected": pa.struct(_TOKENS)}
_TYPES: dict[type, dict[str, pa.DataType]] = {
    TokenExample: _TOKENS,
    PreferenceExample: {**_PAIR, "margin": pa.float64(), "source": pa.int64()},
    PromptExample: {"input_ids": _TOKENS["input_ids"], "text": pa.string(), **_LOST, **_JSON},
}
"""The Arrow type of each column, by class of examples."""


def _to_row(example: Example) -> dict[str, Any]:
    """The values of an example by column."""
    row = {name: getattr(example, name) for name in _TYPES[type(example)]}
    for name, value in row.items():
        if isinstance(value, TokenExample):
            row[name] = _to_row(value)
        elif isinstance(value, Tensor):
            row[name] = value.numpy()
        elif name in _JSON:
            row[name] = json.dumps(value)
    return row


def _read_examples(table: pa.Table) -> list[Any]:
    """The examples of the rows of a table."""
    columns = {name: _read_column(name, table[name]) for name in table.column_names}
    (kind,) = (kind for kind, types in _TYPES.items() if columns.keys() == types.keys())
    rows = zip(*columns.values(), strict=True)
    return [kind(**dict(zip(columns, row, strict=True))) for row in rows]


def _read_column(name: str, column: pa.ChunkedArray) -> Sequence[Any]:
    if pa.types.is_struct(column.type):
        return _read_examples(pa.Table.from_struct_array(column))
    if not pa.types.is_list(column.type):
        values = column.to_pylist()
        return [json.loads(text) for text in values] if name in _JSON else values
    lists = column.combine_chunks()
    # a copy, since torch warns of tensors on memory that cannot be written
    flat = np.array(lists.flatten().to_numpy(zero_copy_only=False))
    return torch.split(torch.from_numpy(flat), lists.value_lengths().to_pylist())


def _write_entry(
    entry: Path,
    part: str,
    source: PartRecords,
    *,
    encode: RecordEncoder,
    on_bad_record: OnBadRecord,
) -> None:
    """Encode records into an entry of the cache, which appears when it is complete."""
    _delete_abandoned(entry.parent)
    hidden = entry.with_name(f".{entry.name}.{uuid4().hex}.{PARTIAL}")
    try:
        hidden.mkdir(parents=True)
        counts = _encode_in_processes(
            source.records, hidden, part, encode=encode, on_bad_record=on_bad_record
        )
        _check_any_left(part, _map_files(hidden), counts)
        report = {
            "counts": vars(counts),
            "read": {name: vars(part_counts) for name, part_counts in source.read_counts.items()},
        }
        write_text(hidden / _REPORT_FILE, json.dumps(report))
        origin = {"stage": "data", "part": part, "records": len(source.records)}
        write_manifest(hidden, {"made": origin, "versions": code_versions()})
        for path in (*hidden.iterdir(), hidden):
            fsync(path)
        try:
            hidden.rename(entry)
        except OSError:
            if not entry.is_dir():  # or else another process was faster
                raise
        fsync(entry.parent)
    finally:
        delete(hidden)


def _open_entry(entry: Path) -> EncodedPart | None:
    """Open an entry of the cache; delete one that is damaged."""
    if not entry.is_dir():
        return None
    try:
        if not (listed := listed_files(entry)) or listed != hash_files(entry):
            raise ValueError("hashes differ")
        report = json.loads((entry / _REPORT_FILE).read_text("utf-8"))
        return EncodedPart(
            examples=_map_files(entry),
            encoding_counts=_load_counts(report["counts"]),
            read_counts={name: _load_counts(values) for name, values in report["read"].items()},
        )
    except (OSError, ValueError, TypeError) as error:
        _log_warning(f"{entry}: the encoded data are damaged ({error}) and are encoded again")
        with suppress(OSError):  # it is another user's, or another process deletes it too
            delete(entry)
        return None


def _load_counts(values: Mapping[str, Any]) -> DataCounts:
    counts: dict[str, Any] = {k: Counter(v) if type(v) is dict else v for k, v in values.items()}
    return DataCounts(**counts)


def _map_files(folder: Path) -> StoredExamples:
    """The examples of an entry; each worker has written one file."""
    files = [datasets.Dataset.from_file(str(file)) for file in sorted(folder.glob("*.arrow"))]
    return StoredExamples(datasets.concatenate_datasets(files))


def _delete_abandoned(folder: Path) -> None:
    """Delete what processes that were killed have left in the folder of the cache."""
    for path in folder.glob(f".*.{PARTIAL}"):
        with suppress(FileNotFoundError):  # another process has renamed or deleted it
            if time.time() - path.stat().st_mtime > _SECONDS_OF_A_DAY:
                delete(path)


def _encode_in_processes(
    records: Sequence[Record],
    folder: Path,
    part: str,
    *,
    encode: RecordEncoder,
    on_bad_record: OnBadRecord,
) -> DataCounts:
    """Encode equal shares of the records, each into a file, with a worker process for each share.

    Few records are a single share, which this process encodes.

    Returns:
        What encoding left out of all records.
    """
    n_shares = max(1, min(_count_processors(), len(records) // _RECORDS_PER_WORKER, _MAX_WORKERS))
    encode_share = partial(
        _encode_share,
        n_shares=n_shares,
        records=records,
        folder=folder,
        part=part,
        encode=encode,
        on_bad_record=on_bad_record,
    )
    if n_shares == 1:
        return encode_share(0)
    counts = DataCounts()
    others = {*multiprocessing.active_children()}
    # the pool of `multiprocessing` waits for a worker that was killed
    pool = ProcessPoolExecutor(
        max_workers=n_shares,
        mp_context=multiprocessing.get_context("fork"),
        initializer=_begin_worker,
        initargs=(encode_share, os.getpid()),
    )
    with pool:
        try:
            for done in [pool.submit(_encode_in_worker, share) for share in range(n_shares)]:
                counts.update(done.result())
        except BrokenProcessPool as error:
            raise ValueError(
                f"{part}: a process that encodes the data was killed, probably because memory ran "
                f"out; {n_shares} run at a time, one for each processor of this process"
            ) from error
        except BaseException:  # a Ctrl-C does not wait for the shares
            for process in {*multiprocessing.active_children()} - others:
                process.kill()
            raise
    return counts


def _encode_share(
    share: int,
    *,
    n_shares: int,
    records: Sequence[Record],
    folder: Path,
    part: str,
    encode: RecordEncoder,
    on_bad_record: OnBadRecord,
) -> DataCounts:
    """Encode one of several equal shares of the records into a file of its own."""
    begin = len(records) * share // n_shares
    end = len(records) * (share + 1) // n_shares
    file = folder / f"rows_{str(share).zfill(len(str(n_shares)))}.arrow"
    schema = pa.schema(_TYPES[_example_type(records[0])])
    # the shares are equal, so the progress of the first stands for all
    bar = datasets.utils.tqdm(
        desc=f"Encoding {part}", total=len(records), unit=" records", disable=share > 0
    )
    counts = DataCounts()
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer, bar:
        for start in range(begin, end, _ROWS):
            batch = records[start : min(start + _ROWS, end)]
            examples = encode_records(batch, encode, counts, on_bad_record)
            writer.write_table(pa.Table.from_pylist([*map(_to_row, examples)], schema))
            done = start + len(batch) - begin
            bar.update(len(records) * done // (end - begin) - bar.n)
    return counts


def _example_type(record: Record) -> type[Example]:
    """The type of the examples that a record becomes."""
    if isinstance(record, PreferenceRecord):
        return PreferenceExample
    if isinstance(record, PromptRecord):
        return PromptExample
    return TokenExample


_worker_encode: Callable[[int], DataCounts] | None = None


def _begin_worker(encode: Callable[[int], DataCounts], parent: int) -> None:
    """Prepare a worker process: it inherits its task by the fork, and ends with its parent."""
    global _worker_encode
    _worker_encode = encode
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the parent
    end_with_parent(parent)


def _encode_in_worker(share: int) -> DataCounts:
    assert _worker_encode is not None
    return _worker_encode(share)


def _count_processors() -> int:
    """Number of processors that this process may use for forks."""
    # elsewhere a fork may crash in the system's libraries
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


def _are_storable(records: Sequence[Record]) -> bool:
    """Whether JSON holds all fields of prompts, so that rewards get the same ones from the cache.

    Rows in memory and in Parquet files may hold objects of any class.
    """
    fields = (record.fields for record in records if isinstance(record, PromptRecord))
    try:
        return all(json.loads(json.dumps(row)) == row for row in fields)
    except (TypeError, ValueError, RecursionError):
        return False
