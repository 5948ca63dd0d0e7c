"""Callbacks that show and watch training, and act when it goes wrong.

The core (`Watch`, the monitors and the verdict) needs neither Lightning nor torch; each name is
imported when it is first used. The page about training runs is in `lit_callbacks.report`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lit_callbacks.actions import Action, AdjustCoefficient, AdjustLearningRate
    from lit_callbacks.detector import (
        Collapse,
        CollapseDetector,
        CollapseEarlyStopping,
        find_collapse,
    )
    from lit_callbacks.healthy_checkpoint import HealthyCheckpoint
    from lit_callbacks.live import LiveView
    from lit_callbacks.monitors import Level, Monitor, StepMetrics, Thresholds
    from lit_callbacks.output import log_text, name_file
    from lit_callbacks.phases import PhaseSummary
    from lit_callbacks.progress import StageProgressBar
    from lit_callbacks.replay import (
        LoggedStep,
        ReplayedStep,
        read_logged_steps,
        replay_run,
        replay_steps,
    )
    from lit_callbacks.resume import ResumeCheckpoint, count_resumed_epoch, default_checkpoint_dir
    from lit_callbacks.rollback import RollBack, StopTraining
    from lit_callbacks.runs import RECORDS_FILE, Curve, Point, Run, read_run
    from lit_callbacks.sample_timeline import SampleTimeline
    from lit_callbacks.signals import (
        EnsembleMonitor,
        EntropyMonitor,
        ExplainedVarianceMonitor,
        FirstRatioMonitor,
        KLMonitor,
        KLPerTokenMonitor,
        LengthMonitor,
        NonFiniteMonitor,
        OpeningMonitor,
        PerplexityMonitor,
        PromptMonitor,
        RepeatedBigramsMonitor,
        RepetitionMonitor,
        RewardDistributionMonitor,
        TruncationMonitor,
        default_monitors,
    )
    from lit_callbacks.trainer_callback import WatchCallback
    from lit_callbacks.verdict import Verdict
    from lit_callbacks.watch import Watch
    from lit_callbacks.words import format_number

__version__ = "0.1.0"

# Those of the core come first: looking a name up imports the modules before its own.
_MODULES = (
    *("watch", "monitors", "signals", "runs", "replay", "words", "trainer_callback"),
    *("detector", "rollback", "actions", "healthy_checkpoint", "live", "phases", "progress"),
    *("output", "resume", "sample_timeline"),
)

__all__ = [
    "RECORDS_FILE",
    "Action",
    "AdjustCoefficient",
    "AdjustLearningRate",
    "Collapse",
    "CollapseDetector",
    "CollapseEarlyStopping",
    "Curve",
    "EnsembleMonitor",
    "EntropyMonitor",
    "ExplainedVarianceMonitor",
    "FirstRatioMonitor",
    "HealthyCheckpoint",
    "KLMonitor",
    "KLPerTokenMonitor",
    "LengthMonitor",
    "Level",
    "LiveView",
    "LoggedStep",
    "Monitor",
    "NonFiniteMonitor",
    "OpeningMonitor",
    "PerplexityMonitor",
    "PhaseSummary",
    "Point",
    "PromptMonitor",
    "RepeatedBigramsMonitor",
    "RepetitionMonitor",
    "ReplayedStep",
    "ResumeCheckpoint",
    "RewardDistributionMonitor",
    "RollBack",
    "Run",
    "SampleTimeline",
    "StageProgressBar",
    "StepMetrics",
    "StopTraining",
    "Thresholds",
    "TruncationMonitor",
    "Verdict",
    "Watch",
    "WatchCallback",
    "count_resumed_epoch",
    "default_checkpoint_dir",
    "default_monitors",
    "find_collapse",
    "format_number",
    "log_text",
    "name_file",
    "read_logged_steps",
    "read_run",
    "replay_run",
    "replay_steps",
]


def __getattr__(name: str) -> object:
    if name in __all__:
        for module in _MODULES:
            try:
                return getattr(import_module(f"{__name__}.{module}"), name)
            except AttributeError:
                continue
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
