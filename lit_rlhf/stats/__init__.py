"""Statistics over time and over ranks."""

from lit_rlhf.stats.buffers import UncastBuffers
from lit_rlhf.stats.distributed import global_masked_moments, global_sum
from lit_rlhf.stats.running import RunningMoments

__all__ = ["RunningMoments", "UncastBuffers", "global_masked_moments", "global_sum"]
