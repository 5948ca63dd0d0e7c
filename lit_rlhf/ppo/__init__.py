"""PPO as an algorithm: networks, options and the phases of an iteration, without a Trainer."""

from lit_rlhf.ppo.algorithm import PPO, LossShare, PPONetworks
from lit_rlhf.ppo.networks import CriticInit, critic_source, load_critic, load_reference
from lit_rlhf.ppo.options import (
    AdvantageOptions,
    MemoryOptions,
    PPOLossOptions,
    PPOOptions,
    RewardShapingOptions,
)

__all__ = [
    "PPO",
    "AdvantageOptions",
    "CriticInit",
    "LossShare",
    "MemoryOptions",
    "PPOLossOptions",
    "PPONetworks",
    "PPOOptions",
    "RewardShapingOptions",
    "critic_source",
    "load_critic",
    "load_reference",
]
