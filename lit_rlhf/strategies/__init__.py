"""Optimizer steps and checkpoints under every strategy, DeepSpeed with two networks included.

- `backward` and `clipped_step` train a network under any strategy.
- `MultiEngineDeepSpeedStrategy` gives every optimizer its own DeepSpeed engine. Importing this
  package registers it, so `Trainer(strategy="multi_deepspeed_stage_2")` and
  `--trainer.strategy multi_deepspeed_stage_2` work. DeepSpeed is imported when the strategy is
  built.
- `AtomicCheckpointIO` writes checkpoints that are complete or absent.
- `read_checkpoint` and `read_state_dict` read a checkpoint of any strategy, in one process. A
  missing one raises FileNotFoundError; a damaged or foreign one ValueError, with the newest intact
  checkpoint beside it.
"""

from lit_rlhf.strategies.checkpoint_files import (
    NAME_KEY,
    AtomicCheckpointIO,
    checkpoint_problem,
    find_newest_checkpoint,
    is_checkpoint_folder,
    use_atomic_checkpoints,
)
from lit_rlhf.strategies.engine_optimizer import EngineOptimizer
from lit_rlhf.strategies.multi_engine import MultiEngineDeepSpeedStrategy, register_strategies
from lit_rlhf.strategies.optimization import OptimizerStep, backward, clipped_step
from lit_rlhf.strategies.saved_checkpoint import (
    SavedCheckpoint,
    read_checkpoint,
    read_lightning_state,
    read_state_dict,
)

__all__ = [
    "NAME_KEY",
    "AtomicCheckpointIO",
    "EngineOptimizer",
    "MultiEngineDeepSpeedStrategy",
    "OptimizerStep",
    "SavedCheckpoint",
    "backward",
    "checkpoint_problem",
    "clipped_step",
    "find_newest_checkpoint",
    "is_checkpoint_folder",
    "read_checkpoint",
    "read_lightning_state",
    "read_state_dict",
    "use_atomic_checkpoints",
]

register_strategies()
