"""The kinds of synthetic runs, old and new, with their troubles.

The kinds from `CHECKABLE_REWARDS` on were added with the second criterion, with eight seeds each.
A made-up run has no truth: its troubles follow from the story that its course tells.
"""

from __future__ import annotations

import math
from typing import Any

from experiments.detector.families import CHECKABLE, SHORT, Trajectory
from experiments.detector.synthetic import (
    Course,
    Kind,
    between,
    changes,
    curriculum,
    early,
    growth,
    make_run,
    near,
    ramp,
    swinging,
)
from lit_callbacks.verdict import Trouble

NONE: frozenset[Trouble] = frozenset()
BREAKS = frozenset({Trouble.BROKEN})
EXPLOITS = frozenset({Trouble.EXPLOITING})
REPEATS = frozenset({Trouble.MONOTONOUS})
BOTH = EXPLOITS | REPEATS
CHANGES = frozenset({Trouble.DATA_CHANGED})

LONG = "synthetic: long responses"
SHARP = "synthetic: sharpening"
DATA = "synthetic: curricula"
SMALL = "synthetic: small batches"
SHORTENING = "synthetic: shortening and refusals"
ONE = "synthetic: one answer"
PAD = "synthetic: padding"
SHARE = "synthetic: exploits in a share"
EARLY = "synthetic: early collapse"
SLOW = "synthetic: slow collapse"

PADDED = {"length": 420.0, "distinct_2": 0.4, "repeated_2": 0.12}
ONE_ANSWER = {"opening": 0.9, "score_std": 0.4, "entropy": 1.2}

FIRST_KINDS = (
    Kind(LONG, "steady, 300 tokens, KL 6", NONE, lambda t: {"length": 300, **near(0.02)(t)}),
    Kind(LONG, "512 tokens, KL 15, length x1.2", NONE, growth(427, 512, 0.03)),
    Kind(LONG, "length 250 to 400, KL 12", NONE, growth(250, 400, 0.03)),
    Kind(LONG, "length 300 to 1,200, KL per token 0.01", NONE, growth(300, 1200, 0.01), 500),
    Kind(LONG, "warm-up of 150 steps", NONE, lambda t: near(0.03)((t - 0.5) * 2), 300),
    Kind(LONG, "grows to truncation, KL 55", EXPLOITS, growth(200, 500, 0.11, 0.9)),
    Kind(SHARP, "entropy -43 %, KL per token 0.03", NONE, growth(200, 200, 0.03, 1.08)),
    Kind(SHARP, "entropy -60 %, KL per token 0.05", NONE, growth(200, 230, 0.05, 0.76)),
    Kind(SHARP, "entropy -75 %, KL per token 0.15", BOTH, growth(200, 150, 0.15, 0.45)),
    Kind(DATA, "longer, surer prompts", CHANGES,
         curriculum(prompt_length=190, ref_prompt_entropy=1.5, length=340, entropy=1.2)),
    Kind(DATA, "shorter, code-like", CHANGES,
         curriculum(prompt_length=40, ref_prompt_entropy=1.2, length=90, entropy=0.8,
                    distinct_2=0.36, repeated_2=0.1)),
    Kind(DATA, "other prompts of the same length", CHANGES,
         curriculum(ref_prompt_entropy=1.4, length=330, entropy=1.0)),
    Kind(DATA, "other prompts, then a collapse", CHANGES | EXPLOITS,
         lambda t: {**curriculum(prompt_length=190, ref_prompt_entropy=1.5)(t),
                    **changes(0.14, 0.6, 0.9, length=420, entropy=0.9)(t)}),
    *(Kind(SMALL, f"healthy, {b} responses", NONE, near(0.02), steps=500, responses=b)
      for b in (4, 16)),
    *(Kind(SMALL, f"longer by half, {b} responses", NONE, growth(200, 300, 0.02),
           steps=500, responses=b) for b in (4, 16)),
    *(Kind(SMALL, f"one answer, {b} responses", BOTH,
           changes(0.3, **ONE_ANSWER), steps=300, responses=b) for b in (4, 16)),
    *(Kind(SMALL, f"padding, {b} responses", EXPLOITS,
           changes(0.2, **PADDED), steps=300, responses=b) for b in (4, 16)),
    Kind(SHORTENING, "to 15 tokens, KL per token 0.08", EXPLOITS, changes(0.08, length=15.0)),
    Kind(SHORTENING, "40-token refusals, entropy to 0.8", BOTH,
         lambda t: {"length": between(70, 40, ramp(t, 0.2, 0.7)),
                    "entropy": between(2.0, 0.8, ramp(t, 0.2, 0.7)),
                    "kl_per_token": 0.1 * ramp(t, 0.2, 0.7),
                    "opening": between(0.06, 0.5, ramp(t, 0.2, 0.7))}),
    Kind(SHORTENING, "terser by a quarter, KL per token 0.02", NONE, changes(0.02, length=150.0)),
    Kind(ONE, "fluent, KL per token 0.25, bigrams fall", BOTH,
         changes(0.25, distinct_2=0.1, opening=0.9)),
    Kind(ONE, "fluent, KL per token 0.25, bigrams unchanged", EXPLOITS, changes(0.25)),
    Kind(ONE, "one opening, KL per token 0.1", BOTH, changes(0.1, **ONE_ANSWER)),
    Kind(ONE, "a polite opening in a fifth, KL per token 0.02", NONE,
         changes(0.02, opening=0.2)),
    Kind(PAD, "length x1.6, KL 14", EXPLOITS,
         lambda t: {"length": 120 * (1 + 0.75 * ramp(t, 0.2, 0.7)),
                    "kl_per_token": 0.085 * ramp(t, 0.2, 0.7)}),
    Kind(PAD, "length x2, repeated", BOTH, changes(0.12, **PADDED)),
    Kind(PAD, "oscillating", EXPLOITS, swinging),
    Kind(PAD, "longer by a third, KL per token 0.03", NONE, changes(0.03, length=267.0)),
    Kind(SHARE, "a fifth of the responses exploit", EXPLOITS,
         changes(0.12, score_std=4.5, entropy=1.7)),
    Kind(SHARE, "gibberish", EXPLOITS, changes(0.9, entropy=4.5, distinct_2=0.8)),
    Kind(SHARE, "truncation", EXPLOITS, changes(0.1, truncation=0.9, length=480.0)),
    Kind(SHARE, "another language in all", EXPLOITS, changes(0.6, entropy=2.6, distinct_2=0.6)),
    Kind(SHARE, "another language in 15 %", EXPLOITS, changes(0.09, entropy=2.0, score_std=2.0)),
    Kind(SHARE, "scores at the ceiling, KL per token 0.09", EXPLOITS, changes(0.09, score_std=0.3)),
    Kind(SHARE, "better, scores closer together", NONE, changes(0.03, score_std=1.0)),
    Kind(EARLY, "iterations 2 to 7, KL per token 0.35", EXPLOITS, early(0.35)),
    Kind(EARLY, "iterations 2 to 7, KL per token 0.6", EXPLOITS, early(0.6)),
    Kind(EARLY, "to 5 tokens by iteration 7", EXPLOITS, early(1.2, length=5.0)),
    Kind(EARLY, "fast and healthy: KL per token 0.03 by iteration 7", NONE,
         early(0.03, length=240.0)),
    Kind(SLOW, "over 500 steps", EXPLOITS, changes(0.2, 0.1, 1.0, **PADDED), 500),
    Kind(SLOW, "over 2,000 steps", EXPLOITS, changes(0.12, 0.1, 1.0, **PADDED), 2000),
    Kind(SLOW, "2,000 healthy steps, KL per token 0.04", NONE,
         lambda t: {"kl_per_token": 0.04 * ramp(t, 0, 0.3)}, 2000),
)  # fmt: skip

