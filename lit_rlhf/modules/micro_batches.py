"""Micro-batches: a batch in parts, each with its own forward and backward before the one step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

BatchT = TypeVar("BatchT", bound=tuple[Any, ...])


class MicroBatch(NamedTuple, Generic[BatchT]):
    """A part of a rank's batch.

    Attributes:
        rows: The part, of the batch's own type.
        weight: Factor of its loss: 1, or 0 for a part that is repeated only because other ranks
            have more parts.
    """

    rows: BatchT
    weight: float


def slice_batch(batch: BatchT, rows: slice) -> BatchT:
    """Rows of a NamedTuple of tensors, lists and nested NamedTuples; `None` stays `None`."""
    return type(batch)(*(_slice_field(field, rows) for field in batch))


def _slice_field(field: Any, rows: slice) -> Any:  # noqa: ANN401  # whatever a batch holds
    if isinstance(field, tuple):
        return slice_batch(field, rows)
    return None if field is None else field[rows]


def split_batch(batch: BatchT, n_rows: int, size: int | None) -> Iterator[BatchT]:
    """Consecutive parts of a batch.

    Args:
        batch: A NamedTuple, see `slice_batch`.
        n_rows: Number of its rows.
        size: Most rows of a part; `None`: the whole batch is one part.

    Raises:
        ValueError: If `size` is less than 1.
    """
    if size is None:
        yield batch
        return
    if size < 1:
        raise ValueError(f"micro_batch_size: expected at least 1 row, got {size}")
    for start in range(0, n_rows, size):
        yield slice_batch(batch, slice(start, start + size))


def accumulate(totals: dict[str, Tensor], shares: Mapping[str, Tensor]) -> None:
    """Add the metrics of a micro-batch to `totals` in place, without their graphs."""
    for key, share in shares.items():
        share = share.detach()
        totals[key] = totals[key] + share if key in totals else share


def scaled(shares: Mapping[str, Tensor], factor: float) -> dict[str, Tensor]:
    """All metrics of a micro-batch times its weight."""
    return {key: factor * share for key, share in shares.items()}
