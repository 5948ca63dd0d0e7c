"""The LightningModules of the three stages, and the groups of their options.

- `SFTModule`, `RewardModule` and `PPOModule` are the stages, `StageModule` what they share.
- The `*Options` are groups of options; see also `lit_rlhf.models.ModelOptions` and
  `lit_rlhf.rollout.SamplingOptions`.
"""

from lit_rlhf.modules.finished import checkpoint_folders as checkpoint_folders
from lit_rlhf.modules.finished import folders_during as folders_during
from lit_rlhf.modules.finished import is_dry_run as is_dry_run
from lit_rlhf.modules.option_names import dotted_arguments as dotted_arguments
from lit_rlhf.modules.option_names import merge_options as merge_options
from lit_rlhf.modules.option_names import option_groups as option_groups
from lit_rlhf.modules.option_names import option_names as option_names
from lit_rlhf.modules.options import CriticPretrainingOptions as CriticPretrainingOptions
from lit_rlhf.modules.options import MinibatchOptions as MinibatchOptions
from lit_rlhf.modules.options import OptimizerOptions as OptimizerOptions
from lit_rlhf.modules.phases import PhaseTimer as PhaseTimer
from lit_rlhf.modules.phases import suggest_change as suggest_change
from lit_rlhf.modules.ppo import ROLLOUT_MEMORY as ROLLOUT_MEMORY
from lit_rlhf.modules.ppo import UPDATE_MEMORY as UPDATE_MEMORY
from lit_rlhf.modules.ppo import PPOModule as PPOModule
from lit_rlhf.modules.ppo import generation_settings as generation_settings
from lit_rlhf.modules.ppo import iteration_draws as iteration_draws
from lit_rlhf.modules.resuming import CONTRACT_KEY as CONTRACT_KEY
from lit_rlhf.modules.resuming import RUN_KEY as RUN_KEY
from lit_rlhf.modules.resuming import SETTINGS_KEY as SETTINGS_KEY
from lit_rlhf.modules.resuming import VERSIONS_KEY as VERSIONS_KEY
from lit_rlhf.modules.resuming import ChangedRunError as ChangedRunError
from lit_rlhf.modules.resuming import run_id as run_id
from lit_rlhf.modules.reward import RewardModule as RewardModule
from lit_rlhf.modules.sft import SFTModule as SFTModule
from lit_rlhf.modules.stage import StageModule as StageModule
from lit_rlhf.modules.updates import TooManySkippedUpdates as TooManySkippedUpdates
from lit_rlhf.modules.updates import require_finite_weights as require_finite_weights
from lit_rlhf.modules.updates import tokens_within_memory as tokens_within_memory
from lit_rlhf.modules.updates import trained_networks as trained_networks
from lit_rlhf.ppo import AdvantageOptions as AdvantageOptions
from lit_rlhf.ppo import LossShare as LossShare
from lit_rlhf.ppo import MemoryOptions as MemoryOptions
from lit_rlhf.ppo import PPOLossOptions as PPOLossOptions
from lit_rlhf.ppo import RewardShapingOptions as RewardShapingOptions
from lit_rlhf.ppo import critic_source as critic_source
