"""Rollouts of a policy: sampling responses, scoring their tokens, and the experience of PPO.

`generate_responses` samples a `RolloutBatch` of prompts and responses. `score_rollouts` computes
the `TokenStatistics` that an update needs: log-probs of policy and reference, entropies, values.
`Experience` is what the update reads, `RolloutMetrics` what is logged.
"""

from lit_rlhf.rollout.batch import (
    Experience,
    PolicyStatistics,
    RolloutBatch,
    check_minibatch_size,
    default_tokens_per_forward,
    iterate_minibatches,
    split_by_tokens,
)
from lit_rlhf.rollout.generation import generate_responses, using_generation_config
from lit_rlhf.rollout.metrics import RolloutMetrics
from lit_rlhf.rollout.samples import build_response_records, decode_responses, format_sample_table
from lit_rlhf.rollout.sampling import SamplingOptions
from lit_rlhf.rollout.scoring import (
    TokenStatistics,
    compute_logprobs,
    compute_policy_statistics,
    score_rollouts,
)

__all__ = [
    "Experience",
    "PolicyStatistics",
    "RolloutBatch",
    "RolloutMetrics",
    "SamplingOptions",
    "TokenStatistics",
    "build_response_records",
    "check_minibatch_size",
    "compute_logprobs",
    "compute_policy_statistics",
    "decode_responses",
    "default_tokens_per_forward",
    "format_sample_table",
    "generate_responses",
    "iterate_minibatches",
    "score_rollouts",
    "split_by_tokens",
    "using_generation_config",
]
