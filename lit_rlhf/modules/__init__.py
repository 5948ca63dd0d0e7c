"""The LightningModules of the three stages."""

from lit_rlhf.modules.ppo import PPOModule
from lit_rlhf.modules.ppo_update import PPOUpdate
from lit_rlhf.modules.reward import RewardModule
from lit_rlhf.modules.sft import SFTModule
from lit_rlhf.modules.stage import StageModule

__all__ = ["PPOModule", "PPOUpdate", "RewardModule", "SFTModule", "StageModule"]
