"""Arguments of every callback, monitor and action: what is refused, and what documents promise."""

import math
import re
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_callbacks import (
    Action,
    AdjustCoefficient,
    AdjustLearningRate,
    CollapseDetector,
    Monitor,
    ResumeCheckpoint,
    RollBack,
    StageProgressBar,
    StopTraining,
    Watch,
    default_monitors,
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


# --- the thresholds and counts that the documentation promises, each in one place

PLAIN: dict[str, Any] = {
    **dict.fromkeys(("high", "high_ratio", "low", "low_ratio")),
    **{"deviations": 4.0, "suspicion": 0.75, "baseline_steps": 8, "warmup": 0, "smoothing": 1},
    **{"patience": 2, "horizon": 10, "trend_steps": 10, "optional": False},
}
DEFAULTS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (CollapseDetector, {"votes": None, "when": "train_batch"}),
    (Action, {"level": "collapsed", "cooldown": 10}),
    (AdjustCoefficient, {"lower": 0.0, "level": "suspicious"}),
    (AdjustLearningRate, {"factor": 0.5, "times": 3, "level": "suspicious"}),
    (RollBack, {"times": 3, "every_n_steps": 5, "lr_factor": 1.0}),
    (ResumeCheckpoint, {"every_n_batches": None, "keep": 2}),
]

PROMPTS = {"high_ratio": 1.2, "low_ratio": 0.83, "optional": True}
MONITORS: list[tuple[str, dict[str, Any]]] = [  # the rest of each is as in `Monitor`
    ("KLMonitor", {"high": 30.0}),
    ("KLPerTokenMonitor", {"high": 0.07, "decisive_factor": 3.0, "decisive_nats": 15.0}),
    ("LengthMonitor", {"high_ratio": 2.0, "low_ratio": 0.6}),
    ("TruncationMonitor", {"high": 0.3, "high_ratio": 2.0, "most": 0.95}),
    ("PerplexityMonitor", {"high_ratio": 1.8, "low_ratio": 0.55}),
    ("EntropyMonitor", {"high_ratio": 1.8, "low_ratio": 0.55}),
    ("RepetitionMonitor", {"low_ratio": 0.7, "optional": True}),
    ("RepeatedBigramsMonitor", {"high": 0.15, "high_ratio": 2.0, "most": 0.7, "optional": True}),
    ("OpeningMonitor", {"high": 0.3, "high_ratio": 2.0, "most": 0.9, "optional": True}),
    ("RewardDistributionMonitor", {"high_ratio": 2.0, "low_ratio": 0.4}),
    ("EnsembleMonitor", {"high_ratio": 2.0, "optional": True}),
    (
        "GroupSpreadMonitor",
        {"high": 0.9, "suspicion": 1.0, "patience": 5, "horizon": 0, "optional": True},
    ),
    ("ExplainedVarianceMonitor", {"low": 0.0, "warmup": 20, "patience": 5, "optional": True}),
    ("FirstRatioMonitor", {"high": 1.05, "low": 0.95, "optional": True}),
    ("SamplerMonitor", {"high": 0.02, "high_ratio": 3.0, "optional": True}),
    (
        "NegativeKLMonitor",
        {"low": -1.0, "smoothing": 3, "patience": 3, "horizon": 0, "optional": True},
    ),
    (
        "ScoreMonitor",
        {"low_ratio": 0.5, "smoothing": 5, "patience": 5, "horizon": 0, "optional": True},
    ),
    ("PromptMonitor", PROMPTS),
    ("PromptMonitor", PROMPTS),
    ("NonFiniteMonitor", {"high": 0.0, "horizon": 0, "patience": 2}),
]
README = Path(__file__).resolve().parents[2] / "callbacks" / "README.md"


@pytest.mark.parametrize(("function", "promised"), DEFAULTS, ids=lambda case: str(case)[:40])
def test_defaults_of_arguments_are_the_promised_ones(
    function: Callable[..., Any], promised: dict[str, Any]
) -> None:
    parameters = signature(function).parameters
    assert {name: parameters[name].default for name in promised} == promised


def test_default_monitors_are_those_of_the_readme() -> None:
    monitors = default_monitors()
    assert [type(monitor).__name__ for monitor in monitors] == [name for name, _ in MONITORS]
    for monitor, (name, options) in zip(monitors, MONITORS, strict=True):
        promised = PLAIN | options
        assert {key: getattr(monitor, key) for key in promised} == promised, name
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)", README.read_text("utf-8"), re.MULTILINE))
    for monitor in monitors:
        signal, keys, *_ = map(str.strip, rows[type(monitor).__name__].split("|"))
        assert signal == monitor.vote
        assert f"`{monitor.key}`" in keys or keys == "all"
