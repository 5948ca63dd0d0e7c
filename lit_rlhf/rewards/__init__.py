"""Rewards of responses: reward models, functions, ready-made rules, and weighted sums of them."""

from lit_rlhf.rewards.calls import RewardError
from lit_rlhf.rewards.functions import CallableReward, FunctionReward, ModelReward
from lit_rlhf.rewards.remote import RemoteScorer
from lit_rlhf.rewards.rules import FormatRule, LengthRule, RegexRule
from lit_rlhf.rewards.sources import RewardSource, is_function, parse_reward_sources, source_names
from lit_rlhf.rewards.weighted import WeightedReward

__all__ = [
    "CallableReward",
    "FormatRule",
    "FunctionReward",
    "LengthRule",
    "ModelReward",
    "RegexRule",
    "RemoteScorer",
    "RewardError",
    "RewardSource",
    "WeightedReward",
    "is_function",
    "parse_reward_sources",
    "source_names",
]
