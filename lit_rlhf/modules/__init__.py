"""The LightningModules of the three stages, and the groups of their options."""

from lit_rlhf.modules.option_names import check_names, dotted_arguments, explain_unknown_option
from lit_rlhf.modules.options import (
    AdvantageOptions,
    CriticPretrainingOptions,
    MemoryOptions,
    MinibatchOptions,
    OptimizerOptions,
    PPOLossOptions,
    RewardShapingOptions,
)
from lit_rlhf.modules.out_of_memory import suggest_change
from lit_rlhf.modules.ppo import (
    ROLLOUT_MEMORY,
    UPDATE_MEMORY,
    PPOModule,
    critic_source,
    generation_settings,
)
from lit_rlhf.modules.reward import RewardModule
from lit_rlhf.modules.sft import SFTModule
from lit_rlhf.modules.stage import CONTRACT_KEY, StageModule

__all__ = [
    "CONTRACT_KEY",
    "ROLLOUT_MEMORY",
    "UPDATE_MEMORY",
    "AdvantageOptions",
    "CriticPretrainingOptions",
    "MemoryOptions",
    "MinibatchOptions",
    "OptimizerOptions",
    "PPOLossOptions",
    "PPOModule",
    "RewardModule",
    "RewardShapingOptions",
    "SFTModule",
    "StageModule",
    "check_names",
    "critic_source",
    "dotted_arguments",
    "explain_unknown_option",
    "generation_settings",
    "suggest_change",
]
