"""Hidden states, logits, log-probs, values and scores of the four networks of PPO.

Padding may be on either side or on both: position ids come from the mask, so the position of a
token is its place among the real tokens. The logits of whole sequences, `L x V` numbers each, are
larger than anything else in a language model. So training and scoring compute them for the target
tokens only, in chunks, each of which is reduced to a few numbers per token before the next one.

Notation: `B` batch, `P` prompt tokens, `T` response tokens, `L` sequence tokens, `n` target tokens,
`V` vocabulary, `H` hidden size. Everywhere `input_ids` is `[B, L]` long, and `mask`, `[B, L]` bool,
marks the real tokens; outputs elsewhere have no meaning. `target_mask`, `[B, L]` bool, marks the
tokens to predict. Each follows a real token, so column 0 has none.
"""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lit_rlhf.forward.networks import (
    LanguageModel,
    forward_plan,
    scalar_head_of,
    trunk_of,
    unwrap_model,
)
from lit_rlhf.forward.packing import packed_states
from lit_rlhf.forward.positions import check_lengths
from lit_rlhf.forward.vocabulary import rule_out_in_logits
from lit_rlhf.functional import token_logprobs
from lit_rlhf.tensor_checks import check_ids, check_mask

CHUNK_SIZE = 2**24
"""Number of logits that exist at once: 64 MiB in float32."""

CPU_CHUNK_SIZE = 2**20
"""The same on a CPU without gradients: a chunk that fits into the processor's caches."""

CUDA_CHUNK_SIZE = 2**27
"""The same on CUDA: 4,096 tokens with a vocabulary of 32k.

Each chunk reads, and under autocast casts, the whole output layer, which costs more than the logits
of a few hundred tokens.
"""

LogitsFunction = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
"""Maps logits `[1, n, V]` and the tokens they predict, `[1, n]`, to tensors `[1, n]`."""


def logits_per_chunk(device: torch.device, *, training: bool) -> int:
    """Number of logits that exist at once.

    Args:
        device: Device of the logits.
        training: Whether they have gradients.
    """
    if device.type == "cuda":
        return CUDA_CHUNK_SIZE
    return CPU_CHUNK_SIZE if device.type == "cpu" and not training else CHUNK_SIZE


def hidden_states(
    model: LanguageModel, input_ids: Tensor, mask: Tensor, lower: Tensor | None = None
) -> Tensor:
    """Final hidden states of the trunk, `[B, L, H]`, packed where the model's plan says so.

    Args:
        model: A language model or a scalar model.
        input_ids: Token ids, `[B, L]` long.
        mask: Real tokens, `[B, L]` bool.
        lower: Outputs of the layers below the trained ones, `[B, L, H]`, see `LowerStates`. `None`
            computes them.
    """
    trunk = trunk_of(model)
    plan = forward_plan(model)
    check_lengths(model, mask)
    if plan.packed:
        return packed_states(
            trunk,
            input_ids,
            mask,
            padding=plan.token_padding,
            n_lower=plan.lower_layers,
            lower=lower,
        )
    states: Tensor = trunk(**_arguments(trunk, input_ids, mask)).last_hidden_state
    return states


def token_logits(model: LanguageModel, input_ids: Tensor, mask: Tensor) -> Tensor:
    """Next-token logits of a causal language model, `[B, L, V]`, in its dtype.

    Args:
        model: A language model.
        input_ids: Token ids, `[B, L]` long.
        mask: Real tokens, `[B, L]` bool.
    """
    inner = unwrap_model(model)
    check_lengths(model, mask)
    logits: Tensor = inner(**_arguments(inner, input_ids, mask)).logits
    return logits


def response_logits(
    model: LanguageModel, input_ids: Tensor, mask: Tensor, response_length: int
) -> Tensor:
    """Logits `[B, T, V]` that predict each of the last `T` of `P+T` tokens.

    Args:
        model: A language model.
        input_ids: Prompts followed by responses, `[B, P+T]` long.
        mask: Real tokens, `[B, P+T]` bool.
        response_length: `T`, from 1 to `P+T-1`.
    """
    _check_response_length(response_length, input_ids)
    inner = unwrap_model(model)
    check_lengths(model, mask)
    arguments = _arguments(inner, input_ids, mask)
    # the model drops the other positions before its head, so that soft-capping and scaling apply
    if _accepts(inner, "logits_to_keep"):
        arguments["logits_to_keep"] = response_length + 1
    logits: Tensor = inner(**arguments).logits
    return logits[:, -response_length - 1 : -1]


def logits_from_hidden(model: LanguageModel, lm_head: nn.Module, hidden: Tensor) -> Tensor:
    """Next-token logits `[..., V]` of an output layer on hidden states.

    Args:
        model: The model that computed the hidden states. Its config says what follows the layer:
            soft-capping in Gemma 2, scaling in Cohere and Granite. Ids that it rules out get -inf.
        lm_head: The output layer.
        hidden: Hidden states, `[..., H]`.
    """
    config = unwrap_model(model).config
    logits: Tensor = lm_head(hidden)
    if (scale := getattr(config, "logit_scale", None)) is not None:
        logits = logits * scale
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        logits = logits / divisor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = cap * torch.tanh(logits / cap)
    return rule_out_in_logits(model, logits)


