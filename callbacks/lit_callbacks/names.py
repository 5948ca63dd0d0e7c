"""How other trainers call the metrics that the monitors watch."""

from __future__ import annotations

from collections.abc import Iterable

KL, PER_TOKEN = "rollout/kl", "rollout/kl_per_token"
LENGTH, TRUNCATED = "rollout/response_length", "rollout/truncation_rate"
ENTROPY, SPREAD = "rollout/entropy", "monitor/scores_std"

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
    """Names of the watched metrics in a log, from the trainer that it has most names of.

    They are by the monitors' keys. Trackers may put `train/` before a name.
    """
    known = set(logged)
    found = [
        {
            key: prefix + name
            for key, name in table.items()
            if prefix + name in known and key not in known
        }
        for table in NAMES.values()
        for prefix in ("", "train/")
    ]
    return max(found, key=len)
