"""Data sources: the files and datasets that records are read from."""

import hashlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike, fspath
from pathlib import PurePath
from typing import Any, get_args

import datasets

from lit_rlhf.checks import check_choice
from lit_rlhf.data.counts import DataCounts, OnBadRecord
from lit_rlhf.data.formats import (
    FORMATS,
    count_unused_parts,
    detect_format,
    parse_row,
    undecided_reason,
)
from lit_rlhf.data.readers import is_file_path, load_dataset, number_rows, read_file
from lit_rlhf.data.records import (
    DemonstrationRecord,
    Location,
    Record,
    RecordError,
    RecordKind,
    Row,
)
from lit_rlhf.imports import function_path, import_function


@dataclass
class DataSource:
    """A file or dataset to read records from.

    Attributes:
        path: A local file (`.jsonl`, `.json`, `.csv`, `.tsv`, `.txt`, each also with `.gz`,
            `.parquet` or `.arrow`), a folder of such files or of `Dataset.save_to_disk`, or the id
            of a dataset on the Hugging Face hub. In Python also the rows themselves: a
            `datasets.Dataset`, or a list of dicts.
        weight: How often each training record is used per epoch, above 0: `floor(weight)` times,
            and a random subset once more to reach the fraction (2.5 of 100 records: 250, half of
            them three times). Validation and test records are not weighted.
        name: Name of the source in metrics; default: the file name without suffixes, or the id;
            `rows` for rows.
        format: The record format (see docs/data.md), or `"auto"` to detect it from the
            fields of the first record.
        split: Split of a hub dataset, slices allowed (`"train[:10%]"`); not used for files.
        subset: Configuration of a hub dataset.
        data_dir: Folder within a hub dataset, such as `"harmless-base"`.
        columns: The dataset's own names of fields, by the names that formats read:
            `{"prompt": "context_messages"}`.
        map: `package.module:function` of a function that turns the fields of a row (a dict) into
            fields of a known format, or in Python the function. It may return a list of such dicts,
            or None for a row that has no record.
        drop_duplicates: Whether to leave out records that equal an earlier one of this source. They
            are counted in any case.
    """

    path: str | Any  # rows cannot be written in a type that the command line parses
    weight: float = 1.0
    name: str | None = None
    format: str = "auto"
    split: str = "train"
    subset: str | None = None
    data_dir: str | None = None
    columns: dict[str, str] | None = None
    map: str | Any = None
    drop_duplicates: bool = False

    def __post_init__(self) -> None:
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
        check_choice("format", self.format, ("auto", *FORMATS))
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
        """Hash of the rows that `read_rows` yields, apart from `columns`, in hexadecimal digits.

        Files are hashed byte by byte. Other rows are read, and with `map` the results of the
        function are hashed: no hash would cover all that a function uses. `None` for rows that can
        be read only once, or cannot be hashed.
        """
        if not isinstance(self.path, str | list | tuple | datasets.Dataset):
            return None
        try:
            if isinstance(self.path, str) and is_file_path(self.path) and not self.map:
                with open(self.path, "rb") as file:
                    return hashlib.file_digest(file, "sha256").hexdigest()
            return _hash_rows(self.read_rows() if self.map else self._load_rows())
        except OSError:  # reading it fails with a better message
            return None

    def read_rows(self) -> Iterator[Row | RecordError]:
        """Read the rows in order, or the error in place of one that cannot be parsed."""
        if isinstance(self.path, str) and is_file_path(self.path):
            rows = read_file(self.path, self.label)
        else:
            rows = number_rows(self._load_rows(), self.place, self.label)
        if self.columns:
            return self._rename_fields(rows, self.columns)
        return self._map_rows(rows, self.map) if self.map else rows

    def _load_rows(self) -> Iterable[Any]:
        """The rows of a source that is not a file."""
        rows: Iterable[Any] = self.path
        if isinstance(rows, str):
            rows = load_dataset(rows, split=self.split, subset=self.subset, data_dir=self.data_dir)
        return rows

    def _rename_fields(
        self, rows: Iterable[Row | RecordError], columns: Mapping[str, str]
    ) -> Iterator[Row | RecordError]:
        unchecked = True
        for row in rows:
            if isinstance(row, RecordError):
                yield row
                continue
            missing = [column for column in columns.values() if column not in row.fields]
            if missing and unchecked:
                # raised and not counted: a misspelt name would make every record a bad one
                reason = "the first record does not have this field, which `columns` names"
                raise row.error(reason, field=missing[0], detail=f"it has {sorted(row.fields)}")
            unchecked = False
            own_names = set(columns.values())
            fields = {name: value for name, value in row.fields.items() if name not in own_names}
            fields |= {name: row.get(column) for name, column in columns.items()}
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
                yield row.error(f"{path} failed", detail=detail)
                continue
            for fields in [mapped] if isinstance(mapped, Mapping) else mapped or ():
                yield replace(row, fields=fields)


