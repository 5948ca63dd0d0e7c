"""Splitting a batch into micro-batches and adding up what they return."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

BatchT = TypeVar("BatchT", bound=tuple[Any, ...])


class MicroBatch(NamedTuple, Generic[BatchT]):
    """A part of a rank's batch.

    Attributes:
        rows: The part.
        weight: 1, or 0 where the rank has no rows left and only keeps step with the others.
    """

    rows: BatchT
    weight: float


def sliced(batch: BatchT, rows: slice) -> BatchT:
    """Rows of a NamedTuple of tensors, lists and nested NamedTuples; `None` stays `None`."""
    fields = [_sliced_field(field, rows) for field in batch]
    return type(batch)(*fields)


def _sliced_field(field: Any, rows: slice) -> Any:  # noqa: ANN401  # whatever a batch holds
    if isinstance(field, tuple):
        return sliced(field, rows)
    return None if field is None else field[rows]


def micro_batches(batch: BatchT, n_rows: int, size: int | None) -> Iterator[BatchT]:
    """Consecutive parts of a batch of `n_rows` with at most `size` rows (`None`: the whole batch).

    Raises:
        ValueError: If `size` is less than one.
    """
    if size is None:
        yield batch
        return
    if size < 1:
        raise ValueError(f"micro_batch_size: expected at least 1 row, got {size}")
    for start in range(0, n_rows, size):
        yield sliced(batch, slice(start, start + size))


def accumulate(totals: dict[str, Tensor], shares: Mapping[str, Tensor]) -> None:
    """Add a micro-batch's detached `shares` to `totals` in place."""
    for key, share in shares.items():
        share = share.detach()
        totals[key] = totals[key] + share if key in totals else share


def weighted(shares: Mapping[str, Tensor], weight: float) -> dict[str, Tensor]:
    """All `shares` times the weight of their micro-batch."""
    return {key: weight * share for key, share in shares.items()}
