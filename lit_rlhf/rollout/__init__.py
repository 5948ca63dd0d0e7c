"""Rollouts: sampling responses, scoring their tokens, and the experience that PPO learns from."""

from lit_rlhf.rollout.batch import ResponseStatistics, RolloutBatch
from lit_rlhf.rollout.estimates import TokenStatistics, reference_logprobs, score_rollouts
from lit_rlhf.rollout.experience import Experience, shuffled_minibatches
from lit_rlhf.rollout.generation import generate_responses
from lit_rlhf.rollout.metrics import rollout_metrics
from lit_rlhf.rollout.options import SamplingOptions
from lit_rlhf.rollout.samples import decoded_responses, response_records, sample_table
from lit_rlhf.rollout.scoring import (
    ResponseValues,
    response_logprobs,
    response_statistics,
    response_value_estimates,
)

__all__ = [
    "Experience",
    "ResponseStatistics",
    "ResponseValues",
    "RolloutBatch",
    "SamplingOptions",
    "TokenStatistics",
    "decoded_responses",
    "generate_responses",
    "reference_logprobs",
    "response_logprobs",
    "response_records",
    "response_statistics",
    "response_value_estimates",
    "rollout_metrics",
    "sample_table",
    "score_rollouts",
    "shuffled_minibatches",
]
