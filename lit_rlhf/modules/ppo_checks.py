"""Checks of the options of `PPOModule`, which raise errors or warn."""

import math

from lightning.pytorch import Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_warn

from lit_rlhf.modules.run_folders import is_dry_run
from lit_rlhf.ppo import PPOOptions
from lit_rlhf.rollout import SamplingOptions


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


def warn_about_options(options: PPOOptions, vocab_size: int) -> None:
    """Warn about an estimator without KL's gradient, and a bound on entropy that never acts."""
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
    largest = math.log(vocab_size)
    if loss.entropy_coef > 0 and clip is not None and clip >= largest:
        rank_zero_warn(
            f"loss.entropy_clip={clip}: the entropy of a token is at most {largest:.1f} nats (the "
            f"log of {vocab_size} tokens), so that the bound never acts. It is per token: lower it "
            "to about the entropy of the SFT model (`rollout/entropy`)."
        )
