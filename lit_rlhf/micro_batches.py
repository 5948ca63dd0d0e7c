"""Micro-batches: the parts that a batch is split into for an update, and their losses.

The gradient of an update does not depend on the split. A loss is divided by the tokens or samples
of the whole batch on all ranks, and the shares of the micro-batches add up.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lit_rlhf.forward import LanguageModel, trunk_of, unwrap_model
from lit_rlhf.rollout import split_by_tokens
from lit_rlhf.stats import global_max

ACTIVATION_BYTES = 2**30
"""Most that the activations of a micro-batch may take on a CPU where no size is set: 1 GiB."""

BatchT = TypeVar("BatchT", bound=tuple[Any, ...])


class MicroBatch(NamedTuple):
    """Rows of a batch that go through a network together.

    Attributes:
        rows: The rows.
        weight: Factor of their loss: 1, or 0 for rows that a rank takes again, since it has none
            left while other ranks do.
    """

    rows: slice
    weight: float


class LossShare(NamedTuple):
    """Share of a micro-batch in the loss of an update. Shares add up over micro-batches.

    Attributes:
        loss: The loss, 0-dim, with its graph.
        metrics: Its metrics by key, 0-dim. Losses are those whose key ends with `loss`.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]

    def scaled(self, weight: float) -> "LossShare":
        """Multiply the loss and all metrics by a weight."""
        return LossShare(
            loss=weight * self.loss,
            metrics={key: weight * value for key, value in self.metrics.items()},
        )


class NetworkUpdate(NamedTuple):
    """Result of an update of one network.

    Attributes:
        metrics: Sums over the micro-batches by key, 0-dim, from before the step.
        grad_norm: L2 norm of the gradient before clipping, 0-dim; NaN where a loss was not finite.
        applied: Whether a step was made: there is none if a number was not finite.
    """

    metrics: dict[str, Tensor]
    grad_norm: Tensor
    applied: bool


def accumulate(
    shares: Iterable[LossShare], backward: Callable[[Tensor], object]
) -> dict[str, Tensor]:
    """Accumulate the gradient of an update, and sum up its metrics.

    Args:
        shares: The micro-batches' shares. Each is computed when the one before is finished with,
            so that only one graph is in memory.
        backward: Adds the gradient of a loss to the gradient of the parameters.
    """
    totals: dict[str, Tensor] = {}
    for share in shares:
        backward(share.loss)
        for key, value in share.metrics.items():
            part = value.detach()
            totals[key] = totals[key] + part if key in totals else part
    return totals


def slice_batch(batch: BatchT, rows: slice) -> BatchT:
    """Rows of a NamedTuple of tensors, lists and nested NamedTuples; `None` stays `None`."""

    def cut(field: Any) -> Any:  # noqa: ANN401  # whatever a batch holds
        if isinstance(field, tuple):
            return slice_batch(field, rows)
        return None if field is None else field[rows]

    return type(batch)(*map(cut, batch))


def split_rows(lengths: Tensor, max_rows: int | None, max_tokens: int | None) -> Iterator[slice]:
    """Split rows into consecutive parts within the given limits.

    Args:
        lengths: Real tokens of each row, `[B]`.
        max_rows: Most rows of a part; `None`: no limit.
        max_tokens: Most real tokens of a part; `None`: no limit. A longer row is a part by itself.

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
    """Split this rank's batch into micro-batches, of which every rank gets the same number.

    Every backward may wait for the other ranks, but ranks differ in tokens, and in the dynamic
    batches of Section 4.2 in rows. Without any limit, a CPU takes as many tokens as fit into
    `ACTIVATION_BYTES`.

    Args:
        model: The network that computes the loss.
        lengths: Real tokens of each row, `[B]`.
        max_rows: Most rows of a micro-batch; `None`: no limit.
        max_tokens: Most real tokens of a micro-batch; `None`: no limit.
    """
    if max_rows is None and max_tokens is None and lengths.device.type == "cpu":
        max_tokens = tokens_within_memory(model)
    rows_of_parts = split_rows(lengths, max_rows=max_rows, max_tokens=max_tokens)
    parts = [MicroBatch(rows, weight=1.0) for rows in rows_of_parts]
    if max_rows is not None or max_tokens is not None:
        n_missing = global_max(len(parts)) - len(parts)
        parts += [MicroBatch(parts[0].rows, weight=0.0)] * n_missing
    return parts


def tokens_within_memory(model: LanguageModel) -> int:
    """Number of tokens whose activations take about `ACTIVATION_BYTES` in `model`, at least 1."""
    return max(ACTIVATION_BYTES // activation_bytes(model), 1)


def activation_bytes(model: LanguageModel) -> int:
    """About what a token's activations take until the backward, in bytes.

    A layer keeps the inputs and outputs of its matmuls, and half as much again for norms, rotary
    positions and the activation function: measured on Llamas in float32. GPT-2 keeps
    twice that: its activation function is written out in several operations. With gradient
    checkpointing there are the inputs of the layers, and one layer in full.
    """
    network = unwrap_model(model)
    with suppress(ValueError):  # without its own trunk it computes all logits: they count
        network = trunk_of(model)
    matmuls = [m for m in network.modules() if isinstance(m, nn.Linear | Conv1D)]
    widths = 1.5 * sum(sum(m.weight.shape) for m in matmuls)
    config = network.config.get_text_config()
    if any(getattr(module, "gradient_checkpointing", False) for module in network.modules()):
        n_layers = config.num_hidden_layers
        widths = widths / n_layers + n_layers * config.hidden_size
    return int(widths * next(network.parameters()).itemsize)
