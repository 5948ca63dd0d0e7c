"""One DeepSpeed engine per optimizer, two calls that train alike everywhere, and safe checkpoints.

Importing this package registers the strategy's names with Lightning, so that
`Trainer(strategy="multi_deepspeed_stage_2")` and `--trainer.strategy multi_deepspeed_stage_2` work.
DeepSpeed itself is imported when such a strategy is built, not before.
"""

from lit_rlhf.strategies.checkpoint_io import AtomicCheckpointIO, use_atomic_checkpoints
from lit_rlhf.strategies.checkpoint_search import checkpoint_problem, newest_checkpoint
from lit_rlhf.strategies.multi_engine import MultiEngineDeepSpeedStrategy
from lit_rlhf.strategies.optimization import OptimizerStep, backward, clipped_step
from lit_rlhf.strategies.registration import register_strategies
from lit_rlhf.strategies.saved_weights import SavedCheckpoint, plain_state_dict, read_checkpoint

__all__ = [
    "AtomicCheckpointIO",
    "MultiEngineDeepSpeedStrategy",
    "OptimizerStep",
    "SavedCheckpoint",
    "backward",
    "checkpoint_problem",
    "clipped_step",
    "newest_checkpoint",
    "plain_state_dict",
    "read_checkpoint",
    "use_atomic_checkpoints",
]

register_strategies()
