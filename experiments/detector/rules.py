"""What the detector is compared with: a threshold on KL, and rewardspy's rules.

The rules are written anew from what rewardspy documents (github.com/AvAdiii/rewardspy,
docs/detectors.md at commit 2b775fe, sensitivity `medium`). It reads the reward of every response; a
log has their mean and perhaps their spread, so a rule is left out where a run lacks its numbers.
Component dominance (one reward here), ceiling saturation (needs single rewards) and the collapse of
GRPO's groups (needs groups) never apply to the runs of PPO.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, pstdev

from experiments.detector.families import Step, Trajectory

KL_PER_RESPONSE = (0.5, 1.0, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0)
KL_PER_TOKEN = (0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5)
EARLY = 8  # steps of a rule's baseline, as ours
RECENT = 8  # steps that count as recent


def kl_of(step: Step, per_token: bool) -> float:
    """KL of a step, from what it has."""
    tokens = step.get("rollout/response_length", math.nan)
    if per_token:
        return step.get("rollout/kl_per_token", step.get("rollout/kl", math.nan) / max(tokens, 1))
    return step.get("rollout/kl", step.get("rollout/kl_per_token", math.nan) * tokens)


def exceeds_kl(run: Trajectory, threshold: float, per_token: bool) -> int | None:
    """Place of the first step whose KL is above a threshold."""
    values = (kl_of(step, per_token) for step in run.steps)
    return next((i for i, value in enumerate(values) if value > threshold), None)


def variance_collapse(run: Trajectory) -> int | None:
    """The spread of the rewards is below a fifth of its start (a twentieth is an alert)."""
    spread = [step.get("monitor/scores_std", math.nan) for step in run.steps]
    return _first(spread, lambda early, recent: fmean(recent) / max(fmean(early), 1e-9) < 0.2)


def reward_slope(run: Trajectory, limit: float = 5.0, drift: float = 0.5) -> int | None:
    """CUSUM of the mean reward against its start, both sides."""
    rewards = [step.get("rollout/score", math.nan) for step in run.steps]
    if len(rewards) <= EARLY or not all(map(math.isfinite, rewards)):
        return None
    baseline = fmean(rewards[:EARLY])
    up = 0.0
    down = 0.0
    for place, reward in enumerate(rewards[EARLY:], start=EARLY):
        up = max(0.0, up + (reward - baseline) - drift)
        down = max(0.0, down - (reward - baseline) - drift)
        if max(up, down) > limit:
            return place
    return None


def length_drift(run: Trajectory) -> int | None:
    """The mean length is three standard deviations of the first responses away from theirs."""
    lengths = [step.get("rollout/response_length", math.nan) for step in run.steps]
    responses = run.steps[0]["rollout/responses"]
    if not responses:  # the noise of a mean is not known
        return None

    def drifts(early: Sequence[float], recent: Sequence[float]) -> bool:
        # the spread of single responses, from the spread of their means
        spread = pstdev(early) * math.sqrt(responses)
        return abs(fmean(recent) - fmean(early)) > 3 * max(spread, 1e-9)

    return _first(lengths, drifts)


def documented_rules(run: Trajectory) -> int | None:
    """Place of the first warning or alert of any rule that applies."""
    found = [rule(run) for rule in (variance_collapse, reward_slope, length_drift)]
    return min((place for place in found if place is not None), default=None)


def _first(values: Sequence[float], holds: object) -> int | None:
    assert callable(holds)
    if not all(map(math.isfinite, values)):
        return None
    for place in range(EARLY + RECENT - 1, len(values)):
        if holds(values[:EARLY], values[place - RECENT + 1 : place + 1]):
            return place
    return None
