"""Attention over tokens in any layout, behind transformers' own interface.

A decoder whose attention goes through transformers' `AttentionInterface` passes extra keyword
arguments of its forward down to the attention function. An `AttentionLayout` travels that way: it
says which tokens attend to each other, so that they need not lie in a padded rectangle.

The second half of the file computes attention over rows of tokens, in the fastest way for their
device, dtype and length. Notation: `S` rows of `N` queries and `C` keys, `A` heads of size `D`, `K`
heads of keys and values (`A` is a multiple of `K`). In `varlen_attention`, which takes rows that
lie back to back, `n` is the number of rows, and `N` and `C` count the tokens of all of them.
"""

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import cache, lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION_NAME = "lit_rlhf"
"""The name under which transformers knows this attention."""

BASE_ATTENTION = "sdpa"
"""The attention implementation that it replaces, and that it calls where there is no layout."""

MAX_BATCHED_LENGTH = 64
"""Longest rows that are trained on a CPU by two batched matmuls, not by torch's own attention."""

_FLASH_CAPABILITY = (8, 0)  # oldest CUDA devices that flash attention runs on: Ampere
MAX_HEAD_SIZE = 256
HEAD_SIZE_MULTIPLE = 8
"""Sizes of heads that flash attention takes: multiples up to a largest one."""


class AttentionInputs(NamedTuple):
    """Inputs of an attention layer.

    Attributes:
        query: `[S, A, N, D]`.
        key: `[S, K, C, D]`.
        value: `[S, K, C, D]`.
        scale: Factor of the scores; `None`: `1 / sqrt(D)`.
        dropout: Dropout probability of the attention weights, in [0, 1).
        window: Tokens that a token attends to, itself included; `None`: all before it.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float | None
    dropout: float
    window: int | None


class AttentionLayout(Protocol):
    """How the tokens of a forward attend to each other."""

    def attend(self, module: nn.Module, inputs: AttentionInputs) -> Tensor:
        """The output of the attention layer `module`, `[S, N, A, D]`."""
        ...


def attention(  # call rules: transformers takes output and weights
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    layout: AttentionLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in transformers' signature: the layout's, or without one `BASE_ATTENTION`.

    Args:
        module: The attention layer.
        query: Queries, `[S, A, N, D]`.
        key: Keys, `[S, K, C, D]`.
        value: Values, `[S, K, C, D]`.
        attention_mask: Mask of the base implementation; a layout does not read it.
        dropout: Dropout probability of the attention weights, in [0, 1).
        scaling: Factor of the scores; `None`: `1 / sqrt(D)`.
        sliding_window: Tokens that a token attends to, itself included; `None`: all before it.
        layout: How tokens attend to each other, if the forward was called with one.
        **kwargs: Further arguments of the base implementation.

    Returns:
        The output, `[S, N, A, D]`, and no attention weights.
    """
    if layout is not None:
        inputs = AttentionInputs(
            query, key, value, scale=scaling, dropout=dropout, window=sliding_window
        )
        return _attend(layout, module, inputs), None
    kwargs |= {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window}
    base = ALL_ATTENTION_FUNCTIONS[BASE_ATTENTION]
    output, _ = base(module, query, key, value, attention_mask, **kwargs)
    return output, None


# Sizes in a layout differ from batch to batch: torch.compile would compile for each of them.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend(layout: AttentionLayout, module: nn.Module, inputs: AttentionInputs) -> Tensor:
    return layout.attend(module, inputs)


AttentionInterface.register(ATTENTION_NAME, attention)
# without a layout, the base implementation makes the masks
AttentionMaskInterface.register(ATTENTION_NAME, ALL_MASK_ATTENTION_FUNCTIONS[BASE_ATTENTION])


def supports_layouts(model: PreTrainedModel) -> bool:
    """Whether keyword arguments of the forward reach the attention function of `model`."""
    # A private name of transformers 5, but the only mark of models that use its interface.
    return bool(getattr(model, "_supports_attention_backend", False))


def attention_implementation(model: PreTrainedModel) -> str | None:
    """The name of the attention implementation of `model`."""
    # A private name of transformers 5: there is no public way to read what was chosen.
    name: str | None = model.config._attn_implementation
    return name


def run_with_layout(
    trunk: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, layout: AttentionLayout
) -> Tensor:
    """Final hidden states `[S, N, H]` of a decoder whose attention layers follow a layout.

    Args:
        trunk: The decoder, with this module's attention.
        input_ids: Token ids, `[S, N]` long.
        position_ids: Positions of the tokens in their sequences, `[S, N]` long.
        layout: How the tokens attend to each other.
    """
    # transformers takes a mask of four dimensions as ready made. The layout does not read it; it
    # only keeps the decoder from building a quadratic mask.
    ready_made = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=input_ids.device)
    arguments = {"position_ids": position_ids, "attention_mask": ready_made, "layout": layout}
    hidden: Tensor = trunk(input_ids=input_ids, use_cache=False, **arguments).last_hidden_state
    return hidden


