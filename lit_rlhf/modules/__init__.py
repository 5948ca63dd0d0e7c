"""The LightningModules of the three stages, and the groups of their options.

- `SFTModule`, `RewardModule` and `PPOModule` are the stages, `StageModule` what they share.
- The `*Options` are groups of options; see also `lit_rlhf.models.ModelOptions` and
  `lit_rlhf.rollout.SamplingOptions`.
"""

from lit_rlhf.modules.finished import folders_during, is_dry_run
from lit_rlhf.modules.option_names import (
    check_names,
    dotted_arguments,
    merge_options,
    option_groups,
    option_names,
)
from lit_rlhf.modules.options import (
    CriticPretrainingOptions,
    MinibatchOptions,
    OptimizerOptions,
)
from lit_rlhf.modules.phases import PhaseTimer, is_out_of_memory, suggest_change
from lit_rlhf.modules.ppo import (
    ROLLOUT_MEMORY,
    SCORING_MEMORY,
    UPDATE_MEMORY,
    PPOModule,
    ScoredResponses,
    draw_seed,
    generation_settings,
    iteration_generator,
)
from lit_rlhf.modules.resuming import (
    CONTRACT_KEY,
    RUN_KEY,
    SETTINGS_KEY,
    VERSION_KEY,
    ChangedRunError,
    run_id,
)
from lit_rlhf.modules.reward import PreferenceShare, RewardModule
from lit_rlhf.modules.sft import SFTModule
from lit_rlhf.modules.stage import StageModule
from lit_rlhf.modules.updates import (
    TooManySkippedUpdates,
    tokens_within_memory,
    trained_networks,
)
from lit_rlhf.ppo import (
    AdvantageOptions,
    LossShare,
    MemoryOptions,
    PPOLossOptions,
    RewardShapingOptions,
    critic_source,
)

__all__ = [
    "CONTRACT_KEY",
    "ROLLOUT_MEMORY",
    "RUN_KEY",
    "SCORING_MEMORY",
    "SETTINGS_KEY",
    "UPDATE_MEMORY",
    "VERSION_KEY",
    "AdvantageOptions",
    "ChangedRunError",
    "CriticPretrainingOptions",
    "LossShare",
    "MemoryOptions",
    "MinibatchOptions",
    "OptimizerOptions",
    "PPOLossOptions",
    "PPOModule",
    "PhaseTimer",
    "PreferenceShare",
    "RewardModule",
    "RewardShapingOptions",
    "SFTModule",
    "ScoredResponses",
    "StageModule",
    "TooManySkippedUpdates",
    "check_names",
    "critic_source",
    "dotted_arguments",
    "draw_seed",
    "folders_during",
    "generation_settings",
    "is_dry_run",
    "is_out_of_memory",
    "iteration_generator",
    "merge_options",
    "option_groups",
    "option_names",
    "run_id",
    "suggest_change",
    "tokens_within_memory",
    "trained_networks",
]