CHECKABLE_REWARDS = "synthetic: checkable rewards"
FEW_TOKENS = "synthetic: short answers"
BROKEN = "synthetic: broken"
ONE_SIGNAL = "synthetic: one signal"
UNSTEADY = "synthetic: unsteady"
FROM_START = "synthetic: from the start"

KL_KEYS = ("rollout/kl", "rollout/kl_per_token")
TRL_LACKS = (
    *KL_KEYS,
    "rollout/perplexity",
    "rollout/distinct_2",
    "rollout/opening_share",
    "rollout/repeated_2",
    "ppo/explained_variance",
    "rollout/prompt_length",
    "rollout/ref_prompt_entropy",
)
"""Metrics that the default log of TRL's GRPO does not have; `beta` is 0, and so there is no KL."""


def new_kind(
    family: str, name: str, troubles: frozenset[Trouble], course: Course, **options: Any
) -> Kind:
    """A kind with eight seeds.

    Args:
        family: One of `criterion.CHOOSING`.
        name: Name of the kind.
        troubles: Its label.
        course: Where signals are at a time from 0 to 1.
        **options: Other fields of `Kind`.
    """
    return Kind(family, name, troubles, course, seeds=8, **options)


def moves(start: float = 0.2, end: float = 0.7, **last: tuple[float, float]) -> Course:
    """Signals that move from one value to another, in the logarithm; KL and reward linearly."""

    def course(t: float) -> dict[str, float]:
        share = ramp(t, start, end)
        linear = ("kl_per_token", "reward")
        return {
            key: first + (value - first) * share if key in linear else between(first, value, share)
            for key, (first, value) in last.items()
        }

    return course


