"""Micro-batches: a batch in parts, each with its own forward and backward before the one step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lit_rlhf.forward import LanguageModel, trunk_of

ACTIVATION_BYTES = 2**30
"""What the activations of a micro-batch may take on a CPU where no size is set: 1 GiB."""

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


def rows_within_memory(model: LanguageModel, n_rows: int, n_tokens: int) -> int:
    """Number of rows whose activations take about `ACTIVATION_BYTES`, at least 1.

    Args:
        model: The network that is trained.
        n_rows: Rows of the batch.
        n_tokens: Its tokens, without padding.
    """
    rows = ACTIVATION_BYTES * n_rows // max(n_tokens * activation_bytes(model), 1)
    return min(max(rows, 1), n_rows)


def activation_bytes(model: LanguageModel) -> int:
    """About what a token's activations take until the backward, in bytes.

    A layer keeps the inputs and outputs of its matmuls, and half as much again for norms, rotary
    positions and the activation function: measured on Llamas in float32. GPT-2 keeps twice that, as
    its activation function is written out in several operations. With gradient checkpointing there
    are the inputs of the layers, and one layer in full.
    """
    trunk = trunk_of(model)
    matmuls = [m for m in trunk.modules() if isinstance(m, nn.Linear | Conv1D)]
    widths = 1.5 * sum(sum(m.weight.shape) for m in matmuls)
    config = trunk.config.get_text_config()
    if trunk.is_activation_checkpointing:
        n_layers = config.num_hidden_layers
        widths = widths / n_layers + n_layers * config.hidden_size
    return int(widths * next(trunk.parameters()).itemsize)


def accumulate(totals: dict[str, Tensor], shares: Mapping[str, Tensor]) -> None:
    """Add the metrics of a micro-batch to `totals` in place, without their graphs."""
    for key, share in shares.items():
        share = share.detach()
        totals[key] = totals[key] + share if key in totals else share


def scaled(shares: Mapping[str, Tensor], factor: float) -> dict[str, Tensor]:
    """All metrics of a micro-batch times its weight."""
    return {key: factor * share for key, share in shares.items()}
