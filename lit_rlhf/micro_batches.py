"""Micro-batches: the parts that a batch is split into for an update, and their losses.

The gradient of an update does not depend on the split. A loss is divided by the tokens or samples
of the whole batch on all ranks, and the shares of the micro-batches add up.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lit_rlhf.forward import (
    LanguageModel,
    activation_bytes,
    checkpoints_activations,
    forward_plan,
    logit_bytes,
    logits_per_chunk,
    matmul_widths,
    unwrap_model,
)
from lit_rlhf.rollout import default_tokens_per_forward, split_by_tokens
from lit_rlhf.stats import global_max

ACTIVATION_BYTES = 2**30
"""Most that the activations of a micro-batch may take on a CPU where no size is set: 1 GiB."""
CUDA_MEMORY_SHARE = 0.25
"""Share of a CUDA device's memory for a micro-batch's activations and logits in that case."""

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
    all_rows = slice(0, len(lengths))
    parts = [all_rows] if max_tokens is None else split_by_tokens(lengths.tolist(), max_tokens)
    for part in parts:
        size = max_rows or part.stop - part.start
        for start in range(part.start, part.stop, size):
            yield slice(start, min(start + size, part.stop))


def split_batch(
    model: LanguageModel, lengths: Tensor, max_rows: int | None, max_tokens: int | None
) -> list[MicroBatch]:
    """Split this rank's batch into micro-batches, of which every rank gets the same number.

    Every backward may wait for the other ranks, but ranks differ in tokens, and in the dynamic
    batches of Section 4.2 in rows. Without any limit, the device's memory sets one.

    Args:
        model: The network that computes the loss.
        lengths: Real tokens of each row, `[B]`.
        max_rows: Most rows of a micro-batch; `None`: no limit.
        max_tokens: Most real tokens of a micro-batch; `None`: no limit.
    """
    if max_rows is None and max_tokens is None:
        max_tokens = default_tokens(model, lengths.device)
    rows_of_parts = split_rows(lengths, max_rows=max_rows, max_tokens=max_tokens)
    parts = [MicroBatch(rows, weight=1.0) for rows in rows_of_parts]
    if max_rows is not None or max_tokens is not None:
        n_missing = global_max(len(parts)) - len(parts)
        parts += [MicroBatch(parts[0].rows, weight=0.0)] * n_missing
    return parts


def default_tokens(model: LanguageModel, device: torch.device) -> int | None:
    """Most tokens of a micro-batch where the user set no size; `None`: no limit.

    Args:
        model: The network that computes the loss.
        device: The device that it is on.
    """
    memory = micro_batch_memory(device)
    if memory is None:
        return None
    if torch.is_autocast_enabled(device.type):
        itemsize = torch.get_autocast_dtype(device.type).itemsize
    else:
        itemsize = next(model.parameters()).itemsize
    return tokens_within_memory(model, device, memory=memory, itemsize=itemsize)


def micro_batch_memory(device: torch.device) -> int | None:
    """Bytes that a micro-batch may take on `device`, see `tokens_within_memory`; `None`: any."""
    if device.type == "cpu":
        return ACTIVATION_BYTES
    if device.type == "cuda":
        return int(CUDA_MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory)
    return None


def tokens_within_memory(
    model: LanguageModel, device: torch.device, *, memory: int, itemsize: int
) -> int:
    """Most tokens of a micro-batch whose activations fit into `memory`, at least 1.

    On CUDA the logits that exist at once have to fit as well, and there are at most as many tokens
    as in a forward without gradients, which keep the device busy. On a CPU the logits of a chunk
    are beside it.

    Args:
        model: The network that computes the loss.
        device: The kind of device.
        memory: Bytes for the micro-batch.
        itemsize: Bytes of a number in computation.
    """
    per_token = activation_bytes(
        matmul_widths(model), itemsize=itemsize, checkpointing=checkpoints_activations(model)
    )
    inner = unwrap_model(model)
    logits = 0
    if inner.get_output_embeddings() is not None:  # type: ignore[no-untyped-call]
        logits = inner.config.get_text_config().vocab_size * logit_bytes(itemsize)
    chunked = forward_plan(model).chunked_logits
    if device.type == "cpu":
        return max(memory // (per_token if chunked else per_token + logits), 1)
    tokens = memory // (per_token + logits)
    if chunked:  # beyond a chunk, more tokens have no more logits
        chunk = logits_per_chunk(device, training=True) * logit_bytes(itemsize)
        tokens = max(tokens, (memory - chunk) // per_token)
    return max(min(tokens, default_tokens_per_forward(device)), 1)