def in_every_second_step(course: Course, steps: int = 200) -> Course:
    """A course in even steps, and a healthy one in odd steps."""
    healthy = near(0.02)
    return lambda t: course(t) if round(t * (steps - 1)) % 2 == 0 else healthy(t)


def alternating_prompts(t: float) -> dict[str, float]:
    """Long prompts with long answers in every second of 200 steps."""
    is_long = round(t * 199) % 2 == 0
    prompt, length = (190.0, 380.0) if is_long else (60.0, 150.0)
    return {"kl_per_token": 0.02 * ramp(t), "prompt_length": prompt, "length": length}


def outliers(t: float) -> dict[str, float]:
    """One step in 25 has prompts of another kind."""
    is_other = round(t * 199) % 25 == 24
    return {
        "kl_per_token": 0.02 * ramp(t) + 0.1 * is_other,
        "length": 480.0 if is_other else 200.0,
        "entropy": 0.9 if is_other else 1.9,
    }


def not_finite(t: float) -> dict[str, float]:
    """A loss that is not finite from the middle on."""
    return {"kl_per_token": 0.02 * ramp(t), "policy_loss": 0.01 if t < 0.5 else math.nan}


def steady(**levels: float) -> Course:
    """Signals that stay at other values than usual."""
    return lambda t: levels


MATHEMATICS = moves(length=(250, 750), entropy=(1.4, 0.39), kl_per_token=(0, 0.1), start=0, end=1)
LOOP = moves(length=(200, 480), truncation=(0.03, 0.9), entropy=(1.9, 0.3))
COLLAPSED = steady(
    kl_per_token=0.0, truncation=0.95, repeated_2=0.7, opening=0.9, distinct_2=0.1, entropy=0.5
)