def causal_attention(inputs: AttentionInputs) -> Tensor:
    """Causal attention within rows that are padded on the right.

    No mask is needed for the padding: tokens before it do not attend to it, and its own output is
    not read.

    Args:
        inputs: Rows with as many keys as queries (`C` equals `N`).

    Returns:
        Outputs `[S, A, N, D]` in the dtype of the values. Under autocast, queries and keys come in
        float32, because rotary embeddings leave them so.
    """
    value = inputs.value
    is_batched = (
        value.device.type == "cpu"
        and value.dtype.itemsize >= 4
        and inputs.query.shape[2] <= MAX_BATCHED_LENGTH
        and not inputs.dropout
        and torch.is_grad_enabled()
    )
    return _batched_attention(inputs) if is_batched else _fused_attention(inputs)


def _batched_attention(inputs: AttentionInputs) -> Tensor:
    """`causal_attention` by two batched matmuls over all rows and heads.

    torch's own attention multiplies one head of one row at a time on a CPU, and its backward is
    slow where rows are short.
    """
    query, key, value, scale, _, window = inputs
    n_rows, n_heads, length, size = query.shape
    n_key_heads = key.shape[1]
    n_shared = n_heads // n_key_heads
    bias = _causal_bias(length, window or length, value.dtype)
    scores = torch.baddbmm(
        bias.repeat(1, n_shared, 1),
        query.reshape(n_rows * n_key_heads, n_shared * length, size),
        key.flatten(0, 1).transpose(1, 2),
        alpha=size**-0.5 if scale is None else scale,
    )
    return scores.softmax(-1).bmm(value.flatten(0, 1)).view(query.shape)


def _fused_attention(inputs: AttentionInputs) -> Tensor:
    """`causal_attention` by one of torch's kernels."""
    query, key, value, scale, dropout, window = inputs
    length = query.shape[2]
    dtype = value.dtype
    on_cpu = query.device.type == "cpu"
    # On a CPU, the backward of scaled_dot_product_attention is several times slower in bfloat16
    # than in float32.
    upcast = on_cpu and dtype.itemsize < 4 and torch.is_grad_enabled()
    compute_dtype = torch.float32 if upcast else dtype
    mask = None
    if window is not None and window < length:
        mask = causal_mask(length, window, query.device)
    n_shared = query.shape[1] // key.shape[1]
    # Of CUDA's kernels, only flash attention shares a key among heads, and it takes neither float32
    # nor a mask. torch would fall back to one that holds all scores, quadratic in the length.
    if n_shared > 1 and not on_cpu and (mask is not None or compute_dtype == torch.float32):
        key, value = (states.repeat_interleave(n_shared, dim=1) for states in (key, value))
    with torch.autocast(query.device.type, enabled=False):
        output = functional.scaled_dot_product_attention(
            query.to(compute_dtype),
            key.to(compute_dtype),
            value.to(compute_dtype),
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )
    return output.to(dtype)


def cached_attention(inputs: AttentionInputs, mask: Tensor) -> Tensor:
    """Attention of one new token in each row to the keys of a cache, without gradients.

    Args:
        inputs: Rows with one query (`N` is 1).
        mask: Keys to attend to, `[S, 1, 1, C]` bool, at least one in each row.

    Returns:
        Outputs `[S, A, 1, D]` in the dtype of the values.
    """
    query, key, value, scale, dropout, _ = inputs
    # The heads that share a key become the queries of one head, so that keys and values are not
    # copied for each of them.
    grouped = query.reshape(len(query), key.shape[1], -1, query.shape[3])
    output = functional.scaled_dot_product_attention(
        grouped.to(value.dtype), key, value, attn_mask=mask, dropout_p=dropout, scale=scale
    )
    return output.reshape(query.shape)  # CUDA's kernels give it other strides than a CPU's


# every layer of every forward needs the bias of its rows' length
@lru_cache(maxsize=MAX_BATCHED_LENGTH)
def _causal_bias(length: int, window: int, dtype: torch.dtype) -> Tensor:
    """The bias of causal attention within a window on a CPU, `[1, length, length]`."""
    # A tensor made in inference mode cannot be saved for a backward, and this one is cached.
    with torch.inference_mode(False):
        mask = causal_mask(length, window, torch.device("cpu"))[None]
        return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)


def causal_mask(length: int, window: int, device: torch.device) -> Tensor:
    """True where a token attends to itself or an earlier one in its window, `[length, length]`.

    Args:
        length: Tokens of a row.
        window: Tokens that a token attends to, itself included.
        device: Where the mask is made.
    """
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions[None, :]
    return (distance >= 0) & (distance < window)


