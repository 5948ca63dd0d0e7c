"""Rewards of sampled responses.

A reward is a module that maps rollouts and their rendered prompts to scores: a reward model
(`ModelReward`) and a Python function or another callable (`CallableReward`) to numbers `[B]`, and a
weighted sum of these (`WeightedReward`), which is what PPO trains on, to `Scores`. A callable may
abstain from a response by `None`, see `Votes`. The ready-made rules and `RemoteScorer` are
callables.
"""

from lit_rlhf.rewards.functions import CallableReward as CallableReward
from lit_rlhf.rewards.functions import RewardError as RewardError
from lit_rlhf.rewards.functions import RewardFunction as RewardFunction
from lit_rlhf.rewards.judge import JudgeRule as JudgeRule
from lit_rlhf.rewards.model import ModelReward as ModelReward
from lit_rlhf.rewards.remote import RemoteScorer as RemoteScorer
from lit_rlhf.rewards.rules import ContainsRule as ContainsRule
from lit_rlhf.rewards.rules import EqualsRule as EqualsRule
from lit_rlhf.rewards.rules import FormatRule as FormatRule
from lit_rlhf.rewards.rules import LengthRule as LengthRule
from lit_rlhf.rewards.rules import RegexRule as RegexRule
from lit_rlhf.rewards.rules import SentimentRule as SentimentRule
from lit_rlhf.rewards.scores import Scores as Scores
from lit_rlhf.rewards.scores import Votes as Votes
from lit_rlhf.rewards.weighted import RULES as RULES
from lit_rlhf.rewards.weighted import RewardObject as RewardObject
from lit_rlhf.rewards.weighted import Rewards as Rewards
from lit_rlhf.rewards.weighted import WeightedReward as WeightedReward
from lit_rlhf.rewards.weighted import parse_rewards as parse_rewards
from lit_rlhf.rewards.weighted import plain_rewards as plain_rewards
from lit_rlhf.rewards.weighted import reward_key as reward_key
from lit_rlhf.rewards.weighted import shorten_names as shorten_names
from lit_rlhf.rewards.weighted import split_rewards as split_rewards
from lit_rlhf.rewards.weighted import untrusted_rewards as untrusted_rewards
from lit_rlhf.urls import redact_url as redact_url
