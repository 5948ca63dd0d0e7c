"""Checks of the options of `PPOModule`, which raise errors or warn."""

import math
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_warn

from lit_callbacks.trainer_attributes import is_dry_run
from lit_rlhf.ppo import PPO, PPOOptions
from lit_rlhf.rewards import untrusted_rewards
from lit_rlhf.rollout import SamplingOptions, check_minibatch_size


def is_trial(trainer: Trainer) -> bool:
    """Whether this is a trial of `fast_dev_run` or the Tuner, which set `max_steps` for it."""
    return is_dry_run(trainer) or isinstance(trainer.logger, DummyLogger)


def check_on_policy_sampling(sampling: SamplingOptions) -> None:
    """Refuse greedy responses, and warn of samples that do not come from the policy as scored."""
    if not sampling.do_sample:
        raise ValueError(
            "sampling.do_sample: expected true, got false: PPO learns from samples of the policy, "
            "and a greedy response is not a sample"
        )
    off_policy = [f"{name}={getattr(sampling, name)}" for name in sampling.off_policy_options]
    if off_policy:
        rank_zero_warn(
            f"{', '.join(off_policy)}: rollouts are sampled from a changed distribution. Weights "
            "(loss.importance_cap) correct the tokens that it draws; about those that it never "
            "draws nothing is learned. Leave these options of sampling at their defaults."
        )


def warn_about_options(options: PPOOptions, n_tokens: int) -> None:
    """Warn about an estimator without KL's gradient, and a bound on entropy that never acts.

    The policy chooses among `n_tokens` tokens, so that an entropy is at most the logarithm of that.
    """
    shaping = options.reward_shaping
    loss = options.loss
    if shaping.kl_estimator != "k1" and shaping.kl_coef > 0:
        rank_zero_warn(
            f"reward_shaping.kl_estimator={shaping.kl_estimator}: as a reward it does not penalize "
            "KL. The policy gradient weighs log-probs with the estimate, and only with k1 this is "
            "the gradient of KL(policy || reference). With k2 and k3 it is about 0 near the "
            "reference. Use k1 in rewards."
        )
    clip = loss.entropy_clip
    largest = math.log(n_tokens)
    if loss.entropy_coef > 0 and clip is not None and clip >= largest:
        rank_zero_warn(
            f"loss.entropy_clip={clip}: the entropy of a token is at most {largest:.1f} nats (the "
            f"log of {n_tokens} tokens), so that the bound never acts. It is per token: lower it "
            "to about the entropy of the SFT model (`rollout/entropy`)."
        )


def check_max_steps(trainer: Trainer) -> None:
    """Refuse a limit of optimizer steps, which would not count iterations."""
    if trainer.max_steps != -1 and not is_trial(trainer):
        raise ValueError(
            f"trainer.max_steps: expected -1 (off), got {trainer.max_steps}: it would "
            "count the updates of policy and critic together; set "
            "model.max_iterations, the number of PPO iterations"
        )


def check_batch_size(ppo: PPO, n_prompts: int) -> None:
    """Refuse batches of training that are too small for what an update learns from.

    Args:
        ppo: The algorithm.
        n_prompts: Prompts of a batch on a rank.
    """
    n_learned = ppo.advantages.learned_prompts
    if n_learned is not None and n_learned > n_prompts:
        raise ValueError(
            f"advantages.learned_prompts: expected at most data.batch_size={n_prompts}, "
            f"got {n_learned}"
        )
    n_rollouts = ppo.count_learned(n_prompts * ppo.responses_per_prompt)
    check_minibatch_size(n_rollouts, size=ppo.minibatches.minibatch_size)


def refuse_untrusted_rewards(*, saved: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse reward functions that only a checkpoint names: they would be imported and run.

    Args:
        saved: Arguments of the module in the checkpoint.
        given: Arguments that are given now.
    """
    gold = saved.get("gold_reward")
    named = {
        "rewards": untrusted_rewards(saved.get("rewards", {})),
        "gold_reward": untrusted_rewards({} if gold is None else {gold: 1.0}),
    }
    for option, names in named.items():
        if names and option not in given:
            raise ValueError(
                f"{option}: the checkpoint names {', '.join(names)}, which would be imported "
                "or sent all responses, or was a Python object, which it does not hold. If "
                f"you trust it, give {option} yourself: "
                f"load_from_checkpoint(path, {option}={saved[option]!r}), with the object in "
                "place of its name if there was one"
            )
