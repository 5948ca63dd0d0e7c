"""Callbacks that show and watch training, and act when it goes wrong.

The core (`Watch`, the monitors and the verdict) needs neither Lightning nor torch; each name is
imported when it is first used. The page about training runs is in `lit_callbacks.report`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lit_callbacks.actions import Action as Action
    from lit_callbacks.actions import AdjustCoefficient as AdjustCoefficient
    from lit_callbacks.actions import AdjustLearningRate as AdjustLearningRate
    from lit_callbacks.detector import Collapse as Collapse
    from lit_callbacks.detector import CollapseDetector as CollapseDetector
    from lit_callbacks.detector import CollapseEarlyStopping as CollapseEarlyStopping
    from lit_callbacks.detector import find_collapse as find_collapse
    from lit_callbacks.healthy_checkpoint import HealthyCheckpoint as HealthyCheckpoint
    from lit_callbacks.live import LiveView as LiveView
    from lit_callbacks.logs import LoggedStep as LoggedStep
    from lit_callbacks.logs import ReplayedStep as ReplayedStep
    from lit_callbacks.logs import read_logged_steps as read_logged_steps
    from lit_callbacks.logs import replay_run as replay_run
    from lit_callbacks.logs import replay_steps as replay_steps
    from lit_callbacks.monitors import Level as Level
    from lit_callbacks.monitors import Monitor as Monitor
    from lit_callbacks.monitors import StepMetrics as StepMetrics
    from lit_callbacks.monitors import Thresholds as Thresholds
    from lit_callbacks.output import log_text as log_text
    from lit_callbacks.output import name_file as name_file
    from lit_callbacks.phases import PhaseSummary as PhaseSummary
    from lit_callbacks.progress import StageProgressBar as StageProgressBar
    from lit_callbacks.resume import ResumeCheckpoint as ResumeCheckpoint
    from lit_callbacks.resume import count_resumed_epoch as count_resumed_epoch
    from lit_callbacks.resume import default_checkpoint_dir as default_checkpoint_dir
    from lit_callbacks.rollback import RollBack as RollBack
    from lit_callbacks.rollback import StopTraining as StopTraining
    from lit_callbacks.runs import RECORDS_FILE as RECORDS_FILE
    from lit_callbacks.runs import Curve as Curve
    from lit_callbacks.runs import Point as Point
    from lit_callbacks.runs import Run as Run
    from lit_callbacks.runs import read_run as read_run
    from lit_callbacks.sample_timeline import SampleTimeline as SampleTimeline
    from lit_callbacks.signals import EnsembleMonitor as EnsembleMonitor
    from lit_callbacks.signals import EntropyMonitor as EntropyMonitor
    from lit_callbacks.signals import ExplainedVarianceMonitor as ExplainedVarianceMonitor
    from lit_callbacks.signals import FirstRatioMonitor as FirstRatioMonitor
    from lit_callbacks.signals import KLMonitor as KLMonitor
    from lit_callbacks.signals import KLPerTokenMonitor as KLPerTokenMonitor
    from lit_callbacks.signals import LengthMonitor as LengthMonitor
    from lit_callbacks.signals import NonFiniteMonitor as NonFiniteMonitor
    from lit_callbacks.signals import OpeningMonitor as OpeningMonitor
    from lit_callbacks.signals import PerplexityMonitor as PerplexityMonitor
    from lit_callbacks.signals import PromptMonitor as PromptMonitor
    from lit_callbacks.signals import RepeatedBigramsMonitor as RepeatedBigramsMonitor
    from lit_callbacks.signals import RepetitionMonitor as RepetitionMonitor
    from lit_callbacks.signals import RewardDistributionMonitor as RewardDistributionMonitor
    from lit_callbacks.signals import TruncationMonitor as TruncationMonitor
    from lit_callbacks.signals import default_monitors as default_monitors
    from lit_callbacks.trainer_callback import WatchCallback as WatchCallback
    from lit_callbacks.verdict import Verdict as Verdict
    from lit_callbacks.watch import Watch as Watch
    from lit_callbacks.words import format_number as format_number

__version__ = "0.1.0"

# Those of the core come first: looking a name up imports the modules before its own, so that a
# LightningCLI finds the callbacks by their short names.
_NAMES = {
    "watch": "Watch",
    "monitors": "Level Monitor StepMetrics Thresholds",
    "signals": (
        "EnsembleMonitor EntropyMonitor ExplainedVarianceMonitor FirstRatioMonitor "
        "KLMonitor KLPerTokenMonitor LengthMonitor NonFiniteMonitor OpeningMonitor "
        "PerplexityMonitor PromptMonitor RepeatedBigramsMonitor RepetitionMonitor "
        "RewardDistributionMonitor TruncationMonitor default_monitors"
    ),
    "verdict": "Verdict",
    "runs": "RECORDS_FILE Curve Point Run read_run",
    "logs": "LoggedStep ReplayedStep read_logged_steps replay_run replay_steps",
    "words": "format_number",
    "trainer_callback": "WatchCallback",
    "detector": "Collapse CollapseDetector CollapseEarlyStopping find_collapse",
    "rollback": "RollBack StopTraining",
    "actions": "Action AdjustCoefficient AdjustLearningRate",
    "healthy_checkpoint": "HealthyCheckpoint",
    "live": "LiveView",
    "phases": "PhaseSummary",
    "progress": "StageProgressBar",
    "output": "log_text name_file",
    "resume": "ResumeCheckpoint count_resumed_epoch default_checkpoint_dir",
    "sample_timeline": "SampleTimeline",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name in _MODULES:
        for module in _NAMES:
            found = import_module(f"{__name__}.{module}")
            if module == _MODULES[name]:
                return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
