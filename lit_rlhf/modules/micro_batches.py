"""Micro-batches: a batch in parts, each with its own forward and backward before the one step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lit_rlhf.forward import LanguageModel, trunk_of, unwrap_model
from lit_rlhf.rollout import split_by_tokens
from lit_rlhf.stats import global_max

ACTIVATION_BYTES = 2**30
"""What the activations of a micro-batch may take on a CPU where no size is set: 1 GiB."""

BatchT = TypeVar("BatchT", bound=tuple[Any, ...])


class MicroBatch(NamedTuple):
    """A part of a rank's batch.

    Attributes:
        rows: Its rows.
        weight: Factor of its loss: 1, or 0 for a part that is repeated only because other ranks
            have more parts.
    """

    rows: slice
    weight: float


def slice_batch(batch: BatchT, rows: slice) -> BatchT:
    """Rows of a NamedTuple of tensors, lists and nested NamedTuples; `None` stays `None`."""
    return type(batch)(*(_slice_field(field, rows) for field in batch))


def _slice_field(field: Any, rows: slice) -> Any:  # noqa: ANN401  # whatever a batch holds
    if isinstance(field, tuple):
        return slice_batch(field, rows)
    return None if field is None else field[rows]


def split_rows(lengths: Tensor, max_rows: int | None, max_tokens: int | None) -> Iterator[slice]:
    """Split the rows of a batch into consecutive parts within both limits.

    Args:
        lengths: Real tokens of each row, `[B]`. They are read if there is a limit of tokens.
        max_rows: Most rows of a part; `None`: no limit.
        max_tokens: Most tokens of a part; `None`: no limit. A longer row is a part by itself.

    Examples:
        >>> import torch
        >>> [(part.start, part.stop) for part in split_rows(torch.tensor([3, 3, 3, 9]), None, 6)]
        [(0, 2), (2, 3), (3, 4)]
    """
    whole = slice(0, len(lengths))
    parts = [whole] if max_tokens is None else split_by_tokens(lengths.tolist(), max_tokens)
    for part in parts:
        size = max_rows or part.stop - part.start
        for start in range(part.start, part.stop, size):
            yield slice(start, min(start + size, part.stop))


def split_batch(
    model: LanguageModel, lengths: Tensor, max_rows: int | None, max_tokens: int | None
) -> list[MicroBatch]:
    """Split this rank's batch into micro-batches. Every rank gets the same number.

    Every backward may wait for the other ranks, but ranks differ in tokens, and in the dynamic
    batches of Section 4.2 in rows. A rank that has no rows left takes its first part again,
    with weight 0.

    Args:
        model: The network that is trained.
        lengths: Real tokens of each row of this rank's batch, `[B]`, on the module's device.
        max_rows: Most rows of a part; `None`: no limit.
        max_tokens: Most tokens of a part; a longer row is a part by itself. `None`: no limit, or on
            a CPU without `max_rows` as many as fit into `ACTIVATION_BYTES`.
    """
    if max_rows is None and max_tokens is None and lengths.device.type == "cpu":
        max_tokens = tokens_within_memory(model)
    parts = [MicroBatch(rows, 1.0) for rows in split_rows(lengths, max_rows, max_tokens)]
    if max_rows is not None or max_tokens is not None:
        most = global_max(len(parts), lengths.device)
        parts += [MicroBatch(parts[0].rows, 0.0)] * (most - len(parts))
    return parts


def tokens_within_memory(model: LanguageModel) -> int:
    """Number of tokens whose activations take about `ACTIVATION_BYTES` in `model`, at least 1."""
    return max(ACTIVATION_BYTES // activation_bytes(model), 1)


def activation_bytes(model: LanguageModel) -> int:
    """About what a token's activations take until the backward, in bytes.

    A layer keeps the inputs and outputs of its matmuls, and half as much again for norms, rotary
    positions and the activation function: measured on Llamas in float32. GPT-2 keeps twice that, as
    its activation function is written out in several operations. With gradient checkpointing there
    are the inputs of the layers, and one layer in full.
    """
    network = unwrap_model(model)
    with suppress(ValueError):  # without a trunk of its own it computes all logits: they count
        network = trunk_of(model)
    matmuls = [m for m in network.modules() if isinstance(m, nn.Linear | Conv1D)]
    widths = 1.5 * sum(sum(m.weight.shape) for m in matmuls)
    config = network.config.get_text_config()
    if any(getattr(module, "gradient_checkpointing", False) for module in network.modules()):
        n_layers = config.num_hidden_layers
        widths = widths / n_layers + n_layers * config.hidden_size
    return int(widths * next(network.parameters()).itemsize)
