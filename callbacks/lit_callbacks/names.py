"""Names of the metrics that the monitors watch in the logs of other trainers.

To add a trainer, add a table to `NAMES`: what it calls the metrics, by the keys of the monitors. Be
sure of the units: KL in nats per response is `KL`, in nats per token `PER_TOKEN`.
"""

from __future__ import annotations

from collections.abc import Iterable

KL = "rollout/kl"
SCORE = "rollout/score"
PER_TOKEN = "rollout/kl_per_token"
LENGTH = "rollout/response_length"
TRUNCATED = "rollout/truncation_rate"
ENTROPY = "rollout/entropy"
PROMPT_LENGTH = "rollout/prompt_length"
SAMPLER = "rollout/sampler_kl"
SPREAD = "monitor/scores_std"
INFORMATIVE = "rollout/informative_share"
UNINFORMATIVE = "rollout/uninformative_share"
EXPLAINED = "ppo/explained_variance"
OWN_KEYS = (
    KL,
    SCORE,
    PER_TOKEN,
    LENGTH,
    TRUNCATED,
    ENTROPY,
    PROMPT_LENGTH,
    SAMPLER,
    SPREAD,
    INFORMATIVE,
    UNINFORMATIVE,
    EXPLAINED,
    "rollout/perplexity",
    "rollout/distinct_2",
    "rollout/repeated_2",
    "rollout/opening_share",
    "rollout/score_spread",
    "ppo/ratio_first",
)
"""Keys of the monitors, which are the names in `lit_rlhf`."""
KEYS_BESIDE = ("rollout/responses", "rollout/ref_response_length", "rollout/ref_prompt_entropy")
"""Further keys that the monitors read where `lit_rlhf` has logged them."""

VERL = {
    LENGTH: "response_length/mean",
    TRUNCATED: "response_length/clip_ratio",
    ENTROPY: "actor/entropy",
    PROMPT_LENGTH: "prompt_length/mean",
}
NAMES: dict[str, dict[str, str]] = {
    "TRL": {  # GRPO and RLOO; without `beta` there is no KL
        SCORE: "reward",
        PER_TOKEN: "kl",
        LENGTH: "completions/mean_length",
        TRUNCATED: "completions/clipped_ratio",
        ENTROPY: "entropy",
        SPREAD: "reward_std",
        UNINFORMATIVE: "frac_reward_zero_std",
    },
    "TRL, GRPO before 0.17": {
        SCORE: "reward",
        PER_TOKEN: "kl",
        LENGTH: "completion_length",
        SPREAD: "reward_std",
    },
    "TRL, PPO": {
        SCORE: "objective/scores",
        KL: "objective/kl",
        ENTROPY: "policy/entropy_avg",
        "ppo/ratio_first": "val/ratio",
    },
    "TRL, PPO before 0.12": {  # `objective/entropy` is a sum over the response
        SCORE: "env/reward_mean",
        KL: "objective/kl",
        LENGTH: "tokens/responses_len_mean",
        PROMPT_LENGTH: "tokens/queries_len_mean",
        ENTROPY: "ppo/policy/entropy",
        SPREAD: "env/reward_std",
        EXPLAINED: "ppo/val/var_explained",
    },
    "LLaMA-Factory, PPO": {  # TRL's metrics before 0.12, by other names
        SCORE: "reward",
        KL: "kl",
        LENGTH: "response_len",
        PROMPT_LENGTH: "query_len",
    },
    "OpenRLHF": {
        SCORE: "reward",
        PER_TOKEN: "kl",
        LENGTH: "response_length",
        TRUNCATED: "response_clip_ratio",
        SPREAD: "group_reward_std",
    },
    "verl, KL in the reward": {
        **VERL,
        PER_TOKEN: "actor/reward_kl_penalty",
        EXPLAINED: "critic/vf_explained_var",
    },
    "verl, KL in the loss": {**VERL, PER_TOKEN: "actor/kl_loss"},
    "NeMo-RL": {
        PER_TOKEN: "kl_penalty",
        LENGTH: "mean_gen_tokens_per_sample",
        TRUNCATED: "truncation_rate",
        ENTROPY: "approx_entropy",
        PROMPT_LENGTH: "mean_prompt_length",
        SAMPLER: "gen_kl_error",
    },
    "slime": {
        PER_TOKEN: "train/kl_loss",
        LENGTH: "rollout/response_len/mean",
        TRUNCATED: "rollout/truncated_ratio",
        ENTROPY: "train/entropy_loss",
    },
    "prime-rl": {  # there is no KL to a reference
        LENGTH: "completion_len/mean",
        TRUNCATED: "is_truncated/mean",
        ENTROPY: "entropy/mean",
        PROMPT_LENGTH: "prompt_len/mean",
        SAMPLER: "mismatch_kl/mean",
        INFORMATIVE: "batch/effective_batch_size",
    },
    "prime-rl since 0.5": {
        LENGTH: "decode_len/all/mean",
        TRUNCATED: "is_truncated/all/mean",
        ENTROPY: "entropy/all/mean",
        PROMPT_LENGTH: "prefill_len/all/mean",
        SAMPLER: "mismatch_kl/all/mean",
        INFORMATIVE: "effective_batch_size/all",
    },
}
"""Name of a metric by the key of a monitor, for each trainer."""


def find_names(logged: Iterable[str]) -> dict[str, str]:
    """Find the names of the watched metrics in a log.

    The log is taken for the one of the trainer with the most matching names. Trackers may put
    `train/` before a name, and the files of TensorBoard's downloads have `_` in place of `/`.

    Args:
        logged: Names of the metrics in the log.

    Returns:
        Names by the monitors' keys; empty if no trainer's names match.
    """
    spellings: dict[str, str] = {}
    for name in logged:
        spellings.setdefault(name.replace("/", "_"), name)
        spellings[name] = name
    logged_keys = spellings.keys() & OWN_KEYS
    if logged_keys & {KL, PER_TOKEN}:  # one of them is enough
        logged_keys |= {KL, PER_TOKEN}
    candidates = [
        {
            key: spellings[prefix + name] if prefix + name in spellings else spellings[spelled]
            for key, name in table.items()
            if (spelled := (prefix + name).replace("/", "_")) in spellings
            and key not in logged_keys
        }
        for table in (*NAMES.values(), dict(zip(OWN_KEYS, OWN_KEYS, strict=True)))
        for prefix in ("", "train/")
    ]
    return max(candidates, key=len)
