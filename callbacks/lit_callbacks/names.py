"""Names of the metrics that the monitors watch in the logs of other trainers."""

from __future__ import annotations

from collections.abc import Iterable

KL = "rollout/kl"
PER_TOKEN = "rollout/kl_per_token"
LENGTH = "rollout/response_length"
TRUNCATED = "rollout/truncation_rate"
ENTROPY = "rollout/entropy"
SPREAD = "monitor/scores_std"

VERL = {
    LENGTH: "response_length/mean",
    TRUNCATED: "response_length/clip_ratio",
    ENTROPY: "actor/entropy",
    "rollout/prompt_length": "prompt_length/mean",
}
NAMES: dict[str, dict[str, str]] = {
    "TRL": {  # GRPO and RLOO; without `beta` there is no KL
        PER_TOKEN: "kl",
        LENGTH: "completions/mean_length",
        TRUNCATED: "completions/clipped_ratio",
        ENTROPY: "entropy",
        SPREAD: "reward_std",
    },
    "TRL, PPO": {
        KL: "objective/kl",
        ENTROPY: "policy/entropy_avg",
        "ppo/ratio_first": "val/ratio",
    },
    "OpenRLHF": {
        PER_TOKEN: "kl",
        LENGTH: "response_length",
        TRUNCATED: "response_clip_ratio",
        SPREAD: "group_reward_std",
    },
    "verl, KL in the reward": {
        **VERL,
        PER_TOKEN: "actor/reward_kl_penalty",
        "ppo/explained_variance": "critic/vf_explained_var",
    },
    "verl, KL in the loss": {**VERL, PER_TOKEN: "actor/kl_loss"},
}
"""Name of a metric by the key of a monitor, for each trainer."""


def find_names(logged: Iterable[str]) -> dict[str, str]:
    """Find the names of the watched metrics in a log.

    The log is taken for the one of the trainer with the most matching names. Trackers may put
    `train/` before a name.

    Args:
        logged: Names of the metrics in the log.

    Returns:
        Names by the monitors' keys; empty if no trainer's names match.
    """
    known = set(logged)
    candidates = [
        {
            key: prefix + name
            for key, name in table.items()
            if prefix + name in known and key not in known
        }
        for table in NAMES.values()
        for prefix in ("", "train/")
    ]
    return max(candidates, key=len)
