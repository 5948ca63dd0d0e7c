"""PPO as an algorithm: options, networks, the phases of an iteration and its update.

Nothing here needs a Trainer: `docs/ppo_object.md` trains two models in plain PyTorch.
"""

from lit_rlhf.micro_batches import LossShare as LossShare
from lit_rlhf.micro_batches import NetworkUpdate as NetworkUpdate
from lit_rlhf.ppo.algorithm import PPO as PPO
from lit_rlhf.ppo.algorithm import ROLLOUT_MEMORY as ROLLOUT_MEMORY
from lit_rlhf.ppo.algorithm import UPDATE_MEMORY as UPDATE_MEMORY
from lit_rlhf.ppo.algorithm import Collected as Collected
from lit_rlhf.ppo.algorithm import Draws as Draws
from lit_rlhf.ppo.algorithm import Lesson as Lesson
from lit_rlhf.ppo.algorithm import iteration_draws as iteration_draws
from lit_rlhf.ppo.networks import CriticInit as CriticInit
from lit_rlhf.ppo.networks import PPONetworks as PPONetworks
from lit_rlhf.ppo.networks import critic_source as critic_source
from lit_rlhf.ppo.networks import load_networks as load_networks
from lit_rlhf.ppo.options import AdvantageOptions as AdvantageOptions
from lit_rlhf.ppo.options import CriticPretrainingOptions as CriticPretrainingOptions
from lit_rlhf.ppo.options import MemoryOptions as MemoryOptions
from lit_rlhf.ppo.options import MinibatchOptions as MinibatchOptions
from lit_rlhf.ppo.options import PPOLossOptions as PPOLossOptions
from lit_rlhf.ppo.options import PPOOptions as PPOOptions
from lit_rlhf.ppo.options import RewardShapingOptions as RewardShapingOptions
from lit_rlhf.ppo.options import check_options as check_options
from lit_rlhf.ppo.stepping import NetworkName as NetworkName
from lit_rlhf.ppo.stepping import OptimizerStepper as OptimizerStepper
from lit_rlhf.ppo.stepping import Stepper as Stepper
