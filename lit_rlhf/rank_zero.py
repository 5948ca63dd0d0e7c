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
_ranks = (os.environ[name] for name in _RANK_VARIABLES if name in os.environ)
vars(rank_zero_only).setdefault("rank", int(next(_ranks, 0)))
