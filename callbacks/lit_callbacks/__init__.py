"""lit_callbacks: Lightning callbacks that show and watch training, and act when it goes wrong.

They need Lightning and torch only and know a module by the keys that it logs.
"""

from lit_callbacks.actions import (
    Action,
    AdjustCoefficient,
    AdjustLearningRate,
    LogVerdict,
    StopTraining,
    WarnOfVerdict,
)
from lit_callbacks.detector import CollapseDetector, CollapseEarlyStopping
from lit_callbacks.healthy_checkpoint import HealthyCheckpoint
from lit_callbacks.levels import Level
from lit_callbacks.live import LiveView
from lit_callbacks.monitors import Monitor, Record
from lit_callbacks.phases import PhaseReport, PhaseSummary
from lit_callbacks.progress import StageProgressBar
from lit_callbacks.resume import ResumeCheckpoint
from lit_callbacks.rollback import RollBack
from lit_callbacks.sample_timeline import SampleTimeline
from lit_callbacks.signals import (
    EntropyMonitor,
    ExplainedVarianceMonitor,
    FirstRatioMonitor,
    KLMonitor,
    KLPerTokenMonitor,
    LengthMonitor,
    NonFiniteMonitor,
    PerplexityMonitor,
    RepetitionMonitor,
    RewardDistributionMonitor,
    TruncationMonitor,
    default_monitors,
)
from lit_callbacks.verdict import Verdict

__version__ = "0.1.0"

__all__ = [
    "Action",
    "AdjustCoefficient",
    "AdjustLearningRate",
    "CollapseDetector",
    "CollapseEarlyStopping",
    "EntropyMonitor",
    "ExplainedVarianceMonitor",
    "FirstRatioMonitor",
    "HealthyCheckpoint",
    "KLMonitor",
    "KLPerTokenMonitor",
    "LengthMonitor",
    "Level",
    "LiveView",
    "LogVerdict",
    "Monitor",
    "NonFiniteMonitor",
    "PerplexityMonitor",
    "PhaseReport",
    "PhaseSummary",
    "Record",
    "RepetitionMonitor",
    "ResumeCheckpoint",
    "RewardDistributionMonitor",
    "RollBack",
    "SampleTimeline",
    "StageProgressBar",
    "StopTraining",
    "TruncationMonitor",
    "Verdict",
    "WarnOfVerdict",
    "default_monitors",
]
