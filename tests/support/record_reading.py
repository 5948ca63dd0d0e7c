"""Reads data files for the tests of formats, readers and sources."""

from collections.abc import Callable
from typing import Any, NamedTuple

from lit_rlhf.data import DataCounts, DataSource, RecordKind, load_records

Writer = Callable[..., str]


class Read(NamedTuple):
    """The good records of a source, and the counts of the bad ones."""

    records: list[Any]
    counts: DataCounts


def read(kind: RecordKind, path: Any, **settings: Any) -> list[Any]:
    """Read a source whose records are all good."""
    return load_records(kind, [DataSource(path, name="s", **settings)])


def read_good(kind: RecordKind, path: Any, **settings: Any) -> Read:
    """Read a source, and count its bad records."""
    counts = DataCounts()
    return Read(load_records(kind, [DataSource(path, **settings)], "skip", counts=counts), counts)
