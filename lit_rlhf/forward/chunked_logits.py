"""Logits of the tokens that are asked about, and of no others, a bounded number at a time.

The logits of a sequence are larger than anything else in a language model: `L x V` numbers. So they
are computed where a token is scored, in chunks, and each chunk is reduced to what is read from it.
Notation: `B` rows, `L` columns, `n` targets, `H` hidden size, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from lit_rlhf.forward.networks import LanguageModel, trunk_of, unwrap_model
from lit_rlhf.forward.outputs import before, hidden_states, token_logits
from lit_rlhf.forward.packing import supports_packing
from lit_rlhf.forward.probe import same_outputs, trying_out

CHUNK = 2**24
"""Logits that exist at once: 64 MiB in float32."""

CPU_CHUNK = 2**20
"""The same without gradients on a CPU: what its caches hold."""

LogitsFunction = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
"""From logits `[1, n, V]` and the tokens that they are of, `[1, n]`, to tensors `[1, n]`."""


def head_logits(model: LanguageModel, lm_head: nn.Module, hidden: Tensor) -> Tensor:
    """Next-token logits of `lm_head` on a trunk's hidden states.

    Args:
        model: The model whose trunk gave `hidden`; its config says what follows the output layer
            (soft-capping in Gemma 2, scaling in Cohere and Granite).
        lm_head: Output layer, see `load_lm_head`.
        hidden: `[..., H]`.

    Returns:
        `[..., V]`.
    """
    config = unwrap_model(model).config
    logits: Tensor = lm_head(hidden)
    scale = getattr(config, "logit_scale", None)
    if scale is not None:
        logits = logits * scale
    divisor = getattr(config, "logits_scaling", None)
    if divisor is not None:
        logits = logits / divisor
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    return logits


def map_target_logits(
    model: LanguageModel, input_ids: Tensor, mask: Tensor, targets: Tensor, read: LogitsFunction
) -> tuple[Tensor, ...]:
    """What is read from the logits that predict the target tokens.

    Args:
        model: A causal language model.
        input_ids: Token ids, `[B, L]` long.
        mask: Real tokens, `[B, L]` bool.
        targets: Which tokens to predict, `[B, L]` bool; each follows a real token, so none is in
            column 0.
        read: What to read, token by token. It is called once for each chunk.

    Returns:
        Each reading as `[B, L]`, 0 where there is no target.

    Raises:
        ValueError: If shapes or dtypes do not fit, or a target follows no real token.
    """
    _check_targets(mask, targets)
    if supports_chunked_logits(model):
        head = unwrap_model(model).get_output_embeddings()  # type: ignore[no-untyped-call]
        states = hidden_states(model, input_ids, mask)
        return map_state_logits(model, head, states, input_ids, targets, read)
    logits = token_logits(model, input_ids, mask)[before(targets)]
    return _spread(_flat(read(logits.unsqueeze(0), input_ids[targets].unsqueeze(0))), targets)


def map_state_logits(
    model: LanguageModel,
    head: nn.Module,
    states: Tensor,
    input_ids: Tensor,
    targets: Tensor,
    read: LogitsFunction,
) -> tuple[Tensor, ...]:
    """`map_target_logits` by an output layer on hidden states that are there already.

    The logits exist one chunk at a time. In training a chunk's are computed again in the backward,
    unless there is only one.

    Args:
        model: The model whose trunk gave `states`, see `head_logits`.
        head: Output layer.
        states: Hidden states, `[B, L, H]`.
        input_ids: Token ids, `[B, L]` long.
        targets: Which tokens to predict, `[B, L]` bool, none in column 0.
        read: What to read.

    Returns:
        Each reading as `[B, L]`, 0 where there is no target.
    """

    def readings(states: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        logits = head_logits(model, head, states.unsqueeze(0))
        return _flat(read(logits, tokens.unsqueeze(0)))

    tokens, states = input_ids[targets], states[before(targets)]
    again = torch.is_grad_enabled()
    chunk = CHUNK if again or states.device.type != "cpu" else CPU_CHUNK
    size = max(chunk // unwrap_model(model).config.vocab_size, 1)
    if len(tokens) <= size:
        return _spread(readings(states, tokens), targets)
    parts = [
        checkpoint(
            readings,
            states[start : start + size],
            tokens[start : start + size],
            use_reentrant=False,
        )
        if again
        else readings(states[start : start + size], tokens[start : start + size])
        for start in range(0, len(tokens), size)
    ]
    return _spread(tuple(torch.cat(part) for part in zip(*parts, strict=True)), targets)


def supports_chunked_logits(model: LanguageModel) -> bool:
    """Whether trunk and output layer, one after the other, are the model; tried once for each."""
    inner = unwrap_model(model)
    if not hasattr(inner, "_lit_rlhf_reads_apart"):
        inner._lit_rlhf_reads_apart = _tried(inner)  # type: ignore[assignment]
    return bool(inner._lit_rlhf_reads_apart)


def _tried(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, nn.Module) or not supports_packing(trunk_of(model)):
        return False
    ids = torch.arange(4, device=model.device).unsqueeze(0)
    mask = torch.ones_like(ids, dtype=torch.bool)
    with trying_out(model, model.device):
        expected = token_logits(model, ids, mask)
        return same_outputs(head_logits(model, head, hidden_states(model, ids, mask)), expected)


def _spread(readings: tuple[Tensor, ...], targets: Tensor) -> tuple[Tensor, ...]:
    return tuple(
        reading.new_zeros(targets.shape).masked_scatter(targets, reading) for reading in readings
    )


def _flat(readings: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(reading.squeeze(0) for reading in readings)


def _check_targets(mask: Tensor, targets: Tensor) -> None:
    if targets.shape != mask.shape or targets.dtype != torch.bool:
        raise ValueError(
            f"targets: expected the mask's shape {tuple(mask.shape)} and dtype bool, "
            f"got {tuple(targets.shape)} and {targets.dtype}"
        )
    if bool(targets[:, 0].any()) or bool((targets[:, 1:] & ~mask[:, :-1]).any()):
        raise ValueError("targets: expected tokens that follow a real token, got one that does not")
