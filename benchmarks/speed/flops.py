"""Floating-point operations of an update on real tokens; the same count for every side.

Only real tokens count, in every layer. Causal attention counts its lower triangle, an output layer
counts where a logit is used, and the last token of a response is fed only to the reward model. A
multiplication with an addition is two operations; a backward pass is twice its forward pass.
Log-probs of the sampling policy come with its samples and count nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.speed.workload import Stage, Workload


class Flops(NamedTuple):
    """Operations of an update by phase.

    Attributes:
        rollout: Sampling by the policy.
        score: Forward passes of reference, critic and reward model.
        update: Forward and backward passes of policy and critic.
    """

    rollout: float
    score: float
    update: float

    @property
    def total(self) -> float:
        """Operations of all phases."""
        return sum(self)


def layer_weights(work: Workload) -> int:
    """Count the weights of the layers: one multiplication and addition each per token."""
    kv_width = work.hidden // work.heads * work.kv_heads
    attention = 2 * work.hidden * work.hidden + 2 * work.hidden * kv_width
    return work.layers * (attention + 3 * work.hidden * work.intermediate)


def trunk_flops(work: Workload, tokens: int) -> float:
    """Count the operations of the layers' forward pass over one sequence.

    Args:
        work: The network's shape.
        tokens: Length of the sequence.
    """
    pairs = tokens * (tokens + 1) / 2  # a query and a key that it sees
    return 2 * layer_weights(work) * tokens + 4 * work.hidden * work.layers * pairs


def update_flops(work: Workload, prompts: Sequence[int], responses: Sequence[int]) -> Flops:
    """Operations of one PPO update.

    Args:
        work: The networks' shape.
        prompts: Number of tokens of each prompt.
        responses: Number of tokens of each response, EOS included.
    """
    policy = critic = reward = 0.0
    for prompt, response in zip(prompts, responses, strict=True):
        trunk = trunk_flops(work, prompt + response - 1)
        policy += trunk + 2 * work.hidden * work.vocab * response
        critic += trunk + 2 * work.hidden * response
        reward += trunk_flops(work, prompt + response) + 2 * work.hidden
    return Flops(rollout=policy, score=policy + critic + reward, update=3 * (policy + critic))


def generation_bytes(
    work: Workload, prompts: Sequence[int], responses: Sequence[int], value_bytes: int
) -> float:
    """Bytes that generation must at least read if all responses are sampled side by side.

    Every step reads all weights of the policy once, and the keys and values of the tokens so far of
    every response that has not ended.

    Args:
        work: The policy's shape.
        prompts: Number of tokens of each prompt.
        responses: Number of tokens of each response, EOS included.
        value_bytes: Bytes of a weight, a key or a value.
    """
    weights = layer_weights(work) + work.hidden * work.vocab
    seen = sum(
        response * prompt + response * (response - 1) / 2
        for prompt, response in zip(prompts, responses, strict=True)
    )
    cached = 2 * work.layers * (work.hidden // work.heads * work.kv_heads)
    return value_bytes * (weights * max(responses) + cached * seen)


def stage_flops(
    stage: Stage, work: Workload, prompts: Sequence[int], responses: Sequence[int]
) -> Flops:
    """Operations of one update of a stage.

    Args:
        stage: `ppo` as in `update_flops`; `sft` for a language model on its responses' tokens;
            `reward` for a scalar model on both sequences of each pair.
        work: The networks' shape.
        prompts: Number of tokens of each sequence's prompt.
        responses: Number of tokens of each sequence's response.
    """
    if stage == "ppo":
        return update_flops(work, prompts, responses)
    lengths = list(zip(prompts, responses, strict=True))
    if stage == "sft":
        forward = sum(
            trunk_flops(work, prompt + response - 1) + 2 * work.hidden * work.vocab * response
            for prompt, response in lengths
        )
    else:
        forward = sum(
            trunk_flops(work, prompt + response) + 2 * work.hidden for prompt, response in lengths
        )
    return Flops(rollout=0.0, score=0.0, update=3 * forward)