def _hash_rows(rows: Iterable[object]) -> str | None:
    digest = hashlib.sha256()
    if isinstance(rows, datasets.Dataset):
        digest.update(str(rows.features).encode())  # batches do not name their columns
        tables = rows.with_format("arrow").iter(batch_size=1000)
        rows = (batch.serialize() for table in tables for batch in table.to_batches())
    try:
        for row in rows:
            # unlike JSON, it tells lists from tuples, which a format may refuse
            digest.update(pickle.dumps(row))
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError):
        return None
    return digest.hexdigest()


def load_records(
    kind: RecordKind,
    sources: Sequence[DataSource],
    on_bad_record: OnBadRecord = "error",
    limit: int | None = None,
    counts: DataCounts | None = None,
    *,
    keep_fields: bool = False,
) -> list[Any]:
    """Read all records of some sources, each once.

    Preference files also give demonstrations (the chosen responses) and prompts; demonstration
    files also give prompts.

    Args:
        kind: The kind of records.
        sources: What to read; the names of the sources must differ.
        on_bad_record: `"error"` raises at the first bad record. `"skip"` counts bad records. A
            missing or empty file, a damaged archive, a broken JSON array and a source without a
            single good record always raise.
        limit: Largest number of records to read; `None` reads all.
        counts: Takes the counts of what was left out; `None` logs them.
        keep_fields: Keep the fields of their rows in demonstrations, as prompts always do.
    """
    if not sources:
        raise ValueError("sources: expected at least one data source, got none")
    check_choice("on_bad_record", on_bad_record, get_args(OnBadRecord))
    labels = [source.label for source in sources]
    if len(set(labels)) < len(labels):
        raise ValueError(f"sources: expected different names, got {labels}; set `name`")
    read = DataCounts()
    records: list[Record] = []
    for source in sources:
        room = None if limit is None else limit - len(records)
        if room is None or room > 0:
            records += _load_source(
                kind,
                source,
                on_bad_record=on_bad_record,
                limit=room,
                counts=read,
                keep_fields=keep_fields,
            )
    if counts is None:
        read.log_read()
    else:
        counts.update(read)
    return records


def _load_source(
    kind: RecordKind,
    source: DataSource,
    *,
    on_bad_record: OnBadRecord,
    limit: int | None,
    counts: DataCounts,
    keep_fields: bool,
) -> list[Record]:
    """Read all records of one source, and count what is left out."""
    format: str = source.format
    records: list[Record] = []
    first_error: RecordError | None = None
    for row in source.read_rows():
        try:
            if isinstance(row, RecordError):
                raise row
            if format == "auto":
                format = detect_format(row, kind, source.columns or ())
            parsed = parse_row(row, format, kind)
        except RecordError as error:
            # Without a format, no other row of the file can be parsed either.
            is_undetected = format == "auto" and isinstance(row, Row)
            if on_bad_record == "error" or is_undetected:
                raise
            first_error = first_error or error
            counts.skip(error)
            continue
        records += [_keep_fields(record, row) for record in parsed] if keep_fields else parsed
        counts.unused_parts.update(count_unused_parts(row, kind))
        reason = None if parsed else undecided_reason(row, format)
        if reason is not None:
            counts.undecided[reason] += 1
        elif not parsed:
            counts.label_false[source.label] += 1
        if limit is not None and len(records) >= limit:
            break
    unique = list(dict.fromkeys(records))
    counts.duplicates[source.label] = len(records) - len(unique)
    records = unique if source.drop_duplicates else records
    counts.kept[source.label] = len(records)
    if not records:
        detail = "" if first_error is None else f"the first bad one: {first_error}"
        raise RecordError(Location(source.place), "no record that can be used", detail=detail)
    return records[:limit]  # a row may hold several records


def _keep_fields(record: Record, row: Row) -> Record:
    """Keep the fields of a demonstration's row in it, as a prompt always does."""
    if isinstance(record, DemonstrationRecord):
        return replace(record, fields=row.fields)
    return record
