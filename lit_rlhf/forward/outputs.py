"""Hidden states, logits, values and scores of policy, reference, critic and reward model.

Padding may be on either side or on both: position ids come from the mask, so the position of a
token is its place among the real tokens. Notation: `B` batch, `P` prompt tokens, `T` response
tokens, `L` sequence tokens, `V` vocabulary, `H` hidden size. Everywhere `input_ids` is `[B, L]`
long, and `mask`, `[B, L]` bool, marks the real tokens; outputs elsewhere have no meaning.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn
from torch.nn import functional

from lit_rlhf.forward.networks import (
    LanguageModel,
    forward_plan,
    scalar_head_of,
    trunk_of,
    unwrap_model,
)
from lit_rlhf.forward.packing import packed_states


def position_ids_from_mask(mask: Tensor) -> Tensor:
    """Position of each token among the real tokens, `cumsum(mask) - 1` and at least 0, `[B, L]`."""
    _check_mask(mask)
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


def token_logits(
    model: LanguageModel, input_ids: Tensor, mask: Tensor, last: int | None = None
) -> Tensor:
    """Next-token logits of a causal language model, `[B, L, V]` or `[B, last, V]`, in its dtype.

    Args:
        model: The language model.
        input_ids: Token ids.
        mask: Real tokens.
        last: Number of positions at the end to compute logits for, which takes `last / L` of the
            memory; `None` computes all.
    """
    _check_tokens(input_ids, mask)
    length = input_ids.shape[1]
    if last is not None and not 1 <= last <= length:
        raise ValueError(f"last: expected a number from 1 to {length}, got {last}")
    inner = unwrap_model(model)
    arguments = _arguments(inner, input_ids, mask)
    # the model drops the other positions before its head, so that soft-capping and scaling apply
    if last is not None and _accepts(inner, "logits_to_keep"):
        arguments["logits_to_keep"] = last
    logits: Tensor = inner(**arguments).logits
    return logits if last is None else logits[:, -last:]


def response_logits(
    model: LanguageModel, input_ids: Tensor, mask: Tensor, response_length: int
) -> Tensor:
    """Logits that predict each of the last `T` tokens, read at the position before it.

    Args:
        model: The language model.
        input_ids: Prompts followed by responses, `[B, P+T]`.
        mask: Real tokens.
        response_length: `T`.

    Returns:
        `[B, T, V]`.
    """
    _check_tokens(input_ids, mask)
    _check_response_length(response_length, input_ids.shape[1])
    return token_logits(model, input_ids, mask, last=response_length + 1)[:, :-1]


def hidden_states(model: LanguageModel, input_ids: Tensor, mask: Tensor) -> Tensor:
    """Final hidden states of the trunk, `[B, L, H]`, packed where the model's plan says so."""
    _check_tokens(input_ids, mask)
    trunk, plan = trunk_of(model), forward_plan(model)
    if plan.packed:
        return packed_states(trunk, input_ids, mask, plan.token_padding)
    states: Tensor = trunk(**_arguments(trunk, input_ids, mask)).last_hidden_state
    return states


def token_values(model: LanguageModel, input_ids: Tensor, mask: Tensor) -> Tensor:
    """The scalar head's output at every token, which is V of the state that ends with this token.

    Returns:
        `[B, L]` float32.
    """
    return _apply_scalar_head(model, hidden_states(model, input_ids, mask))


def response_values(
    model: LanguageModel, input_ids: Tensor, mask: Tensor, response_length: int
) -> Tensor:
    """V(s_t) for each of the last `T` tokens, read at the position before it, as its logits are.

    V(s_{T+1}), of the state after the response, is in `token_values` at the response's last token.

    Args:
        model: A scalar model (critic).
        input_ids: Prompts followed by responses, `[B, P+T]`.
        mask: Real tokens.
        response_length: `T`.

    Returns:
        `[B, T]` float32.
    """
    _check_tokens(input_ids, mask)
    _check_response_length(response_length, input_ids.shape[1])
    # the last column is no state before a token, so it need not be computed
    return token_values(model, input_ids[:, :-1], mask[:, :-1])[:, -response_length:]


def scores_from_hidden(model: LanguageModel, hidden: Tensor, mask: Tensor) -> Tensor:
    """`sequence_scores`, `[B]` float32, from hidden states `[B, L, H]` that are there already."""
    _check_mask(mask)
    if hidden.dim() != 3 or hidden.shape[:2] != mask.shape:
        raise ValueError(
            f"hidden: expected shape [B, L, H] for a mask of shape {tuple(mask.shape)}, "
            f"got {tuple(hidden.shape)}"
        )
    if not bool(mask.any(dim=1).all()):
        raise ValueError("mask: expected at least one True in each row, got a row without any")
    columns = torch.arange(mask.shape[1], device=mask.device)
    last = (columns * mask).argmax(dim=1)
    rows = torch.arange(len(mask), device=mask.device)
    return _apply_scalar_head(model, hidden[rows, last])


def sequence_scores(model: LanguageModel, input_ids: Tensor, mask: Tensor) -> Tensor:
    """Score of each sequence, `[B]` float32: the scalar head's output at its last real token."""
    return scores_from_hidden(model, hidden_states(model, input_ids, mask), mask)


def shift_to_predictors(target_mask: Tensor) -> Tensor:
    """Mask of the tokens whose hidden states predict the targets; no target is in column 0."""
    return functional.pad(target_mask[:, 1:], (0, 1))


def _accepts(module: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(module.forward).parameters


def _arguments(
    module: nn.Module, input_ids: Tensor, mask: Tensor
) -> dict[str, Tensor | int | bool]:
    """Arguments of a padded forward; decoders without `position_ids` count them by the mask."""
    arguments: dict[str, Tensor | int | bool] = {
        "input_ids": input_ids,
        "attention_mask": mask.long(),
        "use_cache": False,
    }
    if _accepts(module, "position_ids"):
        arguments["position_ids"] = position_ids_from_mask(mask)
    return arguments


def _check_mask(mask: Tensor) -> None:
    if mask.dim() != 2 or mask.dtype != torch.bool:
        raise ValueError(
            f"mask: expected shape [B, L] and dtype bool, got {tuple(mask.shape)} and {mask.dtype}"
        )


def _check_tokens(input_ids: Tensor, mask: Tensor) -> None:
    if input_ids.dim() != 2 or input_ids.dtype != torch.long:
        raise ValueError(
            "input_ids: expected shape [B, L] and dtype int64, "
            f"got {tuple(input_ids.shape)} and {input_ids.dtype}"
        )
    _check_mask(mask)
    if mask.shape != input_ids.shape:
        raise ValueError(
            f"mask: expected input_ids' shape {tuple(input_ids.shape)}, got {tuple(mask.shape)}"
        )


def _check_response_length(response_length: int, length: int) -> None:
    if not 1 <= response_length < length:
        raise ValueError(
            f"response_length: expected a number from 1 to {length - 1}, so that at least one "
            f"prompt token precedes the response, got {response_length}"
        )


def _apply_scalar_head(model: LanguageModel, hidden: Tensor) -> Tensor:
    """The head's output on hidden states `[..., H]`, as `[...]` float32."""
    head = scalar_head_of(model)
    # with LoRA the head is float32, also over a trunk in bfloat16
    outputs: Tensor = head(hidden.to(getattr(head, "weight", hidden).dtype))
    return outputs.squeeze(-1).float()
