"""Synthetic runs: courses of the signals with the sampling noise of a batch of responses.

A course says where each signal is at a time from 0 to 1. The noise of a step's means is that of
`responses` responses: lengths vary by 60 %, entropies by 35 %, KL by its own size, shares are
binomial. Courses are made up; what they are good for is to say which changes the detector takes for
a collapse, and which noise.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import NamedTuple

from experiments.detector.families import Step, Trajectory

SEEDS = range(6)
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
"""Where the signals of a run are, unless a course says otherwise."""

Course = Callable[[float], Mapping[str, float]]


class Kind(NamedTuple):
    """A kind of synthetic run.

    Attributes:
        family: One of `criterion.CHOOSING`.
        name: Name of the kind.
        collapsed: Its label.
        course: Where signals are at a time from 0 to 1.
        steps: Number of steps.
        responses: Responses in a step.
        wobble: Size of a slow random walk of all signals, as a share of each.
    """

    family: str
    name: str
    collapsed: bool
    course: Course
    steps: int = 200
    responses: int = 64
    wobble: float = 0.03


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


LONG = "synthetic: long responses"
SHARP = "synthetic: sharpening"
DATA = "synthetic: curricula"
SMALL = "synthetic: small batches"
SHORT = "synthetic: shortening and refusals"
ONE = "synthetic: one answer"
PAD = "synthetic: padding"
SHARE = "synthetic: exploits in a share"
EARLY = "synthetic: early collapse"
SLOW = "synthetic: slow collapse"

PADDED = {"length": 420.0, "distinct_2": 0.4, "repeated_2": 0.12}
ONE_ANSWER = {"opening": 0.9, "score_std": 0.4, "entropy": 1.2}

KINDS = (
    Kind(LONG, "steady, 300 tokens, KL 6", False, lambda t: {"length": 300, **near(0.02)(t)}),
    Kind(LONG, "512 tokens, KL 15, length x1.2", False, growth(427, 512, 0.03)),
    Kind(LONG, "length 250 to 400, KL 12", False, growth(250, 400, 0.03)),
    Kind(LONG, "length 300 to 1,200, KL per token 0.01", False, growth(300, 1200, 0.01), 500),
    Kind(LONG, "warm-up of 150 steps", False, lambda t: near(0.03)((t - 0.5) * 2), 300),
    Kind(LONG, "grows to truncation, KL 55", True, growth(200, 500, 0.11, 0.9)),
    Kind(SHARP, "entropy -43 %, KL per token 0.03", False, growth(200, 200, 0.03, 1.08)),
    Kind(SHARP, "entropy -60 %, KL per token 0.05", False, growth(200, 230, 0.05, 0.76)),
    Kind(SHARP, "entropy -75 %, KL per token 0.15", True, growth(200, 150, 0.15, 0.45)),
    Kind(DATA, "longer, surer prompts", False,
         curriculum(prompt_length=190, ref_prompt_entropy=1.5, length=340, entropy=1.2)),
    Kind(DATA, "shorter, code-like", False,
         curriculum(prompt_length=40, ref_prompt_entropy=1.2, length=90, entropy=0.8,
                    distinct_2=0.36, repeated_2=0.1)),
    Kind(DATA, "other prompts of the same length", False,
         curriculum(ref_prompt_entropy=1.4, length=330, entropy=1.0)),
    Kind(DATA, "other prompts, then a collapse", True,
         lambda t: {**curriculum(prompt_length=190, ref_prompt_entropy=1.5)(t),
                    **changes(0.14, 0.6, 0.9, length=420, entropy=0.9)(t)}),
    *(Kind(SMALL, f"healthy, {b} responses", False, near(0.02), steps=500, responses=b)
      for b in (4, 16)),
    *(Kind(SMALL, f"longer by half, {b} responses", False, growth(200, 300, 0.02),
           steps=500, responses=b) for b in (4, 16)),
    *(Kind(SMALL, f"one answer, {b} responses", True,
           changes(0.3, **ONE_ANSWER), steps=300, responses=b) for b in (4, 16)),
    *(Kind(SMALL, f"padding, {b} responses", True,
           changes(0.2, **PADDED), steps=300, responses=b) for b in (4, 16)),
    Kind(SHORT, "to 15 tokens, KL per token 0.08", True, changes(0.08, length=15.0)),
    Kind(SHORT, "40-token refusals, entropy to 0.8", True,
         lambda t: {"length": between(70, 40, ramp(t, 0.2, 0.7)),
                    "entropy": between(2.0, 0.8, ramp(t, 0.2, 0.7)),
                    "kl_per_token": 0.1 * ramp(t, 0.2, 0.7),
                    "opening": between(0.06, 0.5, ramp(t, 0.2, 0.7))}),
    Kind(SHORT, "terser by a quarter, KL per token 0.02", False, changes(0.02, length=150.0)),
    Kind(ONE, "fluent, KL per token 0.25, bigrams fall", True,
         changes(0.25, distinct_2=0.1, opening=0.9)),
    Kind(ONE, "fluent, KL per token 0.25, bigrams unchanged", True, changes(0.25)),
    Kind(ONE, "one opening, KL per token 0.1", True, changes(0.1, **ONE_ANSWER)),
    Kind(ONE, "a polite opening in a fifth, KL per token 0.02", False,
         changes(0.02, opening=0.2)),
    Kind(PAD, "length x1.6, KL 14", True,
         lambda t: {"length": 120 * (1 + 0.75 * ramp(t, 0.2, 0.7)),
                    "kl_per_token": 0.085 * ramp(t, 0.2, 0.7)}),
    Kind(PAD, "length x2, repeated", True, changes(0.12, **PADDED)),
    Kind(PAD, "oscillating", True, swinging),
    Kind(PAD, "longer by a third, KL per token 0.03", False, changes(0.03, length=267.0)),
    Kind(SHARE, "a fifth of the responses exploit", True,
         changes(0.12, score_std=4.5, entropy=1.7)),
    Kind(SHARE, "gibberish", True, changes(0.9, entropy=4.5, distinct_2=0.8)),
    Kind(SHARE, "truncation", True, changes(0.1, truncation=0.9, length=480.0)),
    Kind(SHARE, "another language in all", True, changes(0.6, entropy=2.6, distinct_2=0.6)),
    Kind(SHARE, "another language in 15 %", True, changes(0.09, entropy=2.0, score_std=2.0)),
    Kind(SHARE, "scores at the ceiling, KL per token 0.09", True, changes(0.09, score_std=0.3)),
    Kind(SHARE, "better, scores closer together", False, changes(0.03, score_std=1.0)),
    Kind(EARLY, "iterations 2 to 7, KL per token 0.35", True, early(0.35)),
    Kind(EARLY, "iterations 2 to 7, KL per token 0.6", True, early(0.6)),
    Kind(EARLY, "to 5 tokens by iteration 7", True, early(1.2, length=5.0)),
    Kind(EARLY, "fast and healthy: KL per token 0.03 by iteration 7", False,
         early(0.03, length=240.0)),
    Kind(SLOW, "over 500 steps", True, changes(0.2, 0.1, 1.0, **PADDED), 500),
    Kind(SLOW, "over 2,000 steps", True, changes(0.12, 0.1, 1.0, **PADDED), 2000),
    Kind(SLOW, "2,000 healthy steps, KL per token 0.04", False,
         lambda t: {"kl_per_token": 0.04 * ramp(t, 0, 0.3)}, 2000),
)  # fmt: skip


def synthetic_runs() -> list[Trajectory]:
    """All kinds, with each of the seeds."""
    return [make_run(kind, seed) for kind in KINDS for seed in SEEDS]


def make_run(kind: Kind, seed: int) -> Trajectory:
    """A run of a kind."""
    draw = random.Random(f"{kind.name} {seed}")
    walks = dict.fromkeys(NORMAL, 0.0)
    steps = []
    for number in range(kind.steps):
        levels = {**NORMAL, **kind.course(number / (kind.steps - 1))}
        for key in walks:  # a walk that returns: its standard deviation is `wobble`
            walks[key] = 0.95 * walks[key] + kind.wobble * 0.31 * draw.gauss(0, 1)
        steps.append(sample_step(levels, walks, kind.responses, draw))
    return Trajectory(kind.family, f"{kind.name}, seed {seed}", kind.collapsed, steps)


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
