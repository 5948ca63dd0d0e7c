"""Checks of a PPO run before it starts, on the user's own models, data and strategy."""

from lit_rlhf.tools.doctor.checks.time import PhaseSeconds as PhaseSeconds
from lit_rlhf.tools.doctor.checks.time import ppo_seconds as ppo_seconds
from lit_rlhf.tools.doctor.memory import NetworkShape as NetworkShape
from lit_rlhf.tools.doctor.memory import PPOSizes as PPOSizes
from lit_rlhf.tools.doctor.memory import ppo_memory as ppo_memory
from lit_rlhf.tools.doctor.plan import QUIET as QUIET
from lit_rlhf.tools.doctor.report import Display as Display
from lit_rlhf.tools.doctor.report import Finding as Finding
from lit_rlhf.tools.doctor.report import Report as Report
from lit_rlhf.tools.doctor.report import Status as Status
from lit_rlhf.tools.doctor.run import examine as examine
from lit_rlhf.tools.doctor.traffic import PhaseTraffic as PhaseTraffic
from lit_rlhf.tools.doctor.traffic import ppo_traffic as ppo_traffic
