"""Lightning callbacks that show and watch training, and act when it goes wrong.

They depend on Lightning, torch and Jinja2 only, and know a module by the keys that it logs. The
page about training runs is in `lit_callbacks.report`.
"""

from lit_callbacks.actions import (
    Action,
    AdjustCoefficient,
    AdjustLearningRate,
)
from lit_callbacks.detector import (
    Collapse,
    CollapseDetector,
    CollapseEarlyStopping,
    find_collapse,
)
from lit_callbacks.healthy_checkpoint import HealthyCheckpoint
from lit_callbacks.live import LiveView
from lit_callbacks.monitors import Level, Monitor, StepMetrics, Thresholds
from lit_callbacks.output import RECORDS_FILE, format_number, log_text, name_file
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
from lit_callbacks.runs import Curve, Point, Run, read_run
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
    "RECORDS_FILE",
    "Action",
    "AdjustCoefficient",
    "AdjustLearningRate",
    "Collapse",
    "CollapseDetector",
    "CollapseEarlyStopping",
    "Curve",
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
    "PerplexityMonitor",
    "PhaseSummary",
    "Point",
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
