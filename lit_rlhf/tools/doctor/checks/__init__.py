"""The checks, by what they look at. Each takes a `Case` and returns a `Finding`."""

from lit_rlhf.tools.doctor.checks.clipping import check_clipping as check_clipping
from lit_rlhf.tools.doctor.checks.distributions import check_padding as check_padding
from lit_rlhf.tools.doctor.checks.distributions import check_ratio as check_ratio
from lit_rlhf.tools.doctor.checks.distributions import check_reference as check_reference
from lit_rlhf.tools.doctor.checks.distributions import check_sampling as check_sampling
from lit_rlhf.tools.doctor.checks.eos import check_eos as check_eos
from lit_rlhf.tools.doctor.checks.memory import check_memory as check_memory
from lit_rlhf.tools.doctor.checks.memory import free_memory as free_memory
from lit_rlhf.tools.doctor.checks.text import check_text_contract as check_text_contract
from lit_rlhf.tools.doctor.checks.text import check_vocabulary as check_vocabulary
from lit_rlhf.tools.doctor.checks.time import check_time as check_time
