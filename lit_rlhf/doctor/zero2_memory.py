"""An estimate of the memory of PPO's four networks on each GPU, under ZeRO-2 in bfloat16.

Model states are DeepSpeed's own estimate (`estimate_zero2_model_states_mem_needs` of
`deepspeed.runtime.zero.stage_1_and_2`), once for the policy and once for the critic. Activations
have the form of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(2022), Table 2, without the attention matrix, which `sdpa` never holds; their two constants are
measured. CUDA, NCCL and fragmentation take some GB more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lit_rlhf.forward import CHUNK_SIZE

WEIGHT_BYTES = 2
"""Bytes of a weight in bfloat16."""
SHARD_BYTES = 18
"""Bytes per weight that ZeRO-2 partitions: bfloat16 and float32 gradient, master, two moments."""
CPU_BUFFER_FACTOR = 1.5
"""DeepSpeed's allowance for buffers in CPU memory."""
BUCKET_WEIGHTS = 200_000_000
"""Largest gradient bucket of the multi-engine strategy, in weights. Reduction overlaps in two."""
LAYER_BYTES = 48
"""Bytes of a layer's activations per token and hidden unit, in transformers' Llama (GPT: 34)."""
SCORED_LOGIT_BYTES = 18
"""Bytes of a logit in scoring, entropy included: in bfloat16, and four float32 temporaries."""
LEARNED_LOGIT_BYTES = 14
"""Bytes of a logit in the update: in bfloat16, its log-softmax in float32, and two gradients."""


@dataclass(frozen=True)
class NetworkShape:
    """The shape of a decoder that policy, critic, reference and reward model share.

    Attributes:
        parameters: Number of weights.
        layers: Number of layers.
        hidden: Width of the hidden states.
        kv_width: Width of a token's keys in one layer: key-value heads times their size.
        vocabulary: Number of token ids.
    """

    parameters: int
    layers: int
    hidden: int
    kv_width: int
    vocabulary: int


@dataclass(frozen=True)
class PPOSizes:
    """The sizes of a PPO run that decide its memory.

    Attributes:
        gpus: Number of GPUs.
        prompt_tokens: Longest prompt (`data.max_prompt_length`).
        response_tokens: Longest response (`sampling.max_new_tokens`).
        rollouts: Rollouts in progress on a GPU (`memory.rollout_batch_size`).
        rows: Rollouts in a forward and backward on a GPU (`minibatches.micro_batch_size`).
        gradient_checkpointing: Whether activations are computed again in the backward.
        offload_optimizer: Whether the strategy is `multi_deepspeed_stage_2_offload`.
        offload_frozen: Whether reference and reward model are in CPU memory between uses.

    Raises:
        ValueError: If a number is not positive.
    """

    gpus: int
    prompt_tokens: int
    response_tokens: int
    rollouts: int
    rows: int
    gradient_checkpointing: bool = True
    offload_optimizer: bool = False
    offload_frozen: bool = False

    def __post_init__(self) -> None:
        """Check that all numbers are positive."""
        for name in ("gpus", "prompt_tokens", "response_tokens", "rollouts", "rows"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}: expected an integer >= 1, got {value}")


class PPOMemory(NamedTuple):
    """Bytes on each GPU, and in the CPU memory of a node that holds all ranks.

    Attributes:
        trained: Weights, gradients and moments of policy and critic.
        buckets: Gradients in reduction, of one engine at a time.
        frozen: Reference and reward model between uses.
        rollout: Keys and values while responses are sampled.
        scoring: Logits of the responses, and an offloaded network while it is on the GPU.
        update: Activations and logits of a micro-batch.
        cpu: Bytes in CPU memory.
    """

    trained: int
    buckets: int
    frozen: int
    rollout: int
    scoring: int
    update: int
    cpu: int

    @property
    def peak(self) -> int:
        """Bytes on each GPU in the phase that needs the most."""
        phase = max(self.rollout, self.scoring, self.update + self.buckets)
        return self.trained + self.frozen + phase


class ModelStates(NamedTuple):
    """Bytes of a network's weights, gradients and moments.

    Attributes:
        gpu: Bytes on each GPU.
        cpu: Bytes in the CPU memory of a node.
    """

    gpu: int
    cpu: int


def ppo_memory(shape: NetworkShape, sizes: PPOSizes) -> PPOMemory:
    """Estimate the memory of PPO under ZeRO-2 in bfloat16.

    Args:
        shape: Shape of each of the four networks.
        sizes: Sizes of the run.
    """
    weights = WEIGHT_BYTES * shape.parameters
    states = [zero2_model_states(shape.parameters, sizes.gpus, sizes.offload_optimizer)] * 2
    tokens = sizes.prompt_tokens + sizes.response_tokens
    logits = shape.vocabulary * sizes.response_tokens
    return PPOMemory(
        trained=sum(state.gpu for state in states),
        buckets=2 * WEIGHT_BYTES * min(shape.parameters, BUCKET_WEIGHTS),
        frozen=0 if sizes.offload_frozen else 2 * weights,
        rollout=2 * WEIGHT_BYTES * shape.layers * shape.kv_width * tokens * sizes.rollouts,
        scoring=SCORED_LOGIT_BYTES * min(sizes.rollouts * logits, CHUNK_SIZE)
        + (weights if sizes.offload_frozen else 0),
        update=sizes.rows * tokens * layer_activations(shape, sizes)
        + LEARNED_LOGIT_BYTES * min(sizes.rows * logits, CHUNK_SIZE),
        cpu=sum(state.cpu for state in states)
        + (2 * weights * sizes.gpus if sizes.offload_frozen else 0),
    )


def zero2_model_states(parameters: int, gpus: int, offload: bool) -> ModelStates:
    """DeepSpeed's estimate of one engine's model states on a node.

    Args:
        parameters: Number of weights, all of them trained.
        gpus: Number of GPUs of the node, which holds all ranks.
        offload: Keep master weights and moments in CPU memory.
    """
    if offload:
        cpu = parameters * max(4 * gpus, 16) * CPU_BUFFER_FACTOR
        return ModelStates(WEIGHT_BYTES * parameters, int(cpu))
    gpu = WEIGHT_BYTES * parameters + int(SHARD_BYTES * parameters / gpus)
    return ModelStates(gpu, int(parameters * 4 * gpus * CPU_BUFFER_FACTOR))


def layer_activations(shape: NetworkShape, sizes: PPOSizes) -> int:
    """Bytes per token that all layers keep for the backward.

    Gradient checkpointing keeps the input of each layer, and the activations of one layer at a time
    while they are computed again.
    """
    if sizes.gradient_checkpointing:
        return shape.hidden * (WEIGHT_BYTES * shape.layers + LAYER_BYTES)
    return shape.hidden * LAYER_BYTES * shape.layers
