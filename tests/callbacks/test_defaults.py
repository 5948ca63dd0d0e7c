"""The thresholds and counts that the documentation promises, each in one place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from lit_callbacks import (
    Action,
    AdjustCoefficient,
    AdjustLearningRate,
    CollapseDetector,
    Monitor,
    ResumeCheckpoint,
    RollBack,
)

DEFAULTS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (
        Monitor,
        {
            "deviations": 4.0,
            "suspicion": 0.75,
            "baseline_steps": 8,
            "warmup": 0,
            "smoothing": 1,
            "patience": 2,
            "horizon": 10,
            "trend_steps": 10,
            "optional": False,
        },
    ),
    (CollapseDetector, {"votes": 2, "when": "train_batch"}),
    (Action, {"level": "collapsed", "cooldown": 10}),
    (AdjustCoefficient, {"lower": 0.0, "level": "suspicious", "cooldown": 10}),
    (AdjustLearningRate, {"factor": 0.5, "times": 3, "level": "suspicious", "cooldown": 10}),
    (RollBack, {"times": 3, "every_n_steps": 5, "level": "collapsed", "cooldown": 10}),
    (ResumeCheckpoint, {"every_n_batches": None, "keep": 2}),
]


@pytest.mark.parametrize(("function", "promised"), DEFAULTS, ids=lambda case: str(case)[:40])
def test_defaults(function: Callable[..., Any], promised: dict[str, Any]) -> None:
    parameters = inspect.signature(function).parameters
    assert {name: parameters[name].default for name in promised} == promised
