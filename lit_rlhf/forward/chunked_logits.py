"""Chunked (selective) log-probs: logits for the target tokens only, a chunk at a time.

The logits of a sequence, `L x V` numbers, are larger than anything else in a language model. So
they are computed for the tokens to predict only, in chunks, and each chunk is reduced to a few
numbers per token before the next one is computed. Notation: `B` rows, `L` columns, `n` target
tokens, `H` hidden size, `V` vocabulary; `input_ids` is `[B, L]` long, and `mask`, `[B, L]` bool,
marks the real tokens. `target_mask`, `[B, L]` bool, marks the tokens to predict. Each follows a
real token, so column 0 has none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lit_rlhf.forward.networks import LanguageModel, supports_chunked_logits, unwrap_model
from lit_rlhf.forward.outputs import hidden_states, shift_to_predictors, token_logits
from lit_rlhf.functional import token_logprobs

CHUNK_SIZE = 2**24
"""Number of logits that exist at once: 64 MiB in float32."""

CPU_CHUNK_SIZE = 2**20
"""The same on a CPU without gradients: a chunk that fits into the processor's caches."""

LogitsFunction = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
"""Maps logits `[1, n, V]` and the tokens they predict, `[1, n]`, to tensors `[1, n]`."""


def logits_from_hidden(model: LanguageModel, lm_head: nn.Module, hidden: Tensor) -> Tensor:
    """Next-token logits `[..., V]` of an output layer on hidden states that are there already.

    Args:
        model: The model whose trunk computed `hidden`. Its config says what follows the output
            layer: soft-capping in Gemma 2, scaling in Cohere and Granite.
        lm_head: Output layer, see `load_lm_head`.
        hidden: Final hidden states, `[..., H]`.
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
    model: LanguageModel,
    input_ids: Tensor,
    mask: Tensor,
    target_mask: Tensor,
    function: LogitsFunction,
) -> tuple[Tensor, ...]:
    """Apply a function to the logits that predict the target tokens.

    Args:
        model: A causal language model.
        input_ids: Token ids.
        mask: Real tokens.
        target_mask: Tokens to predict.
        function: What to compute for each token. It is called once for each chunk, and in training
            again in the backward.

    Returns:
        Each output of `function` as `[B, L]`, 0 outside the target mask.
    """
    _check_targets(mask, target_mask)
    if supports_chunked_logits(model):
        lm_head = unwrap_model(model).get_output_embeddings()  # type: ignore[no-untyped-call]
        hidden = hidden_states(model, input_ids, mask)
        return _map_in_chunks(model, lm_head, hidden, input_ids, target_mask, function)
    # all logits exist here: a model whose plan has no chunked logits may change them in its forward
    logits = token_logits(model, input_ids, mask)[shift_to_predictors(target_mask)]
    outputs = function(logits.unsqueeze(0), input_ids[target_mask].unsqueeze(0))
    return _to_rectangle(outputs, target_mask)


def target_logprobs(
    model: LanguageModel,
    input_ids: Tensor,
    mask: Tensor,
    target_mask: Tensor,
    temperature: float = 1.0,
) -> Tensor:
    """Log-probs of the target tokens under a language model at a temperature.

    Returns:
        `[B, L]` float32, nats, 0 outside the target mask.
    """
    (logprobs,) = map_target_logits(
        model,
        input_ids,
        mask,
        target_mask,
        lambda logits, ids: (token_logprobs(logits, ids, temperature),),
    )
    return logprobs


def target_logprobs_from_hidden(
    model: LanguageModel,
    lm_head: nn.Module,
    hidden: Tensor,
    input_ids: Tensor,
    target_mask: Tensor,
) -> Tensor:
    """Log-probs of the target tokens from hidden states that are there already.

    Args:
        model: The model whose trunk computed `hidden`, see `logits_from_hidden`.
        lm_head: Output layer.
        hidden: Final hidden states, `[B, L, H]`.
        input_ids: Token ids.
        target_mask: Tokens to predict.

    Returns:
        `[B, L]` float32, nats, 0 outside the target mask.
    """
    (logprobs,) = _map_in_chunks(
        model,
        lm_head,
        hidden,
        input_ids,
        target_mask,
        lambda logits, ids: (token_logprobs(logits, ids),),
    )
    return logprobs


def _map_in_chunks(
    model: LanguageModel,
    lm_head: nn.Module,
    hidden: Tensor,
    input_ids: Tensor,
    target_mask: Tensor,
    function: LogitsFunction,
) -> tuple[Tensor, ...]:
    def map_chunk(states: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        logits = logits_from_hidden(model, lm_head, states.unsqueeze(0))
        return function(logits, tokens.unsqueeze(0))

    tokens, states = input_ids[target_mask], hidden[shift_to_predictors(target_mask)]
    training = torch.is_grad_enabled()
    on_cpu = states.device.type == "cpu"
    n_logits = CPU_CHUNK_SIZE if on_cpu and not training else CHUNK_SIZE
    size = max(n_logits // unwrap_model(model).config.vocab_size, 1)
    if len(tokens) <= size:
        return _to_rectangle(map_chunk(states, tokens), target_mask)
    # autograd would keep the logits of every chunk for the backward, so they are recomputed there
    chunks = [
        checkpoint(map_chunk, *chunk, use_reentrant=False) if training else map_chunk(*chunk)
        for chunk in zip(torch.split(states, size), torch.split(tokens, size), strict=True)
    ]
    outputs = tuple(torch.cat(parts, dim=1) for parts in zip(*chunks, strict=True))
    return _to_rectangle(outputs, target_mask)


def _to_rectangle(outputs: tuple[Tensor, ...], target_mask: Tensor) -> tuple[Tensor, ...]:
    return tuple(
        output.new_zeros(target_mask.shape).masked_scatter(target_mask, output.squeeze(0))
        for output in outputs
    )


def _check_targets(mask: Tensor, target_mask: Tensor) -> None:
    if target_mask.shape != mask.shape or target_mask.dtype != torch.bool:
        raise ValueError(
            f"target_mask: expected the mask's shape {tuple(mask.shape)} and dtype bool, "
            f"got {tuple(target_mask.shape)} and {target_mask.dtype}"
        )
    if bool(target_mask[:, 0].any()) or bool((target_mask[:, 1:] & ~mask[:, :-1]).any()):
        raise ValueError(
            "target_mask: expected tokens that follow a real token, got one that does not"
        )
