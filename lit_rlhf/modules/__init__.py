"""The LightningModules of the three stages, and the groups of their options.

- `SFTModule`, `RewardModule` and `PPOModule` are the stages, `StageModule` what they share.
- The `*Options` are groups of options; see also `lit_rlhf.models.ModelOptions` and
  `lit_rlhf.rollout.SamplingOptions`.
"""

from lit_rlhf.modules.option_names import dotted_arguments as dotted_arguments
from lit_rlhf.modules.option_names import merge_options as merge_options
from lit_rlhf.modules.option_names import option_groups as option_groups
from lit_rlhf.modules.option_names import option_names as option_names
from lit_rlhf.modules.option_names import plain_values as plain_values
from lit_rlhf.modules.options import OptimizerOptions as OptimizerOptions
from lit_rlhf.modules.phase_timer import PhaseTimer as PhaseTimer
from lit_rlhf.modules.phase_timer import suggest_change as suggest_change
from lit_rlhf.modules.ppo import PPOModule as PPOModule
from lit_rlhf.modules.ppo import generation_settings as generation_settings
from lit_rlhf.modules.resume import CONTRACT_KEY as CONTRACT_KEY
from lit_rlhf.modules.resume import RUN_KEY as RUN_KEY
from lit_rlhf.modules.resume import SETTINGS_KEY as SETTINGS_KEY
from lit_rlhf.modules.resume import VERSIONS_KEY as VERSIONS_KEY
from lit_rlhf.modules.resume import ChangedRunError as ChangedRunError
from lit_rlhf.modules.resume import run_id as run_id
from lit_rlhf.modules.reward import RewardModule as RewardModule
from lit_rlhf.modules.run_folders import checkpoint_folders as checkpoint_folders
from lit_rlhf.modules.run_folders import training_folders as training_folders
from lit_rlhf.modules.run_folders import versioned_log_folder as versioned_log_folder
from lit_rlhf.modules.run_state import FinishedWeights as FinishedWeights
from lit_rlhf.modules.sft import SFTModule as SFTModule
from lit_rlhf.modules.stage import StageModule as StageModule
from lit_rlhf.modules.updates import TooManySkippedUpdates as TooManySkippedUpdates
from lit_rlhf.ppo import AdvantageOptions as AdvantageOptions
from lit_rlhf.ppo import CriticPretrainingOptions as CriticPretrainingOptions
from lit_rlhf.ppo import MemoryOptions as MemoryOptions
from lit_rlhf.ppo import MinibatchOptions as MinibatchOptions
from lit_rlhf.ppo import PPOLossOptions as PPOLossOptions
from lit_rlhf.ppo import RewardShapingOptions as RewardShapingOptions
from lit_rlhf.ppo import critic_source as critic_source
