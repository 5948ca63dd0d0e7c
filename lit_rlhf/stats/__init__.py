"""Statistics over a run (`RunningMoments`) and over the ranks of a distributed run."""

from lit_rlhf.stats.distributed import (
    all_gather_rows,
    global_denominator,
    global_masked_moments,
    global_max,
    global_means,
    global_sum,
    world_size,
)
from lit_rlhf.stats.running import FixedDtypeBuffers, RunningMoments

__all__ = [
    "FixedDtypeBuffers",
    "RunningMoments",
    "all_gather_rows",
    "global_denominator",
    "global_masked_moments",
    "global_max",
    "global_means",
    "global_sum",
    "world_size",
]
