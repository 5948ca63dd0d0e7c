"""The networks of PPO: the ones that are trained, and what scores their responses."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from transformers import PreTrainedTokenizerBase

from lit_rlhf.forward import (
    LanguageModel,
    Offloaded,
    disable_dropout,
    freeze,
    share_lower_layers,
)
from lit_rlhf.models import (
    ModelOptions,
    add_value_head,
    build_random_scalar_model,
    load_causal_lm,
    load_scalar_model,
)
from lit_rlhf.ppo.options import MemoryOptions, PPOOptions
from lit_rlhf.rewards import CallableReward, ModelReward, RewardObject, Rewards, WeightedReward
from lit_rlhf.rollout import Sampler, generate_responses

CriticInit = Literal["reward", "policy", "random", "shared"]


class PPONetworks(NamedTuple):
    """The networks of PPO and what scores its responses.

    Attributes:
        policy: The network that is trained, without dropout.
        reference: The frozen SFT model; `None`: the policy without its LoRA adapters.
        critic: The network of the values, trained without dropout. Its trunk may be the policy's,
            see `add_value_head`. `None` where `advantages.estimator` uses none.
        reward: What PPO learns from.
        tokenizer: The policy's.
        gold: A judge whose scores are only logged.
        sampler: Draws the responses.
    """

    policy: LanguageModel
    reference: LanguageModel | Offloaded | None
    critic: LanguageModel | None
    reward: WeightedReward
    tokenizer: PreTrainedTokenizerBase
    gold: CallableReward | None = None
    sampler: Sampler = generate_responses


def load_networks(
    model_path: str,
    rewards: Rewards,
    *,
    options: PPOOptions,
    network: ModelOptions,
    tokenizer: PreTrainedTokenizerBase,
    critic_init: CriticInit | str,
    seed: int,
    gold_reward: str | RewardObject | None = None,
    reward_timeout: float | None = None,
    sampler: Sampler | None = None,
) -> PPONetworks:
    """Load all networks of PPO from their folders.

    Args:
        model_path: Folder or hub id of the SFT model: the policy's start, and the reference.
        rewards: Rewards with their weights, see `lit_rlhf.rewards.parse_rewards`.
        options: The options of PPO.
        network: How policy and critic are loaded, and the others where `options.memory` does not
            differ.
        tokenizer: The policy's.
        critic_init: The critic's start, see `load_critic`. Without effect where the estimator of
            advantages uses no critic.
        seed: Seed of new weights of the critic.
        gold_reward: A reward function that is only logged.
        reward_timeout: Seconds that a call of a reward function may take; `None`: no limit.
        sampler: Draws the responses; `None`: lit_rlhf itself.
    """
    policy = load_policy(model_path, network)
    reference = load_reference(model_path, policy, network, options.memory)
    reward = WeightedReward(
        rewards,
        frozen_options(network, options.memory),
        tokenizer,
        timeout=reward_timeout,
        offload=options.memory.offload_frozen,
        shard=options.memory.shard_frozen,
        ensemble=options.reward_shaping.ensemble,
    )
    critic = None
    if options.advantages.uses_critic:
        critic = load_critic(
            critic_init,
            model_path=model_path,
            policy=policy,
            rewards=reward.models,
            options=network,
            seed=seed,
        )
        disable_dropout(critic)
    gold = None
    if gold_reward is not None:
        gold = CallableReward(gold_reward, tokenizer, timeout=reward_timeout)
    return PPONetworks(
        policy=policy,
        reference=reference,
        critic=critic,
        reward=reward,
        tokenizer=tokenizer,
        gold=gold,
        sampler=sampler or generate_responses,
    )


def load_policy(model_path: str, options: ModelOptions) -> LanguageModel:
    """The SFT model, to be trained, without dropout.

    So rollout, scoring and update compute the log-probs of one policy, and the first ratio is 1.
    """
    return disable_dropout(load_causal_lm(model_path, options, role="policy"))


def frozen_options(options: ModelOptions, memory: MemoryOptions) -> ModelOptions:
    """How reference and reward models are loaded.

    Args:
        options: How policy and critic are loaded.
        memory: Where frozen networks are kept, and in which type.
    """
    moves = memory.offload_frozen or memory.shard_frozen
    return replace(
        options,
        dtype=memory.frozen_dtype or options.dtype,
        # the scales of 4-bit weights do not come and go with them
        load_in_4bit=options.load_in_4bit and not moves,
    )


def load_reference(
    model_path: str, policy: LanguageModel, options: ModelOptions, memory: MemoryOptions
) -> LanguageModel | Offloaded | None:
    """The frozen SFT model; `None` with LoRA, where the policy without its adapters is that model.

    Args:
        model_path: Folder or hub id of the SFT model.
        policy: The policy, with whose frozen lower layers it computes where they are the same.
        options: How policy and critic are loaded.
        memory: Where the reference is kept between uses, and in which type.
    """
    if options.lora_rank > 0:
        return None
    plain = replace(frozen_options(options, memory), gradient_checkpointing=False)
    model = freeze(load_causal_lm(model_path, plain, role="reference"))
    if memory.offload_frozen or memory.shard_frozen:
        return Offloaded(model, to_cpu=memory.offload_frozen, shard=memory.shard_frozen)
    share_lower_layers(model, source=policy)
    return model


def load_critic(
    init: CriticInit | str,
    *,
    model_path: str,
    policy: LanguageModel,
    rewards: Sequence[ModelReward],
    options: ModelOptions,
    seed: int,
) -> LanguageModel:
    """The critic that PPO starts from.

    With LoRA it has its frozen weights in common with the policy or the reward model that it
    starts from.

    Args:
        init: The first reward model (`reward`), the SFT model with a new head (`policy`), random
            weights in the shape of the SFT model (`random`), a new head on the policy's own trunk
            (`shared`), or the folder of a critic.
        model_path: Folder or hub id of the SFT model.
        policy: The policy.
        rewards: The reward models, in order.
        options: How the critic is loaded.
        seed: Seed of its new weights.
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
        return build_random_scalar_model(source, options, seed, role="critic")
    base: LanguageModel | None = None
    if options.lora_rank > 0 and init in ("policy", "reward"):
        base = policy if init == "policy" else rewards[0].find_base(options)
    # only the policy has no scalar head of its own
    head_seed = seed if init == "policy" else None
    critic = load_scalar_model(source, options, role="critic", head_seed=head_seed, base=base)
    n_expected = policy.config.get_text_config().vocab_size
    n_tokens = critic.config.get_text_config().vocab_size
    if source == init and n_tokens != n_expected:
        raise ValueError(
            f"critic_init: expected a critic of the policy's {n_expected} tokens, got {source!r} "
            f"of {n_tokens}"
        )
    return critic


def critic_source(init: CriticInit | str, model_path: str, models: Sequence[str]) -> str:
    """Folder or hub id that a critic is loaded from.

    Args:
        init: The critic's start, as for `load_critic`.
        model_path: Folder or hub id of the SFT model.
        models: Folders or hub ids of the reward models, in order; one in angle brackets has none.
    """
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
