"""Rewards of sampled responses.

A reward is a module that maps rollouts and their rendered prompts to scores `[B]`: a reward model
(`ModelReward`), a Python function (`FunctionReward`, or any callable as `CallableReward`), or a
weighted sum of these (`WeightedReward`), which is what PPO trains on. The ready-made rules and
`RemoteScorer` are callables.
"""

from lit_rlhf.rewards.functions import CallableReward, FunctionReward, RewardError, RewardFunction
from lit_rlhf.rewards.model import ModelReward
from lit_rlhf.rewards.remote import RemoteScorer, redact_url
from lit_rlhf.rewards.rules import (
    ContainsRule,
    EqualsRule,
    FormatRule,
    LengthRule,
    RegexRule,
    SentimentRule,
)
from lit_rlhf.rewards.weighted import (
    RULES,
    RewardObject,
    Rewards,
    WeightedReward,
    parse_rewards,
    plain_rewards,
    reward_key,
    shorten_names,
    split_rewards,
    untrusted_rewards,
)

__all__ = [
    "RULES",
    "CallableReward",
    "ContainsRule",
    "EqualsRule",
    "FormatRule",
    "FunctionReward",
    "LengthRule",
    "ModelReward",
    "RegexRule",
    "RemoteScorer",
    "RewardError",
    "RewardFunction",
    "RewardObject",
    "Rewards",
    "SentimentRule",
    "WeightedReward",
    "parse_rewards",
    "plain_rewards",
    "redact_url",
    "reward_key",
    "shorten_names",
    "split_rewards",
    "untrusted_rewards",
]
