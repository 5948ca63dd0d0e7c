"""Where records come from: data sources, how they are read, mixed and counted."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Literal, TypeVar, get_args

import numpy as np

from lit_rlhf.data.formats import Format, detected_format, parsed_records
from lit_rlhf.data.logs import log_on_rank_zero
from lit_rlhf.data.readers import RawRow, file_rows, hub_rows, is_file_path
from lit_rlhf.data.records import Record, RecordError, RecordKind
from lit_rlhf.data.rows import FieldError

OnBadRecord = Literal["error", "skip"]
AnyRecord = TypeVar("AnyRecord", bound=Record)

_LOGGER = logging.getLogger(__name__)
_SHOWN = 5


@dataclass
class DataSource:
    """One file or dataset to read records from.

    Attributes:
        path: A local file (``.jsonl``, ``.json``, ``.txt``, each also with ``.gz``, or
            ``.parquet``), or the id of a dataset on the Hugging Face hub.
        weight: How often the source's training records are used per epoch, as a multiple of its
            size: every record ``floor(weight)`` times, and a subset drawn by seed once more to
            reach the fraction (2.5 of 100 records: 250, half of them three times). Validation and
            test records are never weighted.
        name: Name of the source in metrics; default: the file's name without suffixes, or the id.
        format: The record format (see :data:`lit_rlhf.data.formats.FORMATS`), or ``"auto"`` to
            tell it from the fields of the first record.
        split: Split of a hub dataset, slices allowed (``"train[:10%]"``); not used for files.
        subset: Configuration of a hub dataset.
        data_dir: Folder within a hub dataset, such as ``"harmless-base"``.
    """

    path: str
    weight: float = 1.0
    name: str | None = None
    format: Format = "auto"
    split: str = "train"
    subset: str | None = None
    data_dir: str | None = None

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            ValueError: If the weight or the format is out of range.
        """
        if not self.weight > 0 or self.weight == float("inf"):
            raise ValueError(f"weight: expected a finite number above 0, got {self.weight}")
        if self.format not in get_args(Format):
            raise ValueError(f"format: expected one of {get_args(Format)}, got {self.format!r}")

    @property
    def label(self) -> str:
        """The name, or what stands in for it."""
        if self.name is not None:
            return self.name
        if is_file_path(self.path):
            return PurePath(self.path).name.split(".")[0]
        return "/".join(part for part in (self.path, self.subset, self.data_dir) if part)


@dataclass
class LoadedRecords:
    """What was read, and what was not.

    Attributes:
        records: The records, source after source, in file order.
        skipped: Number of bad records by reason.
        examples: The first few bad records, as messages that name file, line and field.
        kept: Number of records by source name, before weights.
    """

    records: list[Record] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    kept: Counter[str] = field(default_factory=Counter)

    def skip(self, error: RecordError) -> None:
        """Count a bad record.

        Args:
            error: Why it is bad.
        """
        self.skipped[error.reason] += 1
        if len(self.examples) < _SHOWN:
            self.examples.append(str(error))


def load_records(
    kind: RecordKind,
    sources: Sequence[DataSource],
    on_bad_record: OnBadRecord = "error",
    seed: int = 0,
    apply_weights: bool = True,
) -> LoadedRecords:
    """Read all records of some sources.

    Args:
        kind: The kind of records wanted. Preference files also give demonstrations (the chosen
            response) and prompts, demonstration files also prompts.
        sources: What to read; their names must differ.
        on_bad_record: ``"error"`` stops at the first bad record, ``"skip"`` counts it, logs the
            counts with the first few, and goes on. A missing or empty file, a damaged archive and
            a broken JSON array are always errors, as is a source without a single good record.
        seed: Seed of the subsets drawn for fractional weights.
        apply_weights: Repeat and draw records by the sources' weights.

    Returns:
        The records and the counts.

    Raises:
        RecordError: Names file, line and field of what cannot be used.
        ValueError: If there is no source, or two have the same name.
    """
    if not sources:
        raise ValueError("sources: expected at least one data source, got none")
    if on_bad_record not in get_args(OnBadRecord):
        raise ValueError(f"on_bad_record: expected 'error' or 'skip', got {on_bad_record!r}")
    labels = [source.label for source in sources]
    if len(set(labels)) < len(labels):
        raise ValueError(f"sources: expected different names, got {labels}; set `name`")
    loaded = LoadedRecords()
    for source in sources:
        _read_source(kind, source, on_bad_record, loaded)
    if loaded.skipped:
        reasons = ", ".join(f"{n} x {why}" for why, n in loaded.skipped.most_common())
        shown = "\n  ".join(loaded.examples)
        log_on_rank_zero(
            _LOGGER,
            logging.WARNING,
            f"skipped {loaded.skipped.total()} bad records: {reasons}; the first ones:\n  {shown}",
        )
    if apply_weights:
        return replace(loaded, records=weighted_records(loaded.records, sources, seed))
    return loaded


def weighted_records(
    records: Sequence[AnyRecord], sources: Sequence[DataSource], seed: int
) -> list[AnyRecord]:
    """Repeat and subsample records by the weights of their sources.

    Args:
        records: Records of these sources.
        sources: The sources, with the weights (see :class:`DataSource`).
        seed: Seed of the subsets; the same seed and records give the same subset.

    Returns:
        For every source ``round(weight * n)`` records: whole copies, then the drawn subset.
    """
    mixed: list[AnyRecord] = []
    for number, source in enumerate(sources):
        own = [record for record in records if record.source == source.label]
        copies, fraction = divmod(source.weight, 1)
        mixed += own * int(copies)
        drawn = np.random.default_rng([seed, number]).permutation(len(own))
        mixed += [own[i] for i in sorted(drawn[: round(fraction * len(own))])]
    return mixed


def _read_source(
    kind: RecordKind, source: DataSource, on_bad_record: OnBadRecord, loaded: LoadedRecords
) -> None:
    format = source.format
    before = len(loaded.records)
    bad: RecordError | None = None
    for line, value in _rows(source):
        try:
            if isinstance(value, RecordError):
                raise value
            try:
                if format == "auto":
                    format = detected_format(value)  # type: ignore[assignment]
                location = f"{source.path}:{line}"
                loaded.records += parsed_records(value, format, kind, source.label, location)
            except FieldError as error:
                raise RecordError(
                    source.path, line, error.reason, error.field, error.detail
                ) from error
        except RecordError as error:
            unknown_format = format == "auto" and not isinstance(value, RecordError)
            if on_bad_record == "error" or unknown_format:
                raise
            bad = bad or error
            loaded.skip(error)
    loaded.kept[source.label] = len(loaded.records) - before
    if len(loaded.records) == before:
        detail = "" if bad is None else f"the first bad one: {bad}"
        raise RecordError(source.path, 0, "no record that can be used", detail=detail)


def _rows(source: DataSource) -> Iterator[RawRow]:
    if is_file_path(source.path):
        return file_rows(source.path)
    return hub_rows(source.path, source.split, source.subset, source.data_dir)
