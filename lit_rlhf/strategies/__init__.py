"""Optimizer steps and checkpoints under every strategy, DeepSpeed with two networks included.

- `backward` and `clipped_step` train a network under any strategy.
- `MultiEngineDeepSpeedStrategy` gives every optimizer its own DeepSpeed engine. Importing this
  package registers it as `multi_deepspeed_stage_2`, and building it imports DeepSpeed.
- `ShardedStrategy`, registered as `fsdp2`, keeps a share of every network on each rank.
- `AtomicCheckpointIO` writes checkpoints that are complete or absent.
- `read_checkpoint` and `read_state_dict` read a checkpoint of any strategy, in one process. A
  missing one raises FileNotFoundError; a damaged or foreign one ValueError, with the newest intact
  checkpoint beside it.
"""

from lit_rlhf.strategies.checkpoint_files import NAME_KEY as NAME_KEY
from lit_rlhf.strategies.checkpoint_files import AtomicCheckpointIO as AtomicCheckpointIO
from lit_rlhf.strategies.checkpoint_files import SavedCheckpoint as SavedCheckpoint
from lit_rlhf.strategies.checkpoint_files import checkpoint_problem as checkpoint_problem
from lit_rlhf.strategies.checkpoint_files import find_newest_checkpoint as find_newest_checkpoint
from lit_rlhf.strategies.checkpoint_files import is_checkpoint_folder as is_checkpoint_folder
from lit_rlhf.strategies.checkpoint_files import read_checkpoint as read_checkpoint
from lit_rlhf.strategies.checkpoint_files import read_lightning_state as read_lightning_state
from lit_rlhf.strategies.checkpoint_files import read_state_dict as read_state_dict
from lit_rlhf.strategies.checkpoint_files import use_atomic_checkpoints as use_atomic_checkpoints
from lit_rlhf.strategies.folder_checkpoints import full_tensor as full_tensor
from lit_rlhf.strategies.multi_engine import (
    MultiEngineDeepSpeedStrategy as MultiEngineDeepSpeedStrategy,
)
from lit_rlhf.strategies.multi_engine import register_strategies
from lit_rlhf.strategies.optimization import average_gradients as average_gradients
from lit_rlhf.strategies.optimization import backward as backward
from lit_rlhf.strategies.optimization import clipped_step as clipped_step
from lit_rlhf.strategies.sharded import ShardedStrategy as ShardedStrategy

register_strategies()
