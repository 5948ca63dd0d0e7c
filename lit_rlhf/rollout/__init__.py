"""Rollouts: sampling responses, scoring them, and the experience that PPO learns from."""

from lit_rlhf.rollout.batch import ResponseStatistics, RolloutBatch
from lit_rlhf.rollout.estimates import Estimates, reference_logprobs, rollout_estimates
from lit_rlhf.rollout.experience import Experience, shuffled_minibatches
from lit_rlhf.rollout.generation import sampled_responses
from lit_rlhf.rollout.metrics import rollout_metrics
from lit_rlhf.rollout.options import SamplingOptions
from lit_rlhf.rollout.remote import RemoteScorer
from lit_rlhf.rollout.reward_calls import RewardError
from lit_rlhf.rollout.rewards import CallableReward, FunctionReward, ModelReward
from lit_rlhf.rollout.rules import FormatRule, LengthRule, RegexRule
from lit_rlhf.rollout.samples import decoded_responses, response_records, sample_table
from lit_rlhf.rollout.scoring import (
    ResponseValues,
    response_logprobs,
    response_statistics,
    response_value_estimates,
)
from lit_rlhf.rollout.sources import RewardSource, is_function, reward_sources, source_names
from lit_rlhf.rollout.weighted import WeightedReward

__all__ = [
    "CallableReward",
    "Estimates",
    "Experience",
    "FormatRule",
    "FunctionReward",
    "LengthRule",
    "ModelReward",
    "RegexRule",
    "RemoteScorer",
    "ResponseStatistics",
    "ResponseValues",
    "RewardError",
    "RewardSource",
    "RolloutBatch",
    "SamplingOptions",
    "WeightedReward",
    "decoded_responses",
    "is_function",
    "reference_logprobs",
    "response_logprobs",
    "response_records",
    "response_statistics",
    "response_value_estimates",
    "reward_sources",
    "rollout_estimates",
    "rollout_metrics",
    "sample_table",
    "sampled_responses",
    "shuffled_minibatches",
    "source_names",
]