def map_target_logits(
    model: LanguageModel,
    input_ids: Tensor,
    mask: Tensor,
    target_mask: Tensor,
    function: LogitsFunction,
    *,
    hidden: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Apply a function to the logits that predict the target tokens.

    Args:
        model: A language model.
        input_ids: Token ids, `[B, L]` long.
        mask: Real tokens, `[B, L]` bool.
        target_mask: Tokens to predict, `[B, L]` bool. Each follows a real token.
        function: Called once for each chunk of logits, and in training again in the backward.
        hidden: The `hidden_states`, `[B, L, H]`, if they are there already. Only a model with
            chunked logits uses them.

    Returns:
        The outputs of the function, `[B, L]` each, 0 at other tokens.
    """
    check_mask(mask.shape, target_mask=target_mask)
    if bool(target_mask[:, 0].any()) or bool((target_mask[:, 1:] & ~mask[:, :-1]).any()):
        raise ValueError(
            "target_mask: expected tokens that follow a real token, got one that does not"
        )
    if forward_plan(model).chunked_logits:
        lm_head = unwrap_model(model).get_output_embeddings()  # type: ignore[no-untyped-call]
        if hidden is None:
            hidden = hidden_states(model, input_ids, mask)
        targets = Targets(hidden[predictor_mask(target_mask)], input_ids[target_mask])
        outputs = _map_in_chunks(model, lm_head, targets, function)
        return _to_rectangle(outputs, target_mask)
    # all logits exist here: a model whose plan has no chunked logits may change them in its forward
    logits = token_logits(model, input_ids, mask)[predictor_mask(target_mask)]
    outputs = function(logits.unsqueeze(0), input_ids[target_mask].unsqueeze(0))
    return _to_rectangle(outputs, target_mask)


def target_logprobs(
    model: LanguageModel, input_ids: Tensor, mask: Tensor, target_mask: Tensor
) -> Tensor:
    """Log-probs of the target tokens, `[B, L]` float32, nats; 0 elsewhere.

    Args:
        model: A language model.
        input_ids: Token ids, `[B, L]` long.
        mask: Real tokens, `[B, L]` bool.
        target_mask: Tokens to predict, `[B, L]` bool. Each follows a real token.
    """
    return map_target_logits(model, input_ids, mask, target_mask, _logprobs_in_tuple)[0]


def target_logprobs_from_hidden(
    model: LanguageModel, lm_head: nn.Module, hidden: Tensor, input_ids: Tensor, target_mask: Tensor
) -> Tensor:
    """`target_logprobs` from hidden states that are there already.

    Args:
        model: The model that computed the hidden states, see `logits_from_hidden`.
        lm_head: The output layer.
        hidden: Hidden states, `[B, L, H]`.
        input_ids: Token ids, `[B, L]` long.
        target_mask: Tokens to predict, `[B, L]` bool. Each follows a real token.
    """
    targets = Targets(hidden[predictor_mask(target_mask)], input_ids[target_mask])
    outputs = _map_in_chunks(model, lm_head, targets, _logprobs_in_tuple)
    return _to_rectangle(outputs, target_mask)[0]


def _logprobs_in_tuple(logits: Tensor, token_ids: Tensor) -> tuple[Tensor]:
    return (token_logprobs(logits, token_ids),)


class Targets(NamedTuple):
    """`n` tokens to predict, of all rows.

    Attributes:
        states: The hidden states that predict them, `[n, H]`.
        token_ids: The tokens, `[n]` long.
    """

    states: Tensor
    token_ids: Tensor


def _map_in_chunks(
    model: LanguageModel, lm_head: nn.Module, targets: Targets, function: LogitsFunction
) -> tuple[Tensor, ...]:
    """Outputs of a function of the targets' logits, `[1, n]` each."""

    def map_chunk(states: Tensor, token_ids: Tensor) -> tuple[Tensor, ...]:
        logits = logits_from_hidden(model, lm_head, states.unsqueeze(0))
        return function(logits, token_ids.unsqueeze(0))

    training = torch.is_grad_enabled()
    n_logits = logits_per_chunk(targets.states.device, training=training)
    size = max(n_logits // unwrap_model(model).config.vocab_size, 1)
    if len(targets.token_ids) <= size:
        return map_chunk(targets.states, targets.token_ids)
    # autograd would keep the logits of every chunk for the backward, so they are recomputed there
    chunks = [
        checkpoint(map_chunk, states, ids, use_reentrant=False)
        if training
        else map_chunk(states, ids)
        for states, ids in zip(*(torch.split(tensor, size) for tensor in targets), strict=True)
    ]
    return tuple(torch.cat(parts, dim=1) for parts in zip(*chunks, strict=True))


def _to_rectangle(outputs: tuple[Tensor, ...], target_mask: Tensor) -> tuple[Tensor, ...]:
    return tuple(
        output.new_zeros(target_mask.shape).masked_scatter(target_mask, output.squeeze(0))
        for output in outputs
    )


def token_values(
    model: LanguageModel, input_ids: Tensor, mask: Tensor, lower: Tensor | None = None
) -> Tensor:
    """V of the state after each token, `[B, L]` float32.

    Args:
        model: A scalar model.
        input_ids: Token ids, `[B, L]` long.
        mask: Real tokens, `[B, L]` bool.
        lower: Outputs of the layers below the trained ones, as for `hidden_states`.
    """
    return _apply_scalar_head(model, hidden_states(model, input_ids, mask, lower))


def response_values(
    model: LanguageModel,
    input_ids: Tensor,
    mask: Tensor,
    response_length: int,
    *,
    lower: Tensor | None = None,
    hidden: Tensor | None = None,
) -> Tensor:
    """V(s_t) for each of the last `T` of `P+T` tokens, `[B, T]` float32, read before the token.

    V(s_{T+1}), of the state after the response, is in `token_values` at the response's last token.

    Args:
        model: A scalar model.
        input_ids: Prompts followed by responses, `[B, P+T]` long.
        mask: Real tokens, `[B, P+T]` bool.
        response_length: `T`, from 1 to `P+T-1`.
        lower: Outputs of the layers below the trained ones, as for `hidden_states`.
        hidden: The `hidden_states`, `[B, P+T, H]`, if they are there already.
    """
    _check_response_length(response_length, input_ids)
    # the last column is no state before a token, so it need not be computed
    if hidden is None:
        lower = None if lower is None else lower[:, :-1]
        values = token_values(model, input_ids[:, :-1], mask[:, :-1], lower)
    else:
        values = _apply_scalar_head(model, hidden[:, :-1])
    return values[:, -response_length:]


def scores_from_hidden(model: LanguageModel, hidden: Tensor, mask: Tensor) -> Tensor:
    """`sequence_scores` from hidden states that are there already.

    Args:
        model: A scalar model.
        hidden: Hidden states, `[B, L, H]`.
        mask: Real tokens, `[B, L]` bool, at least one in each row.
    """
    check_mask(hidden.shape[:2], mask=mask)
    if not bool(mask.any(dim=1).all()):
        raise ValueError("mask: expected at least one True in each row, got a row without any")
    columns = torch.arange(mask.shape[1], device=mask.device)
    last = (columns * mask).argmax(dim=1)
    rows = torch.arange(len(mask), device=mask.device)
    return _apply_scalar_head(model, hidden[rows, last])


def sequence_scores(model: LanguageModel, input_ids: Tensor, mask: Tensor) -> Tensor:
    """Score of each sequence: the output at its last real token, `[B]` or `[B, K]` float32.

    Args:
        model: A scalar model with one head or `K` heads.
        input_ids: Token ids, `[B, L]` long.
        mask: Real tokens, `[B, L]` bool, at least one in each row.
    """
    return scores_from_hidden(model, hidden_states(model, input_ids, mask), mask)


def predictor_mask(target_mask: Tensor) -> Tensor:
    """Tokens whose hidden states predict the targets, `[B, L]` bool: one column to the left.

    The token in column 0 is predicted by none, so it is never a target.
    """
    return functional.pad(target_mask[:, 1:], (0, 1))


def _accepts(module: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(module.forward).parameters


def _arguments(
    module: nn.Module, input_ids: Tensor, mask: Tensor
) -> dict[str, Tensor | int | bool]:
    """Arguments of a padded forward; decoders without `position_ids` count them by the mask."""
    check_ids(2, input_ids=input_ids)
    check_mask(input_ids.shape, mask=mask)
    arguments: dict[str, Tensor | int | bool] = {
        "input_ids": input_ids,
        "attention_mask": mask.long(),
        "use_cache": False,
    }
    if _accepts(module, "position_ids"):
        arguments["position_ids"] = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
    return arguments


def _check_response_length(response_length: int, input_ids: Tensor) -> None:
    length = input_ids.shape[-1]
    if not 1 <= response_length < length:
        raise ValueError(
            f"response_length: expected a number from 1 to {length - 1}, so that at least one "
            f"prompt token precedes the response, got {response_length}"
        )


def _apply_scalar_head(model: LanguageModel, hidden: Tensor) -> Tensor:
    """The output on hidden states `[..., H]`, `[...]` float32; of `K` > 1 heads `[..., K]`."""
    head = scalar_head_of(model)
    # with LoRA the head is float32, also over a trunk in bfloat16
    outputs: Tensor = head(hidden.to(getattr(head, "weight", hidden).dtype))
    return outputs.squeeze(-1).float()
