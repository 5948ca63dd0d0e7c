"""Rotary positions whose factors depend on the longest row of a forward.

`longrope` (Phi-3, Phi-4-mini) and `dynamic` compute their factors anew in each forward, by its
longest row. So the log-probs of a row would change with its neighbours. A response's log-probs
would change while it grows: keys in the cache have the factors of a shorter sequence than the
queries. Here every forward has the same factors, for the longest possible sequence of a run.

Notation: `B` batch, `L` tokens.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig

from lit_rlhf.forward.networks import LanguageModel, forward_plan

FIXED_TYPES = {"default", "linear", "yarn", "llama3", "proportional"}
"""Types of transformers' rotary positions whose factors are the same in every forward."""

LONGEST_ATTRIBUTE = "_lit_rlhf_longest_sequence"
"""Where a module of rotary positions keeps the number of tokens that its factors are for."""


def varying_rotary_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules whose rotary factors depend on the longest row of a forward."""
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        types = set(rope_type.values()) if isinstance(rope_type, dict) else {rope_type}
        if types - FIXED_TYPES - {None}:
            yield module


def has_varying_positions(config: PreTrainedConfig) -> bool:
    """Whether a config asks for rotary factors that depend on the longest row of a forward."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    parts = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    return any(part.get("rope_type", "default") not in FIXED_TYPES for part in parts)


def set_longest_sequence(model: nn.Module, n_tokens: int) -> None:
    """Fix the rotary factors of networks for a run whose longest sequence has `n_tokens` tokens.

    Networks without factors that depend on the sequence stay as they are.

    Args:
        model: A network, or a module with several.
        n_tokens: Tokens of the longest sequence that any of them will read, positive.
    """
    for module in varying_rotary_modules(model):
        if not hasattr(module, LONGEST_ATTRIBUTE):
            module.register_forward_pre_hook(_add_last_position, with_kwargs=True)
            module.register_forward_hook(_drop_last_position)
        setattr(module, LONGEST_ATTRIBUTE, n_tokens)
        _forget_longer_sequences(module)


def longest_sequence(model: nn.Module) -> int | None:
    """The longest sequence that the rotary factors of a network are for; `None`: any.

    Until `set_longest_sequence`, these are sequences as long as in the model's first training,
    which have the same factors whatever the longest of them is.
    """
    modules = [*varying_rotary_modules(model)]
    lengths = [getattr(module, LONGEST_ATTRIBUTE, _original_length(module)) for module in modules]
    return min(lengths, default=None)


def check_lengths(model: LanguageModel, mask: Tensor) -> None:
    """Refuse rows that are longer than the sequences that the network's rotary factors are for.

    Args:
        model: The network.
        mask: Real tokens, `[B, L]` bool.
    """
    if not forward_plan(model).varying_positions:
        return
    longest = longest_sequence(model)
    assert longest is not None
    # the padded length is known without waiting for the device
    if mask.shape[1] > longest and (n_tokens := int(mask.sum(1).max())) > longest:
        raise_too_long(model, n_tokens)


def raise_too_long(model: nn.Module, n_tokens: int) -> None:
    """Raise ValueError for a sequence of more tokens than the rotary factors are for."""
    raise ValueError(
        f"mask: expected sequences of at most {longest_sequence(model)} tokens, got {n_tokens}: "
        f"the rotary positions of {type(model).__name__} have other factors for longer ones, which "
        "have to be the same in the whole run; call "
        "lit_rlhf.forward.set_longest_sequence(model, n_tokens) first, with the longest sequence "
        "of the run"
    )


def _original_length(module: nn.Module) -> int:
    """The longest sequence with the factors of the model's first training."""
    config: Any = module.config
    parameters = config.rope_parameters
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    lengths = [
        part["original_max_position_embeddings"]
        for part in (parameters, *by_layer_type)
        if part.get("original_max_position_embeddings")
    ]
    return int(min(lengths, default=config.max_position_embeddings))


def _forget_longer_sequences(module: nn.Module) -> None:
    """Undo what `dynamic` positions keep of longer sequences than the longest from now on."""
    rope_type: Any = module.rope_type
    prefixes = [f"{kind}_" for kind in rope_type] if isinstance(rope_type, dict) else [""]
    for prefix in prefixes:
        original = getattr(module, f"{prefix}original_inv_freq", None)
        if isinstance(original, Tensor):
            factors = module.get_buffer(f"{prefix}inv_freq")
            module.register_buffer(f"{prefix}inv_freq", original.to(factors, copy=True), False)
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def _add_last_position(module: nn.Module, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
    """Let the longest sequence of the run take part in a call of rotary positions."""
    last = getattr(module, LONGEST_ATTRIBUTE) - 1
    if "position_ids" in kwargs:
        extended = functional.pad(kwargs["position_ids"], (0, 1), value=last)
        return args, kwargs | {"position_ids": extended}
    states, position_ids, *others = args
    return (states, functional.pad(position_ids, (0, 1), value=last), *others), kwargs


def _drop_last_position(module: nn.Module, _: object, output: Any) -> Any:  # noqa: ANN401
    """Leave out what was computed for the position of `_add_last_position`."""
    if isinstance(output, Tensor):
        return output[..., :-1, :]
    return tuple(part[..., :-1, :] for part in output)
