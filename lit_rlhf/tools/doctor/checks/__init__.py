"""The checks, by what they look at. Each takes a `Case` and returns a `Finding`."""

from lit_rlhf.tools.doctor.checks.clipping import check_clipping
from lit_rlhf.tools.doctor.checks.distributions import (
    check_padding,
    check_ratio,
    check_reference,
    check_sampling,
)
from lit_rlhf.tools.doctor.checks.eos import check_eos
from lit_rlhf.tools.doctor.checks.memory import check_memory, free_memory
from lit_rlhf.tools.doctor.checks.text import check_text_contract, check_vocabulary
from lit_rlhf.tools.doctor.checks.time import check_time

__all__ = [
    "check_clipping",
    "check_eos",
    "check_memory",
    "check_padding",
    "check_ratio",
    "check_reference",
    "check_sampling",
    "check_text_contract",
    "check_time",
    "check_vocabulary",
    "free_memory",
]
