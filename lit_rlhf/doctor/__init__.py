"""Checks of a PPO run before it starts, on the user's own models."""

from lit_rlhf.doctor.examination import examine
from lit_rlhf.doctor.findings import Finding, Report, Status
from lit_rlhf.doctor.plan import QUIET, RunPlan, run_plan
from lit_rlhf.doctor.printing import Display

__all__ = ["QUIET", "Display", "Finding", "Report", "RunPlan", "Status", "examine", "run_plan"]
