"""What a checkpoint of PPO holds of the module's state, and under which names."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from lit_rlhf.modules.resume import fill_buffers

_FROZEN = ("reference.", "reward.functions.")
"""Keys of the networks that do not change, and which checkpoints leave out."""
_ALGORITHM = "ppo."
"""Prefix of the algorithm's own state in the module. Checkpoints hold that state without it."""
_REWARD_SETTINGS = {"rewards", "reward_shaping.ensemble", "weights of the reward models"}
"""Settings that decide which rewards, or heads of them, running moments belong to."""


def drop_frozen(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict without the weights of reference and reward models, which do not change."""
    return {key: value for key, value in state.items() if not key.startswith(_FROZEN)}


def complete_state(
    module: nn.Module, saved: Mapping[str, Any], changed: set[str]
) -> dict[str, Any]:
    """Complete the state in a checkpoint, so that a module can load it strictly.

    The module keeps its own frozen weights, which come from their folders, and its own value of
    what changed settings have started anew.

    Args:
        module: The module, with a `PPO` as its child `ppo`.
        saved: The state dict in the checkpoint.
        changed: Dotted names of settings that differ from the checkpoint's.
    """
    own_prefixes: tuple[str, ...] = _FROZEN
    if changed & _REWARD_SETTINGS:
        own_prefixes = (*own_prefixes, "reward.moments.")
    if "reward_shaping.kl_coef" in changed:
        own_prefixes = (*own_prefixes, "kl_coef")
    own_state = {
        key: value for key, value in module.state_dict().items() if key.startswith(own_prefixes)
    }
    loaded = {key: value for key, value in saved.items() if not key.startswith(own_prefixes)}
    return own_state | fill_buffers(module, loaded)


def name_state_as_saved(module: nn.Module) -> None:
    """Have state dicts of a module name the algorithm's state as checkpoints do.

    So its `ppo.kl_coef` is `kl_coef` in a checkpoint, wherever the module keeps its algorithm.
    """
    # torch declares no types for these two
    module.register_state_dict_post_hook(_drop_prefix)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]


def _drop_prefix(
    module: nn.Module, state: dict[str, Any], prefix: str, _: Mapping[str, Any]
) -> None:
    for key in [key for key in state if key.startswith(prefix + _ALGORITHM)]:
        state[prefix + key.removeprefix(prefix + _ALGORITHM)] = state.pop(key)


def _add_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    for name in module.get_submodule("ppo").state_dict():
        if prefix + name in state:
            state[prefix + _ALGORITHM + name] = state.pop(prefix + name)
