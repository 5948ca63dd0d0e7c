"""PPO as an algorithm: networks, options and the phases of an iteration, without a Trainer."""

from lit_rlhf.ppo.algorithm import PPO as PPO
from lit_rlhf.ppo.algorithm import LossShare as LossShare
from lit_rlhf.ppo.algorithm import PPONetworks as PPONetworks
from lit_rlhf.ppo.networks import CriticInit as CriticInit
from lit_rlhf.ppo.networks import critic_source as critic_source
from lit_rlhf.ppo.networks import load_critic as load_critic
from lit_rlhf.ppo.networks import load_reference as load_reference
from lit_rlhf.ppo.options import AdvantageOptions as AdvantageOptions
from lit_rlhf.ppo.options import MemoryOptions as MemoryOptions
from lit_rlhf.ppo.options import PPOLossOptions as PPOLossOptions
from lit_rlhf.ppo.options import PPOOptions as PPOOptions
from lit_rlhf.ppo.options import RewardShapingOptions as RewardShapingOptions
from lit_rlhf.ppo.options import check_groups as check_groups
