"""Every callback, monitor and action refuses a wrong argument by its name, and says what it got."""

import math
from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_callbacks import (
    AdjustCoefficient,
    AdjustLearningRate,
    CollapseDetector,
    Monitor,
    ResumeCheckpoint,
    RollBack,
    StageProgressBar,
    StopTraining,
    Watch,
)
from lit_callbacks.healthy_checkpoint import HealthyCheckpoint
from lit_callbacks.sample_timeline import SampleTimeline
from lit_callbacks.signals import KLPerTokenMonitor

NAN, INF = math.nan, math.inf
AT_LEAST_1 = (0, -1)
# which an older Lightning does not have
NEW = {"save_on_exception"} & signature(ModelCheckpoint).parameters.keys()
WRONG: list[tuple[Callable[..., Any], dict[str, Any], dict[str, tuple[Any, ...]]]] = [
    (
        Monitor,
        {"key": "x", "high": 1.0},
        {
            **dict.fromkeys(("baseline_steps", "patience"), AT_LEAST_1),
            **dict.fromkeys(("warmup", "horizon"), (-1,)),
            "smoothing": (0, 101),
            "trend_steps": (2, 101),
            "high": (NAN, -INF),
            "low": (NAN, 1.0),
            "high_ratio": (1.0, NAN),
            "low_ratio": (1.0, -0.1),
            "deviations": (-1.0, NAN),
        },
    ),
    (KLPerTokenMonitor, {}, {"decisive_factor": (0.5,)}),
    (CollapseDetector, {}, {"votes": (0,), "when": ("batch",), "monitors": ([],)}),
    (Watch, {}, {"votes": (0,), "monitors": ([],)}),
    (StopTraining, {}, {"level": ("bad", "healthy"), "cooldown": (0,)}),
    (AdjustCoefficient, {"name": "a", "factor": 2.0}, {"factor": (1.0, -2.0, INF)}),
    (AdjustLearningRate, {}, {"factor": (1.0,), "times": (0,)}),
    (RollBack, {}, {"times": (0,), "every_n_steps": (0,), "lr_factor": (2.0, 0.0)}),
    (ResumeCheckpoint, {}, {"every_n_batches": (0,), "every_n_minutes": (0.0,), "keep": (1,)}),
    (
        HealthyCheckpoint,
        {"monitor": "score"},
        {
            "monitor": (None,),
            "save_top_k": (-1, 0),
            "bounds": tuple({"kl": x} for x in ([1.0, 0.0], [1.0], [NAN, 1.0], [True, 1.0], 3)),
            **dict.fromkeys(NEW, (True,)),
        },
    ),
    (StageProgressBar, {}, {"refresh_rate": (-1,), "metrics": ("kl",)}),
    (
        SampleTimeline,
        {"prompts": ["a"]},
        {"prompts": ([], ["a", " "], "hello"), "every_n_batches": (0,), "n_prompts": (0,)},
    ),
]


@pytest.mark.parametrize(
    ("make", "valid", "wrong"), WRONG, ids=lambda x: getattr(x, "__name__", "")
)
def test_wrong_argument_is_named(make: Any, valid: Any, wrong: Any) -> None:
    make(**valid)
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=rf"^{name}\S*: expected .*, got "):
                make(**valid | {name: value})


def test_arguments_that_do_not_fit_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="expected high, high_ratio, low or low_ratio, got none"):
        Monitor("x")
    with pytest.raises(ValueError, match=r"expected lower <= upper, got 3\.0 and 1\.0"):
        AdjustCoefficient("a", 2.0, 3.0, 1.0)