NEW_KINDS = (
    new_kind(CHECKABLE_REWARDS, "mathematics, KL per token 0.1, length x3, entropy -72 %", NONE,
             MATHEMATICS, task=CHECKABLE),
    new_kind(CHECKABLE_REWARDS, "mathematics in TRL's default log, without KL", NONE, MATHEMATICS,
             task=CHECKABLE, lacks=TRL_LACKS),
    new_kind(CHECKABLE_REWARDS, "solved: width and entropy fall", NONE,
             moves(entropy=(1.4, 0.5), score_std=(0.5, 0.1), kl_per_token=(0, 0.05),
                   reward=(0.3, 0.98)), task=CHECKABLE),
    new_kind(CHECKABLE_REWARDS, "loops to the cap in TRL's default log, without KL", BOTH, LOOP,
             lacks=TRL_LACKS),
    new_kind(CHECKABLE_REWARDS, "length x5 to the cap, KL per token 0.3", EXPLOITS,
             moves(length=(250, 1250), truncation=(0.03, 0.7), entropy=(1.4, 0.3),
                   kl_per_token=(0, 0.3), repeated_2=(0.04, 0.3)), task=CHECKABLE),
    new_kind(FEW_TOKENS, "14 tokens, KL 6", NONE,
             moves(length=(14, 14), entropy=(1.4, 1.0), kl_per_token=(0, 0.43)), task=SHORT),
    new_kind(FEW_TOKENS, "8 tokens, KL 2", NONE,
             moves(length=(8, 8), entropy=(1.0, 0.9), kl_per_token=(0, 0.25)), task=SHORT),
    new_kind(FEW_TOKENS, "sums: 22 to 10 tokens, KL 6", NONE,
             moves(length=(22, 10), entropy=(1.4, 0.8), kl_per_token=(0, 0.6)), responses=16,
             steps=60, task=SHORT),
    new_kind(FEW_TOKENS, "half as long, KL per token 0.02", NONE,
             moves(length=(200, 100), kl_per_token=(0, 0.02))),
    new_kind(FEW_TOKENS, "14 tokens, one answer, KL per token 2", BOTH,
             moves(length=(14, 14), entropy=(1.4, 0.1), kl_per_token=(0, 2.0),
                   distinct_2=(0.75, 0.15), opening=(0.1, 0.9)), task=SHORT),
    new_kind(FEW_TOKENS, "14 to 3 tokens, KL per token 3", EXPLOITS,
             moves(length=(14, 3), entropy=(1.4, 0.6), kl_per_token=(0, 3.0)), task=SHORT),
    new_kind(BROKEN, "negative KL and a falling reward", BREAKS,
             moves(kl_per_token=(0, -0.3), reward=(0, -4))),
    new_kind(BROKEN, "negative KL, the reward rises", BREAKS, moves(kl_per_token=(0, -0.3))),
    new_kind(BROKEN, "the reward falls, at KL per token 0.02", BREAKS,
             moves(kl_per_token=(0, 0.02), reward=(0, -4))),
    new_kind(BROKEN, "a loss that is not finite from the middle on", BREAKS, not_finite),
    new_kind(BROKEN, "samples of another policy", BREAKS,
             moves(kl_per_token=(0, 0.02), sampler_kl=(0.002, 0.3))),
    new_kind(BROKEN, "first ratio 1.3 from the start", BREAKS,
             lambda t: {"kl_per_token": 0.02 * ramp(t), "ratio_first": 1.3}),
    new_kind(BROKEN, "the reward dips by half a deviation and comes back", NONE,
             lambda t: {"kl_per_token": 0.02 * ramp(t),
                        "reward": 1.5 * ramp(t) - 0.75 * math.sin(math.pi * min(3 * t, 1))}),
    new_kind(ONE_SIGNAL, "a tenth in another language", EXPLOITS,
             moves(kl_per_token=(0, 0.06), entropy=(1.9, 1.95), distinct_2=(0.55, 0.57),
                   score_std=(1.5, 1.9))),
    new_kind(ONE_SIGNAL, "entropy to 0.01 at KL per token 0.06", REPEATS,
             moves(kl_per_token=(0, 0.06), entropy=(1.9, 0.01))),
    new_kind(ONE_SIGNAL, "distinct bigrams to 0.15", REPEATS,
             moves(kl_per_token=(0, 0.04), distinct_2=(0.55, 0.15))),
    new_kind(ONE_SIGNAL, "one opening in 95 %", REPEATS,
             moves(kl_per_token=(0, 0.04), opening=(0.06, 0.95))),
    new_kind(ONE_SIGNAL, "repeated bigrams to 0.6", REPEATS,
             moves(kl_per_token=(0, 0.04), repeated_2=(0.04, 0.6))),
    new_kind(ONE_SIGNAL, "truncation to 0.9", EXPLOITS,
             moves(kl_per_token=(0, 0.04), truncation=(0.03, 0.9))),
    new_kind(ONE_SIGNAL, "length x2.5", EXPLOITS,
             moves(kl_per_token=(0, 0.04), length=(200, 500))),
    new_kind(ONE_SIGNAL, "KL per token 0.15", EXPLOITS, moves(kl_per_token=(0, 0.15))),
    new_kind(ONE_SIGNAL, "the critic is wrong for 80 of 200 steps", NONE,
             lambda t: {"kl_per_token": 0.03 * ramp(t),
                        "explained_variance": -0.3 if t < 0.4 else 0.5}),
    new_kind(UNSTEADY, "padding in every second step", EXPLOITS,
             in_every_second_step(changes(0.2, length=440, entropy=0.9))),
    new_kind(UNSTEADY, "prompts of two lengths alternate", NONE, alternating_prompts),
    new_kind(UNSTEADY, "one step in 25 has other prompts", NONE, outliers),
    new_kind(UNSTEADY, "slow drift over 1,000 steps", NONE,
             growth(200, 260, 0.03, 1.45), steps=1000),
    new_kind(UNSTEADY, "variety is lost over 1,000 steps", REPEATS,
             moves(kl_per_token=(0, 0.05), distinct_2=(0.55, 0.25), entropy=(1.9, 0.9),
                   opening=(0.06, 0.4)), steps=1000),
    new_kind(UNSTEADY, "healthy, 4 responses, signals wander by a tenth", NONE, near(0.02),
             responses=4, wobble=0.1),
    new_kind(UNSTEADY, "other prompts from the middle on", CHANGES,
             curriculum(prompt_length=200, ref_prompt_entropy=1.3, length=320, entropy=1.2)),
    new_kind(FROM_START, "collapsed in the first step", REPEATS, COLLAPSED),
    new_kind(FROM_START, "truncated and looping in the first step, TRL's default log", BOTH,
             steady(truncation=0.95, length=480.0, entropy=0.2), lacks=TRL_LACKS),
    new_kind(FROM_START, "a template opens each answer", NONE,
             lambda t: {"opening": 0.95, "kl_per_token": 0.02 * ramp(t)}),
    new_kind(FROM_START, "truncation falls from 0.4", NONE,
             moves(truncation=(0.4, 0.05), length=(400, 250), kl_per_token=(0, 0.02))),
    new_kind(FROM_START, "the reference is another model, KL per token 0.2", NONE,
             lambda t: {"kl_per_token": 0.2 + 0.02 * ramp(t)}),
)  # fmt: skip

KINDS = FIRST_KINDS + NEW_KINDS


def synthetic_runs() -> list[Trajectory]:
    """All kinds, with each of their seeds."""
    return [make_run(kind, seed) for kind in KINDS for seed in range(kind.seeds)]
