"""Data sources: what to read, how often to use it, and how to split it."""

import hashlib
import json
import logging
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from os import PathLike, fspath
from pathlib import PurePath
from typing import Any, Generic, Literal, NamedTuple, get_args, overload

import datasets
import numpy as np
from lightning.pytorch.utilities import rank_zero_only

from lit_rlhf.data.formats import Format, detect_format, parse_row
from lit_rlhf.data.readers import (
    is_file_path,
    load_dataset,
    number_rows,
    read_dataset,
    read_file,
)
from lit_rlhf.data.records import (
    MAX_SHOWN,
    AnyRecord,
    DemonstrationRecord,
    Location,
    Message,
    PreferenceRecord,
    PromptRecord,
    Record,
    RecordError,
    RecordKind,
    Row,
    TextRecord,
    describe_bad_records,
)
from lit_rlhf.imports import function_path, import_function

OnBadRecord = Literal["error", "skip"]
"""What to do about a bad record: raise its error, or count it and go on."""

_log_info = rank_zero_only(logging.getLogger(__name__).info)
_log_warning = rank_zero_only(logging.getLogger(__name__).warning)


@dataclass
class DataSource:
    """A file or dataset to read records from.

    Attributes:
        path: A local file (`.jsonl`, `.json`, `.txt`, each also with `.gz`, or `.parquet`), or the
            id of a dataset on the Hugging Face hub. In Python also the rows themselves: a
            `datasets.Dataset`, or a list of dicts.
        weight: How often the training records of this source are used per epoch, as a multiple of
            their number: each record `floor(weight)` times, and a random subset once more to reach
            the fraction (2.5 of 100 records: 250, half of them three times). Validation and test
            records are not weighted.
        name: Name of the source in metrics; default: the file name without suffixes, or the id;
            `rows` for rows.
        format: The record format (see `lit_rlhf.data.FORMATS`), or `"auto"` to detect it from the
            fields of the first record.
        split: Split of a hub dataset, slices allowed (`"train[:10%]"`); not used for files.
        subset: Configuration of a hub dataset.
        data_dir: Folder within a hub dataset, such as `"harmless-base"`.
        columns: The dataset's own names of fields, by the names that formats read:
            `{"prompt": "context_messages"}`.
        map: `package.module:function` of a function that turns the fields of a row (a dict) into
            those of a known format, or in Python the function. It may return a list of such dicts,
            or None for a row that has no record.
    """

    path: str | Any  # rows cannot be written in a type that the command line parses
    weight: float = 1.0
    name: str | None = None
    format: Format = "auto"
    split: str = "train"
    subset: str | None = None
    data_dir: str | None = None
    columns: dict[str, str] | None = None
    map: str | Any = None

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            ValueError: If the path is neither a text nor rows, the weight or the format is out of
                range, `map` is no function, or both `columns` and `map` are given.
        """
        if isinstance(self.path, PathLike):
            self.path = fspath(self.path)
        # a mapping of splits, such as a DatasetDict, is iterable too
        if not isinstance(self.path, str) and (
            isinstance(self.path, Mapping) or not isinstance(self.path, Iterable)
        ):
            raise ValueError(
                "path: expected a file, the id of a dataset, a datasets.Dataset or a list of dicts,"
                f" got {type(self.path).__name__}"
                + (f" with {', '.join(self.path)}" if isinstance(self.path, Mapping) else "")
            )
        if not self.weight > 0 or self.weight == float("inf"):
            raise ValueError(f"weight: expected a finite number above 0, got {self.weight}")
        if self.format not in get_args(Format):
            raise ValueError(f"format: expected one of {get_args(Format)}, got {self.format!r}")
        if self.map is not None and not isinstance(self.map, str) and not callable(self.map):
            raise ValueError(
                "map: expected 'package.module:function' or a callable, got "
                f"{type(self.map).__name__}"
            )
        if self.columns and self.map:
            raise ValueError(
                f"columns, map: expected one of them, got {self.columns} and {self.map!r}; let the "
                "function name the fields"
            )

    @property
    def label(self) -> str:
        """The name, or its default."""
        if self.name is not None:
            return self.name
        if not isinstance(self.path, str):
            return "rows"
        if is_file_path(self.path):
            return PurePath(self.path).name.split(".")[0]
        return "/".join(part for part in (self.path, self.subset, self.data_dir) if part)

    @property
    def place(self) -> str:
        """The path, or what error messages call rows."""
        return self.path if isinstance(self.path, str) else self.label

    @property
    def is_remote(self) -> bool:
        """Whether it is a dataset that may have to be downloaded."""
        return isinstance(self.path, str) and not is_file_path(self.path)

    def settings(self) -> dict[str, Any]:
        """The attributes as plain data: the name of a function, and not the rows themselves."""
        function = function_path(self.map) if callable(self.map) else self.map
        return asdict(replace(self, path=self.place, map=function))

    def content_hash(self) -> str | None:
        """Hash of the rows that `read_rows` yields, apart from `columns`.

        Files are hashed byte by byte. Other rows are read, and those of a source with `map` as the
        function returns them: no hash would cover all that a function uses.

        Returns:
            Hexadecimal digits; `None` for rows that can be read once only, or not be hashed.

        Raises:
            RecordError: If the source as a whole cannot be read.
        """
        if not isinstance(self.path, str | list | tuple | datasets.Dataset):
            return None
        try:
            if self.map:
                return _hash_rows(self.read_rows())
            if isinstance(self.path, str) and is_file_path(self.path):
                with open(self.path, "rb") as file:
                    return hashlib.file_digest(file, "sha256").hexdigest()
            rows = self.path
            if isinstance(rows, str):
                rows = load_dataset(rows, self.split, self.subset, self.data_dir)
            return _hash_dataset(rows) if isinstance(rows, datasets.Dataset) else _hash_rows(rows)
        except OSError:  # reading it fails with a better message
            return None

    def read_rows(self) -> Iterator[Row | RecordError]:
        """Read the rows.

        Yields:
            The rows in order, and in place of a row that cannot be parsed the error that says why.

        Raises:
            RecordError: If the source as a whole cannot be read.
        """
        if not isinstance(self.path, str):
            rows = number_rows(self.path, self.place, self.label)
        elif is_file_path(self.path):
            rows = read_file(self.path, self.label)
        else:
            rows = read_dataset(self.path, self.split, self.subset, self.data_dir, self.label)
        if self.columns:
            return self._rename_fields(rows, self.columns)
        return self._map_rows(rows, self.map) if self.map else rows

    def _rename_fields(
        self, rows: Iterable[Row | RecordError], columns: Mapping[str, str]
    ) -> Iterator[Row | RecordError]:
        unchecked = True
        for row in rows:
            if isinstance(row, RecordError):
                yield row
                continue
            missing = [own for own in columns.values() if own not in row.fields]
            if missing and unchecked:
                # raised and not counted: a misspelt name would make every record a bad one
                reason = "the first record does not have this field, which `columns` names"
                raise row.error(missing[0], reason, f"it has {sorted(row.fields)}")
            unchecked = False
            own_names = set(columns.values())
            fields = {name: value for name, value in row.fields.items() if name not in own_names}
            fields |= {name: row.get(own) for name, own in columns.items()}
            yield replace(row, fields=fields)

    def _map_rows(
        self, rows: Iterable[Row | RecordError], named: str | Callable[..., Any]
    ) -> Iterator[Row | RecordError]:
        function = import_function(named, "map") if isinstance(named, str) else named
        path = named if isinstance(named, str) else function_path(named)
        for row in rows:
            if isinstance(row, RecordError):
                yield row
                continue
            try:
                mapped = function(dict(row.fields))
            except Exception as error:  # whatever the function raises
                detail = f"{type(error).__name__}: {error}"
                yield row.error("", f"{path} failed", detail)
                continue
            for fields in [mapped] if isinstance(mapped, Mapping) else mapped or ():
                yield replace(row, fields=fields)


def _hash_rows(rows: Iterable[object]) -> str | None:
    digest = hashlib.sha256()
    try:
        for row in rows:
            # unlike JSON, it tells lists from tuples, which a format may refuse
            digest.update(pickle.dumps(row))
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError):
        return None
    return digest.hexdigest()


def _hash_dataset(rows: datasets.Dataset) -> str:
    digest = hashlib.sha256(str(rows.features).encode())  # batches do not name their columns
    for table in rows.with_format("arrow").iter(batch_size=1000):
        for batch in table.to_batches():
            digest.update(batch.serialize())
    return digest.hexdigest()


@dataclass
class LoadedRecords(Generic[AnyRecord]):
    """The records of some sources, and counts of the bad ones.

    Attributes:
        records: The records, source by source, in the order of the file.
        skipped: Number of bad records by reason.
        examples: The first few bad records, as messages with file, line and field.
        kept: Number of records by name of their source.
        left_out: Number of rows with `label: false`, which are no demonstrations, by name of their
            source.
    """

    records: list[AnyRecord] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    kept: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)

    def skip(self, error: RecordError) -> None:
        """Count a bad record.

        Args:
            error: The error of the record.
        """
        self.skipped[error.reason] += 1
        if len(self.examples) < MAX_SHOWN:
            self.examples.append(str(error))

    def log(self) -> None:
        """Log what is not among the records, and why."""
        for label, number in self.left_out.items():
            if number:
                _log_info(f"{label}: left out {number} responses with label: false")
        if self.skipped:
            described = describe_bad_records(self.skipped, self.examples)
            n_read = self.kept.total() + self.skipped.total()
            _log_warning(f"skipped {self.skipped.total()} of {n_read} records as bad: {described}")


@overload
def load_records(
    kind: Literal["demonstration"],
    sources: Sequence[DataSource],
    on_bad_record: OnBadRecord = ...,
    limit: int | None = ...,
) -> LoadedRecords[DemonstrationRecord]: ...
@overload
def load_records(
    kind: Literal["preference"],
    sources: Sequence[DataSource],
    on_bad_record: OnBadRecord = ...,
    limit: int | None = ...,
) -> LoadedRecords[PreferenceRecord]: ...
@overload
def load_records(
    kind: Literal["prompt"],
    sources: Sequence[DataSource],
    on_bad_record: OnBadRecord = ...,
    limit: int | None = ...,
) -> LoadedRecords[PromptRecord]: ...
@overload
def load_records(
    kind: Literal["text"],
    sources: Sequence[DataSource],
    on_bad_record: OnBadRecord = ...,
    limit: int | None = ...,
) -> LoadedRecords[TextRecord]: ...
@overload
def load_records(
    kind: RecordKind,
    sources: Sequence[DataSource],
    on_bad_record: OnBadRecord = ...,
    limit: int | None = ...,
) -> LoadedRecords[Any]: ...
def load_records(
    kind: RecordKind,
    sources: Sequence[DataSource],
    on_bad_record: OnBadRecord = "error",
    limit: int | None = None,
) -> LoadedRecords[Any]:
    """Read all records of some sources, each once.

    Args:
        kind: The kind of records. Preference files also give demonstrations (the chosen responses)
            and prompts; demonstration files also give prompts.
        sources: What to read; the names of the sources must differ.
        on_bad_record: `"error"` raises at the first bad record. `"skip"` counts bad records and
            logs the counts with the first few. A missing or empty file, a damaged archive, a
            broken JSON array and a source without a single good record always raise.
        limit: Most records to read, from the first; `None` reads all. Nothing behind them is read.

    Returns:
        The records and the counts.

    Raises:
        RecordError: If a record or file cannot be used; names file, line and field.
        ValueError: If there is no source, or two of them have the same name.
    """
    loaded = read_records(kind, sources, on_bad_record, limit)
    loaded.log()
    return loaded


def read_records(
    kind: RecordKind,
    sources: Sequence[DataSource],
    on_bad_record: OnBadRecord = "error",
    limit: int | None = None,
) -> LoadedRecords[Any]:
    """Read records as `load_records` does, without logging the bad ones."""
    if not sources:
        raise ValueError("sources: expected at least one data source, got none")
    if on_bad_record not in get_args(OnBadRecord):
        raise ValueError(f"on_bad_record: expected 'error' or 'skip', got {on_bad_record!r}")
    labels = [source.label for source in sources]
    if len(set(labels)) < len(labels):
        raise ValueError(f"sources: expected different names, got {labels}; set `name`")
    loaded = LoadedRecords[Any]()
    for source in sources:
        if limit is None or len(loaded.records) < limit:
            _load_source(kind, source, on_bad_record, loaded, limit)
    # a row may hold several records
    del loaded.records[limit or len(loaded.records) :]
    return loaded


def _load_source(
    kind: RecordKind,
    source: DataSource,
    on_bad_record: OnBadRecord,
    loaded: LoadedRecords[Any],
    limit: int | None,
) -> None:
    format: str = source.format
    before = len(loaded.records)
    first_error: RecordError | None = None
    for row in source.read_rows():
        try:
            if isinstance(row, RecordError):
                raise row
            if format == "auto":
                format = detect_format(row, kind, source.columns or ())
            records = parse_row(row, format, kind)
            loaded.records += records
            loaded.left_out[source.label] += not records
        except RecordError as error:
            # Without a format, no other row of the file can be parsed either.
            is_undetected = format == "auto" and isinstance(row, Row)
            if on_bad_record == "error" or is_undetected:
                raise
            first_error = first_error or error
            loaded.skip(error)
        if limit is not None and len(loaded.records) >= limit:
            break
    loaded.kept[source.label] = len(loaded.records) - before
    if len(loaded.records) == before:
        detail = "" if first_error is None else f"the first bad one: {first_error}"
        raise RecordError(Location(source.place), "no record that can be used", detail=detail)


def repeat_by_weight(
    records: Sequence[AnyRecord], sources: Sequence[DataSource], seed: int
) -> list[AnyRecord]:
    """Repeat and subsample records by the weights of their sources.

    Args:
        records: Records of these sources.
        sources: The sources with their weights.
        seed: Seed of the subsets; the same seed and records give the same subset.

    Returns:
        For each source `round(weight * n)` records: whole copies first, then the subset.
    """
    repeated: list[AnyRecord] = []
    for number, source in enumerate(sources):
        # Each source has a random stream of its own, which the other sources do not shift.
        own = [record for record in records if record.source == source.label]
        copies, fraction = divmod(source.weight, 1)
        repeated += own * int(copies)
        order = np.random.default_rng([seed, number]).permutation(len(own))
        repeated += [own[i] for i in sorted(order[: round(fraction * len(own))])]
    return repeated


class Splits(NamedTuple, Generic[AnyRecord]):
    """Records for training, validation and test."""

    train: list[AnyRecord]
    val: list[AnyRecord]
    test: list[AnyRecord]


def split_records(
    records: Sequence[AnyRecord], val_fraction: float, test_fraction: float, seed: int
) -> Splits[AnyRecord]:
    """Split records by prompt.

    Prompts are sorted by a hash of seed and prompt; the first go to validation, the last to test.
    Records with the same prompt therefore stay together. SFT, reward model and PPO hold out the
    same prompts (up to rounding) if they split the same data with the same seed.

    Args:
        records: The records.
        val_fraction: Share of the prompts for validation, in [0, 1).
        test_fraction: Share of the prompts for test, in [0, 1).
        seed: Seed of the split.

    Returns:
        The three parts, each in the order of `records`. A fraction above 0 gives at least one
        prompt.

    Raises:
        ValueError: If a fraction is out of range, or no prompt is left for training.
    """
    for name, value in (("val_fraction", val_fraction), ("test_fraction", test_fraction)):
        if not 0 <= value < 1:
            raise ValueError(f"{name}: expected 0 <= fraction < 1, got {value}")
    # A hash instead of a shuffle: a few records more or less hardly change the split of the others.
    keys = [_hash_prompt(record, seed) for record in records]
    order = sorted(set(keys))
    n_val, n_test = (
        max(1, round(fraction * len(order))) if fraction > 0 else 0
        for fraction in (val_fraction, test_fraction)
    )
    if n_val + n_test >= len(order):
        raise ValueError(
            "val_fraction, test_fraction: expected to leave prompts for training, got "
            f"{val_fraction} and {test_fraction} of {len(order)} different prompts"
        )
    val, test = set(order[:n_val]), set(order[len(order) - n_test :])
    splits = Splits[AnyRecord]([], [], [])
    for record, key in zip(records, keys, strict=True):
        part = splits.val if key in val else splits.test if key in test else splits.train
        part.append(record)
    return splits


def prompt_of(record: Record) -> tuple[Message, ...]:
    """The prompt of a record of any kind.

    Args:
        record: The record.

    Returns:
        The turns before the response; for plain text the text itself as one turn.
    """
    if isinstance(record, DemonstrationRecord):
        return record.messages[:-1]
    if isinstance(record, TextRecord):
        return (Message("user", record.text),)
    return record.prompt


def _hash_prompt(record: Record, seed: int) -> bytes:
    turns = [[message.role, message.content] for message in prompt_of(record)]
    return hashlib.sha256(json.dumps([seed, turns]).encode("utf-8")).digest()
