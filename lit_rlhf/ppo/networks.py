"""The networks beside the policy: the reference, and the critic that PPO starts from."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from lit_rlhf.forward import LanguageModel, Offloaded, freeze
from lit_rlhf.models import (
    ModelOptions,
    add_value_head,
    build_random_scalar_model,
    load_causal_lm,
    load_scalar_model,
)
from lit_rlhf.rewards import ModelReward

CriticInit = Literal["reward", "policy", "random", "shared"]


def load_reference(
    model_path: str, options: ModelOptions, offload: bool = False, shard: bool = False
) -> LanguageModel | Offloaded | None:
    """The frozen SFT model; `None` with LoRA, where the policy without its adapters is that model.

    Between uses it is in CPU memory with `offload`, and each rank keeps a share of it with `shard`.
    """
    if options.lora_rank > 0:
        return None
    model = freeze(load_causal_lm(model_path, replace(options, gradient_checkpointing=False)))
    return Offloaded(model, offload, shard) if offload or shard else model


def load_critic(
    init: CriticInit | str,
    model_path: str,
    policy: LanguageModel,
    rewards: Sequence[ModelReward],
    options: ModelOptions,
    seed: int,
) -> LanguageModel:
    """The critic that PPO starts from, loaded with `options` and with new weights by `seed`.

    It is the first reward model (`reward`), the SFT model with a new head (`policy`), random
    weights in the shape of the SFT model (`random`), a new head on the policy's own trunk
    (`shared`), or the critic in a folder. With LoRA it has its frozen weights in common with the
    policy or the reward model that it starts from.
    """
    if init == "shared":
        return add_value_head(policy, seed)
    source = critic_source(init, model_path, [model.path for model in rewards])
    if init == "reward" and rewards[0].own_text is not None:
        raise ValueError(
            "critic_init: expected 'policy' or 'random', got 'reward': reward model "
            f"{source!r} has another tokenizer than the policy, whose token ids the critic reads"
        )
    if init == "random":
        if options.load_in_4bit:
            raise ValueError(
                "critic_init: expected 'policy' or 'reward' with network.load_in_4bit, got "
                "'random': 4-bit weights come from a folder"
            )
        return build_random_scalar_model(source, options, seed)
    base: LanguageModel | None = None
    if options.lora_rank > 0 and init in ("policy", "reward"):
        base = policy if init == "policy" else rewards[0].find_base(options)
    # only the policy has no scalar head of its own
    head_seed = seed if init == "policy" else None
    critic = load_scalar_model(source, options, head_seed=head_seed, base=base)
    sizes = [network.config.get_text_config().vocab_size for network in (policy, critic)]
    if source == init and sizes[0] != sizes[1]:
        raise ValueError(
            f"critic_init: expected a critic of the policy's {sizes[0]} tokens, got {source!r} of "
            f"{sizes[1]}"
        )
    return critic


def critic_source(init: CriticInit | str, model_path: str, models: Sequence[str]) -> str:
    """Folder or hub id that a critic is loaded from, see `load_critic`."""
    if init in ("random", "policy", "shared"):
        return model_path
    if init != "reward" and Path(init).is_dir():
        return init
    if init != "reward":
        names = ", ".join(get_args(CriticInit))
        raise ValueError(f"critic_init: expected {names} or a folder that exists, got {init!r}")
    if models and models[0].startswith("<"):
        raise ValueError(
            "critic_init: 'reward' needs a reward model that was loaded from a folder, got "
            f"{models[0]}; save it with save_pretrained and load it from there, or use "
            "critic_init: policy"
        )
    if not models:
        raise ValueError(
            "critic_init: 'reward' needs a reward model among `rewards`, which holds functions and "
            "rules only; use critic_init: policy"
        )
    return models[0]
