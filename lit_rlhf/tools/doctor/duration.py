"""An estimate of the time of a PPO iteration on a GPU, from counted operations and bytes.

A forward takes two operations per weight and token, and a backward twice as many. Sampling reads
all weights, and the keys and values so far, for every token of its longest response. What attention
computes, communication, and what the host takes are left out: at 7B and 2,048 tokens attention adds
4 %. Default speeds are those of an A100 with 80 GB (NVIDIA's data sheet: 312 TFLOP/s in bfloat16
and 2.0 TB/s), of which 40 and 70 % are assumed, and not measured.
"""

import math

from lit_rlhf.tools.doctor.memory import WEIGHT_BYTES, NetworkShape, PPOSizes

OPERATIONS = 0.4 * 312e12
"""Operations that a GPU makes in a second of scoring or of an update."""
BANDWIDTH = 0.7 * 2.0e12
"""Bytes that a GPU reads in a second of sampling."""


def ppo_seconds(
    shape: NetworkShape,
    sizes: PPOSizes,
    rollouts: int,
    ppo_epochs: int = 1,
    operations: float = OPERATIONS,
    bandwidth: float = BANDWIDTH,
) -> dict[str, float]:
    """Estimate the seconds of each phase of an iteration with the longest prompts and responses.

    Args:
        shape: Shape of all four networks.
        sizes: Sizes of the run; its `rollouts` are sampled side by side.
        rollouts: Rollouts of each GPU in an iteration.
        ppo_epochs: How often each of them is learned from.
        operations: Floating-point operations per second.
        bandwidth: Bytes per second.
    """
    prompt, response = sizes.prompt_tokens, sizes.response_tokens
    forward = 2 * shape.parameters * rollouts * (prompt + response) / operations
    rounds = math.ceil(rollouts / sizes.rollouts)
    weights = WEIGHT_BYTES * shape.parameters * response * rounds
    seen = rollouts * (response * prompt + response * (response - 1) / 2)
    cache = 2 * WEIGHT_BYTES * shape.layers * shape.kv_width * seen
    passes = 4 if sizes.gradient_checkpointing else 3
    return {
        "rollout": forward + (weights + cache) / bandwidth,
        "score": 2 * forward,
        "estimate": forward,
        "update": 2 * passes * ppo_epochs * forward,
    }
