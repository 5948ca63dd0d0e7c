"""Checks of PPO's options, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lit_rlhf.models.options import DTYPES

POSITIVE = (
    "policy_lr",
    "critic_lr",
    "policy_grad_clip",
    "critic_grad_clip",
    "ppo_epochs",
    "minibatch_size",
    "micro_batch_size",
    "rollout_batch_size",
    "scoring_tokens",
    "max_new_tokens",
    "reward_timeout",
    "temperature",
    "reward_clip",
    "advantage_clip",
    "ratio_clip",
    "value_clip",
    "entropy_clip",
    "kl_target",
    "kl_horizon",
)
NOT_NEGATIVE = (
    "kl_coef",
    "entropy_coef",
    "ptx_coef",
    "missing_eos_penalty",
    "policy_kl_penalty",
    "critic_pretrain_iterations",
    "sampled_texts",
    "top_k",
)


def check_options(hparams: Mapping[str, Any]) -> None:
    """Check the ranges of PPO's options, and warn of sampling that makes rollouts off-policy.

    Raises:
        ValueError: With the option's name, what was expected and what came.
    """
    for name in POSITIVE:
        value = hparams.get(name)
        if value is not None and not value > 0:
            raise ValueError(f"{name}: expected a value > 0, got {value}")
    for name in NOT_NEGATIVE:
        value = hparams.get(name, 0)
        if value < 0:
            raise ValueError(f"{name}: expected a value >= 0, got {value}")
    for name in ("gamma", "lam"):
        if not 0.0 <= hparams[name] <= 1.0:
            raise ValueError(f"{name}: expected a value in [0, 1], got {hparams[name]}")
    if hparams["frozen_dtype"] not in (None, *DTYPES):
        raise ValueError(
            f"frozen_dtype: expected one of {', '.join(DTYPES)} or None, "
            f"got {hparams['frozen_dtype']!r}"
        )
    truncated = [
        f"{name}={hparams[name]}"
        for name, neutral in (("top_p", 1.0), ("top_k", 0), ("repetition_penalty", 1.0))
        if hparams[name] != neutral
    ]
    if truncated:
        rank_zero_warn(
            f"{', '.join(truncated)}: rollouts are sampled from a changed distribution while "
            "log-probs are the policy's own, so the policy gradient is biased (off-policy samples "
            "with no correction). Leave top_p, top_k and repetition_penalty at their defaults."
        )


def generation_settings(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """What a finished policy's `generation_config.json` says: to sample as the rollouts were."""
    return {"temperature": hparams["temperature"], "do_sample": True}
