"""The thresholds and counts that the documentation promises, each in one place."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from lit_callbacks import (
    Action,
    AdjustCoefficient,
    AdjustLearningRate,
    CollapseDetector,
    ResumeCheckpoint,
    RollBack,
    default_monitors,
)

PLAIN: dict[str, Any] = {
    **dict.fromkeys(("high", "high_ratio", "low", "low_ratio")),
    **{"deviations": 4.0, "suspicion": 0.75, "baseline_steps": 8, "warmup": 0, "smoothing": 1},
    **{"patience": 2, "horizon": 10, "trend_steps": 10, "optional": False},
}
DEFAULTS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (CollapseDetector, {"votes": 2, "when": "train_batch"}),
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
    ("LengthMonitor", {"high_ratio": 1.75, "low_ratio": 0.6}),
    ("TruncationMonitor", {"high": 0.3, "high_ratio": 2.0}),
    ("PerplexityMonitor", {"high_ratio": 1.8, "low_ratio": 0.55}),
    ("EntropyMonitor", {"high_ratio": 1.8, "low_ratio": 0.55}),
    ("RepetitionMonitor", {"low_ratio": 0.7}),
    ("RepeatedBigramsMonitor", {"high": 0.15, "high_ratio": 2.0, "optional": True}),
    ("OpeningMonitor", {"high": 0.3, "high_ratio": 2.0, "optional": True}),
    ("RewardDistributionMonitor", {"high_ratio": 2.0, "low_ratio": 0.4}),
    ("EnsembleMonitor", {"high_ratio": 2.0, "optional": True}),
    ("ExplainedVarianceMonitor", {"low": 0.0, "warmup": 20, "patience": 5, "optional": True}),
    ("FirstRatioMonitor", {"high": 1.05, "low": 0.95, "optional": True}),
    ("SamplerMonitor", {"high": 0.02, "high_ratio": 3.0, "optional": True}),
    ("PromptMonitor", PROMPTS),
    ("PromptMonitor", PROMPTS),
    ("NonFiniteMonitor", {"high": 0.0, "horizon": 0, "patience": 2}),
]
VOTES = {
    "kl": ["rollout/kl", "rollout/kl_per_token"],
    "length": ["rollout/response_length", "rollout/truncation_rate"],
    "entropy": ["rollout/perplexity", "rollout/entropy"],
    "repetition": ["rollout/distinct_2", "rollout/repeated_2"],
    **{"opening": ["rollout/opening_share"], "reward": ["scores"]},
    **{"ensemble": ["rollout/score_spread"], "critic": ["ppo/explained_variance"]},
    "data": ["rollout/prompt_length", "rollout/ref_prompt_entropy"],
    **{"ratio": ["ppo/ratio_first"], "sampler": ["rollout/sampler_kl"]},
    **{"non-finite": ["non-finite"]},
}
"""Keys of the default monitors by the signal that they vote for."""


@pytest.mark.parametrize(("function", "promised"), DEFAULTS, ids=lambda case: str(case)[:40])
def test_defaults(function: Callable[..., Any], promised: dict[str, Any]) -> None:
    parameters = inspect.signature(function).parameters
    assert {name: parameters[name].default for name in promised} == promised


def test_default_monitors() -> None:
    found = default_monitors()
    assert [type(monitor).__name__ for monitor in found] == [name for name, _ in MONITORS]
    for monitor, (name, options) in zip(found, MONITORS, strict=True):
        promised = PLAIN | options
        assert {key: getattr(monitor, key) for key in promised} == promised, name
    votes: dict[str, list[str]] = {}
    for monitor in found:
        votes.setdefault(monitor.vote, []).append(monitor.key)
    assert votes == VOTES
