"""Checks of a PPO run before it starts, on the user's own models, data and strategy."""

from lit_rlhf.tools.doctor.duration import ppo_seconds as ppo_seconds
from lit_rlhf.tools.doctor.memory import NetworkShape as NetworkShape
from lit_rlhf.tools.doctor.memory import PPOSizes as PPOSizes
from lit_rlhf.tools.doctor.memory import ppo_memory as ppo_memory
from lit_rlhf.tools.doctor.plan import QUIET as QUIET
from lit_rlhf.tools.doctor.plan import examination_settings as examination_settings
from lit_rlhf.tools.doctor.plan import plan_run as plan_run
from lit_rlhf.tools.doctor.report import Display as Display
from lit_rlhf.tools.doctor.report import Finding as Finding
from lit_rlhf.tools.doctor.report import Report as Report
from lit_rlhf.tools.doctor.report import Status as Status
from lit_rlhf.tools.doctor.run import CHECKS_BEFORE as CHECKS_BEFORE
from lit_rlhf.tools.doctor.run import CHECKS_DURING as CHECKS_DURING
from lit_rlhf.tools.doctor.run import START as START
from lit_rlhf.tools.doctor.run import START_ABOUT as START_ABOUT
from lit_rlhf.tools.doctor.run import Check as Check
from lit_rlhf.tools.doctor.run import examine as examine
from lit_rlhf.tools.doctor.run import report_start_failure as report_start_failure
