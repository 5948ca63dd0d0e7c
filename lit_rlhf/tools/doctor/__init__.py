"""Checks of a PPO run before it starts, on the user's own models, data and strategy."""

from lit_rlhf.tools.doctor.memory import NetworkShape, PPOMemory, PPOSizes, ppo_memory
from lit_rlhf.tools.doctor.plan import QUIET, RunPlan, examination_settings, plan_run
from lit_rlhf.tools.doctor.report import Display, Finding, Report, Status
from lit_rlhf.tools.doctor.run import (
    CHECKS_BEFORE,
    CHECKS_DURING,
    START,
    START_ABOUT,
    Check,
    examine,
    report_start_failure,
)

__all__ = [
    "CHECKS_BEFORE",
    "CHECKS_DURING",
    "QUIET",
    "START",
    "START_ABOUT",
    "Check",
    "Display",
    "Finding",
    "NetworkShape",
    "PPOMemory",
    "PPOSizes",
    "Report",
    "RunPlan",
    "Status",
    "examination_settings",
    "examine",
    "plan_run",
    "ppo_memory",
    "report_start_failure",
]
