"""Messages and calls of the first process alone.

These are the functions that Lightning uses, from the package that it takes them from. So the parts
of lit_rlhf that need no Trainer do not import Lightning, and a Trainer sets the rank for both.
"""

import os

from lightning_utilities.core.rank_zero import rank_zero_info as rank_zero_info
from lightning_utilities.core.rank_zero import rank_zero_only as rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_warn as rank_zero_warn

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""Environment variables with the rank, in the order in which Lightning looks for them."""

# The functions need a rank. Lightning sets it like this at its import, unless it is there.
_name = next((name for name in _RANK_VARIABLES if name in os.environ), "")
_rank = os.environ.get(_name, "0")
if not _rank.isdecimal():
    raise ValueError(f"{_name}: expected a rank in this environment variable, got {_rank!r}")
vars(rank_zero_only).setdefault("rank", int(_rank))
