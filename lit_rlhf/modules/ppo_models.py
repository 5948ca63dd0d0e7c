"""The networks that PPO starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from lit_rlhf.forward import LanguageModel, Offloaded, freeze
from lit_rlhf.models import ModelOptions, load_causal_lm, load_scalar_model, random_scalar_model
from lit_rlhf.rewards import ModelReward

CriticInit = Literal["reward", "policy", "random"]


def reference_policy(
    model_path: str, options: ModelOptions, offload: bool = False
) -> LanguageModel | Offloaded | None:
    """A frozen SFT model; `None` with LoRA: the policy with its adapters off is the reference.

    Args:
        model_path: The SFT model.
        options: How it is loaded, gradient checkpointing apart.
        offload: Keep it in CPU memory between uses.
    """
    if options.lora_rank > 0:
        return None
    model = freeze(load_causal_lm(model_path, replace(options, gradient_checkpointing=False)))
    return Offloaded(model) if offload else model


def initial_critic(
    init: CriticInit,
    model_path: str,
    rewards: Sequence[ModelReward],
    options: ModelOptions,
    seed: int,
) -> LanguageModel:
    """The critic that PPO starts from.

    Args:
        init: `reward`: the first reward model; `policy`: the SFT model with a new head; `random`:
            random weights of the SFT model's shape.
        model_path: The SFT model.
        rewards: The reward models in their order.
        options: How the critic is loaded.
        seed: Of new weights.

    Raises:
        ValueError: If `init` is unknown, or `reward` and no source is a reward model.
    """
    source = critic_source(init, model_path, [model.path for model in rewards])
    if init == "random":
        return random_scalar_model(source, options, seed)
    return load_scalar_model(source, options, head_seed=seed if init == "policy" else 0)


def critic_source(init: CriticInit, model_path: str, models: Sequence[str]) -> str:
    """Folder or hub id of the model whose shape the critic has, see `initial_critic`.

    Args:
        init: What the critic starts from.
        model_path: The SFT model.
        models: Those of the reward models in their order.

    Raises:
        ValueError: If `init` is unknown, or `reward` and no source is a reward model.
    """
    if init in ("random", "policy"):
        return model_path
    if init != "reward":
        raise ValueError(f"critic_init: expected one of {get_args(CriticInit)}, got {init!r}")
    if not models:
        raise ValueError(
            "critic_init: 'reward' needs a reward model among `rewards`, which holds functions and "
            "rules only; use critic_init: policy"
        )
    return models[0]