class RowOffsets(NamedTuple):
    """Positions of rows among tokens that lie back to back.

    Attributes:
        offsets: Where each row begins, and where the last one ends, `[n+1]` int32.
        longest: Tokens of the longest row.
    """

    offsets: Tensor
    longest: int


def varlen_obstacle(value: Tensor) -> str:
    """Why `varlen_attention` cannot take these values, `[..., D]`; empty if it can."""
    size = value.shape[-1]
    if value.device.type != "cuda":
        return f"the device is {value.device.type}"
    if value.dtype not in (torch.bfloat16, torch.float16):
        return f"the values are {value.dtype} and flash attention takes half precision"
    if size > MAX_HEAD_SIZE or size % HEAD_SIZE_MULTIPLE:
        return f"the heads have size {size}"
    if _find_kernel() is None:
        return f"torch {torch.__version__} has no such kernel"
    if torch.cuda.get_device_capability(value.device) < _FLASH_CAPABILITY:
        return "the GPU is older than Ampere"
    return ""


def varlen_attention(
    inputs: AttentionInputs, queries: RowOffsets, keys: RowOffsets, n_keys: Tensor | None = None
) -> Tensor:
    """Causal attention within each row, whose last query is at its last key, in one CUDA kernel.

    It needs neither padding nor a mask nor a call per length, see `_find_kernel`.

    Args:
        inputs: States by token, not by head: queries `[N, A, D]`, keys and values `[C, K, D]`.
            Their dropout is ignored.
        queries: Where the queries of each row are.
        keys: Where the room for the keys of each row is.
        n_keys: Keys that each row has in its room, `[n]` int32, without gradients; `None` if they
            fill it.

    Returns:
        Outputs `[N, A, D]` in the dtype of the values.
    """
    query, key, value, scale, _, window = inputs
    kernel = _find_kernel()
    assert kernel is not None
    n_keys_before = -1 if window is None else window - 1
    # one query per row attends to all of its keys: without a window there is nothing to mask, and
    # flash attention then takes the heads that share a key together
    n_keys_after = -1 if window is None and queries.longest == 1 else 0
    output: Tensor = kernel(
        query=query.to(value.dtype),  # under autocast, rotary embeddings leave float32
        key=key.to(value.dtype),
        value=value,
        cu_seq_q=queries.offsets,
        cu_seq_k=keys.offsets,
        max_q=queries.longest,
        max_k=keys.longest,
        scale=scale,
        window_size=(n_keys_before, n_keys_after),
        enable_gqa=True,
        seqused_k=n_keys,
    )
    return output


@cache
def _find_kernel() -> Callable[..., Any] | None:
    """Torch's `varlen_attn`; the operator below it where that knows less, or `None` without one.

    `varlen_attn` has all arguments since torch 2.12 and lacks some in 2.10 and 2.11, but its
    operator has them from 2.8 on, in its backward too (read in the wheels).
    """
    with suppress(ImportError):
        from torch.nn.attention.varlen import varlen_attn

        parameters = inspect.signature(varlen_attn).parameters.keys()
        if {"window_size", "enable_gqa", "seqused_k"} <= parameters:
            return varlen_attn
    # private to torch, in its operators and in their schemas; a test calls the installed one
    operator = getattr(torch.ops.aten, "_flash_attention_forward", None)
    names = set() if operator is None else {a.name for a in operator.default._schema.arguments}
    needed = {"scale", "window_size_left", "window_size_right", "seqused_k"}
    return flash_attention_rows if needed <= names else None


def flash_attention_rows(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor | None,
) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn`, by its operator.

    Args:
        query: Queries by token, `[N, A, D]`.
        key: Keys by token, `[C, K, D]`.
        value: Values by token, `[C, K, D]`.
        cu_seq_q: Where the queries of each row begin and the last end, `[n+1]` int32.
        cu_seq_k: Where the room for the keys of each row begins and the last ends, `[n+1]` int32.
        max_q: Queries of the longest row.
        max_k: Room of the longest row.
        scale: Factor of the scores; `None`: `1 / sqrt(D)`.
        window_size: Tokens before and after a query that it attends to; -1: all.
        enable_gqa: Ignored: the operator shares keys among heads by itself.
        seqused_k: Keys that each row has in its room, `[n]` int32; `None` if they fill it.
    """
    n_keys_before, n_keys_after = window_size
    output: Tensor = torch.ops.aten._flash_attention_forward(
        query=query,
        key=key,
        value=value,
        cum_seq_q=cu_seq_q,
        cum_seq_k=cu_seq_k,
        max_q=max_q,
        max_k=max_k,
        dropout_p=0.0,
        is_causal=window_size == (-1, 0),
        return_debug_mask=False,
        scale=scale,
        window_size_left=n_keys_before,
        window_size_right=n_keys_after,
        seqused_k=seqused_k,
    )[0]
    return output
