"""How synthetic runs are made: courses of the signals with the noise of a batch of responses.

A course says where each signal is at a time from 0 to 1. A step's means are as noisy as means over
`responses` responses: lengths vary by 60 %, entropies by 35 %, KL by its own size, rewards by their
standard deviation, shares are binomial. A seed and the name of the kind fix all draws. Courses are
made up; what they are good for is to say which changes the detector takes for trouble, and which
noise. `kinds` has the courses.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import NamedTuple

from experiments.detector.families import CHAT, Step, Trajectory
from experiments.detector.labels import Label
from lit_callbacks.verdict import Trouble

NORMAL = {
    "length": 200.0,
    "entropy": 1.9,
    "kl_per_token": 0.0,
    "distinct_2": 0.55,
    "truncation": 0.03,
    "opening": 0.06,
    "repeated_2": 0.04,
    "score_std": 1.5,
    "explained_variance": 0.5,
    "prompt_length": 80.0,
    "ref_prompt_entropy": 2.2,
}
"""Where the signals of a run are, unless a course says otherwise; the reward rises from 0 to
`REWARD_GAIN`."""
REWARD_GAIN = 2.0
OPTIONAL = {
    "policy_loss": "ppo/policy_loss",
    "ratio_first": "ppo/ratio_first",
    "sampler_kl": "rollout/sampler_kl",
}
"""Metrics that only those courses have that name them, without noise."""

Course = Callable[[float], Mapping[str, float]]


class Kind(NamedTuple):
    """A kind of synthetic run.

    Attributes:
        family: One of `criterion.CHOOSING`.
        name: Name of the kind.
        troubles: Its label; empty for an untroubled run.
        course: Where signals are at a time from 0 to 1.
        steps: Number of steps.
        responses: Responses in a step.
        wobble: Size of a slow random walk of all signals, as a share of each.
        task: Preset of the detector that a user would choose.
        lacks: Metrics that the run does not log.
        seeds: Number of runs.
    """

    family: str
    name: str
    troubles: frozenset[Trouble]
    course: Course
    steps: int = 200
    responses: int = 64
    wobble: float = 0.03
    task: str = CHAT
    lacks: tuple[str, ...] = ()
    seeds: int = 6


def ramp(time: float, start: float = 0.0, end: float = 1.0) -> float:
    """0 before `start`, 1 after `end`, and smooth in between."""
    place = min(max((time - start) / (end - start), 0.0), 1.0)
    return place * place * (3 - 2 * place)


def between(first: float, last: float, share: float) -> float:
    """A value on the way from `first` to `last`, in the logarithm."""
    return math.exp((1 - share) * math.log(first) + share * math.log(last))


def near(most: float) -> Course:
    """KL per token that rises to `most` in the first third."""
    return lambda t: {"kl_per_token": most * ramp(t, 0, 0.33)}


def changes(kl: float, start: float = 0.2, end: float = 0.7, **last: float) -> Course:
    """Signals that move from normal to `last`, with KL per token that moves to `kl`."""

    def course(t: float) -> dict[str, float]:
        share = ramp(t, start, end)
        moved = {key: between(NORMAL[key], value, share) for key, value in last.items()}
        return {"kl_per_token": kl * share + 0.004 * ramp(t, 0, 0.2), **moved}

    return course


def growth(first: float, last: float, kl: float, entropy: float = 1.9) -> Course:
    """Length from `first` to `last` over the run."""
    return lambda t: {
        "length": between(first, last, ramp(t)),
        "entropy": between(1.9, entropy, ramp(t)),
        "kl_per_token": kl * ramp(t, 0, 0.6),
    }


def curriculum(**after: float) -> Course:
    """Other prompts from the middle of the run."""
    return lambda t: {"kl_per_token": 0.02 * ramp(t, 0, 0.4), **(after if t >= 0.5 else {})}


def swinging(t: float) -> dict[str, float]:
    """Length and entropy that swing, more and more."""
    swing = ramp(t, 0.1, 0.6) * math.sin(40 * t)
    return {
        "kl_per_token": 0.18 * abs(swing) + 0.03 * ramp(t),
        "length": 200 * math.exp(0.9 * swing),
        "entropy": 1.9 * math.exp(-0.8 * abs(swing)),
    }


def early(kl: float, last: int = 7, **after: float) -> Course:
    """A collapse within the first iterations of 200."""

    def course(t: float) -> dict[str, float]:
        share = ramp(t * 200, 1, last)
        return {
            "kl_per_token": kl * share,
            **{key: between(NORMAL[key], value, share) for key, value in after.items()},
        }

    return course


def make_run(kind: Kind, seed: int) -> Trajectory:
    """A run of a kind."""
    draw = random.Random(f"{kind.name} {seed}")
    draw_reward = random.Random(f"{kind.name} {seed} reward")
    walks = dict.fromkeys(NORMAL, 0.0)
    steps = []
    for number in range(kind.steps):
        time = number / (kind.steps - 1)
        levels = {**NORMAL, "reward": REWARD_GAIN * ramp(time), **kind.course(time)}
        for key in walks:  # a walk that returns: its standard deviation is `wobble`
            walks[key] = 0.95 * walks[key] + kind.wobble * 0.31 * draw.gauss(0, 1)
        step = sample_step(levels, walks, kind.responses, draw)
        error = levels["score_std"] / math.sqrt(kind.responses)
        step["rollout/score"] = levels["reward"] + error * draw_reward.gauss(0, 1)
        step |= {key: levels[name] for name, key in OPTIONAL.items() if name in levels}
        steps.append({key: value for key, value in step.items() if key not in kind.lacks})
    label = Label(kind.troubles)
    name = f"{kind.name}, seed {seed}"
    return Trajectory(kind.family, name, label, steps, task=kind.task)


def sample_step(
    levels: Mapping[str, float], walks: Mapping[str, float], responses: int, draw: random.Random
) -> Step:
    """Draw the metrics of a step with a number of responses."""
    error = 1 / math.sqrt(responses)

    def noisy(key: str, relative: float) -> float:
        level = levels[key] * math.exp(walks[key])
        return level * max(1 + relative * error * draw.gauss(0, 1), 0.05)

    def share(key: str) -> float:
        chance = min(levels[key], 1.0)
        return sum(draw.random() < chance for _ in range(responses)) / responses

    length = max(noisy("length", 0.6), 1.0)
    entropy = noisy("entropy", 0.35)
    # the log-ratio of a response to its reference has a variance of about twice its mean
    kl = levels["kl_per_token"] * length
    kl += math.sqrt(2 * abs(kl) + 0.25) * error * draw.gauss(0, 1)
    opening = max(share("opening"), 1 / responses)
    return {
        "rollout/responses": float(responses),
        "rollout/response_length": length,
        "rollout/kl": kl,
        "rollout/kl_per_token": kl / length,
        "rollout/entropy": entropy,
        "rollout/perplexity": math.exp(entropy * (1 + 0.1 * error * draw.gauss(0, 1))),
        "rollout/distinct_2": min(noisy("distinct_2", 0.2), 1.0),
        "rollout/truncation_rate": share("truncation"),
        "rollout/opening_share": opening,
        "rollout/repeated_2": min(noisy("repeated_2", 0.8), 1.0),
        "monitor/scores_std": noisy("score_std", 0.7),
        "ppo/explained_variance": min(noisy("explained_variance", 0.5), 1.0),
        "rollout/prompt_length": noisy("prompt_length", 0.4),
        "rollout/ref_prompt_entropy": noisy("ref_prompt_entropy", 0.5),
    }
