"""An estimate of the memory of PPO's four networks on each GPU, under ZeRO-2 in bfloat16.

Weights, master weights and moments stay through all phases. What a phase takes on top is freed at
its end: keys and values in the rollout, a visiting frozen network and the forward's tensors in
scoring, gradients and activations in the update. Policy and critic are updated in turn, so the
gradients of one of them are there at a time. DeepSpeed's own estimate
(`estimate_zero2_model_states_mem_needs` of `deepspeed.runtime.zero.stage_1_and_2`) counts those of
each engine all the time, and a bfloat16 copy of them that DeepSpeed 0.19.8 does not make.

Activations have the form of Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models" (2022), Table 2, without the attention matrix, which `sdpa` never holds. Their
constants are measured on a CPU. CUDA, NCCL and fragmentation take some GB more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from lit_rlhf.forward import CHUNK_SIZE
from lit_rlhf.rollout import default_tokens_per_forward

WEIGHT_BYTES = 2
"""Bytes of a weight in bfloat16."""
SHARD_BYTES = 12
"""Bytes per weight that ZeRO-2 partitions and keeps: master weight and two moments in float32."""
GRADIENT_BYTES = 4
"""Bytes per weight of the partitioned gradient, which is float32."""
CPU_BUFFER_FACTOR = 1.5
"""DeepSpeed's allowance for buffers in CPU memory."""
BUCKET_WEIGHTS = 200_000_000
"""Largest gradient bucket of the multi-engine strategy, in weights. Reduction overlaps in two."""
LAYER_BYTES = 48
"""Bytes of a layer's activations per token and hidden unit, in transformers' Llama (GPT: 34)."""
FORWARD_BYTES = 25
"""Bytes of a forward without gradients per token and hidden unit, in transformers' Llama.

With an MLP of 3.5 times the hidden size, as in Llama 3, it is 29.
"""
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
        rows: Most rollouts in a forward and backward on a GPU (`minibatches.micro_batch_size`).
        micro_batch_tokens: Most tokens in one; `None`: no limit.
        scored_tokens: Most tokens in a forward of scoring: `memory.max_tokens_per_forward`, or all
            of an iteration on a GPU if they are fewer.
        gradient_checkpointing: Whether activations are computed again in the backward.
        offload_optimizer: Whether the strategy is `multi_deepspeed_stage_2_offload`.
        offload_frozen: Whether reference and reward model are in CPU memory between uses.
        shard_frozen: Whether each GPU, or each rank's part of CPU memory, has a share of them then.

    Raises:
        ValueError: If a number is not positive.
    """

    gpus: int
    prompt_tokens: int
    response_tokens: int
    rollouts: int
    rows: int
    micro_batch_tokens: int | None = None
    scored_tokens: int = default_tokens_per_forward(torch.device("cuda"))
    gradient_checkpointing: bool = True
    offload_optimizer: bool = False
    offload_frozen: bool = False
    shard_frozen: bool = False

    def __post_init__(self) -> None:
        """Check that all numbers are positive."""
        names = ("gpus", "prompt_tokens", "response_tokens", "rollouts", "rows", "scored_tokens")
        for name in names:
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}: expected an integer >= 1, got {value}")


class PPOMemory(NamedTuple):
    """Bytes on each GPU, and in the CPU memory of a node that holds all ranks.

    Attributes:
        trained: Weights, master weights and moments of policy and critic, in all phases.
        frozen: Reference and reward model between uses, or the shares of them.
        rollout: Keys and values while responses are sampled.
        scoring: Tensors of a forward, logits of the responses, and an offloaded or sharded network
            while it is on the GPU.
        update: Activations and logits of a micro-batch.
        gradients: Gradients of the network that is updated, and those of them in reduction.
        cpu: Bytes in CPU memory.
    """

    trained: int
    frozen: int
    rollout: int
    scoring: int
    update: int
    gradients: int
    cpu: int

    @property
    def peak(self) -> int:
        """Bytes on each GPU in the phase that needs the most."""
        phase = max(self.rollout, self.scoring, self.update + self.gradients)
        return self.trained + self.frozen + phase


class ModelStates(NamedTuple):
    """Bytes of a network's weights, gradients and moments.

    Attributes:
        gpu: Weights, master weights and moments on each GPU.
        gradients: Gradients on each GPU, from its first backward to its step.
        cpu: Bytes in the CPU memory of a node.
    """

    gpu: int
    gradients: int
    cpu: int


def ppo_memory(shape: NetworkShape, sizes: PPOSizes) -> PPOMemory:
    """Estimate the memory of PPO under ZeRO-2 in bfloat16.

    Args:
        shape: Shape of each of the four networks.
        sizes: Sizes of the run.
    """
    weights = WEIGHT_BYTES * shape.parameters
    kept = weights // sizes.gpus if sizes.shard_frozen else weights
    visits = weights if sizes.offload_frozen or sizes.shard_frozen else 0
    if sizes.offload_frozen and sizes.shard_frozen:
        visits += kept  # the share goes to the GPU before it is gathered
    states = zero2_model_states(shape.parameters, sizes.gpus, sizes.offload_optimizer)
    tokens = sizes.prompt_tokens + sizes.response_tokens
    scored = min(sizes.rollouts * sizes.response_tokens * shape.vocabulary, CHUNK_SIZE)
    learned = sizes.rows * tokens
    if sizes.micro_batch_tokens is not None:
        learned = min(learned, max(sizes.micro_batch_tokens, tokens))  # a long row is a part
    targets = min(sizes.rows * sizes.response_tokens, learned)
    return PPOMemory(
        trained=2 * states.gpu,
        frozen=0 if sizes.offload_frozen else 2 * kept,
        rollout=2 * WEIGHT_BYTES * shape.layers * shape.kv_width * tokens * sizes.rollouts,
        scoring=FORWARD_BYTES * shape.hidden * sizes.scored_tokens
        + SCORED_LOGIT_BYTES * scored
        + visits,
        update=learned * layer_activations(shape, sizes)
        + LEARNED_LOGIT_BYTES * min(targets * shape.vocabulary, CHUNK_SIZE),
        gradients=states.gradients + bucket_bytes(shape.parameters),
        cpu=2 * states.cpu + (2 * sizes.gpus * pinned_bytes(kept) if sizes.offload_frozen else 0),
    )


def zero2_model_states(parameters: int, gpus: int, offload: bool) -> ModelStates:
    """One engine's model states on a node.

    Args:
        parameters: Number of weights, all of them trained.
        gpus: Number of GPUs of the node, which holds all ranks.
        offload: Keep gradients, master weights and moments in CPU memory.
    """
    weights = WEIGHT_BYTES * parameters
    if offload:
        cpu = parameters * max(4 * gpus, 16) * CPU_BUFFER_FACTOR
        return ModelStates(weights, 0, int(cpu))
    return ModelStates(
        weights + SHARD_BYTES * parameters // gpus,
        GRADIENT_BYTES * parameters // gpus,
        int(parameters * 4 * gpus * CPU_BUFFER_FACTOR),
    )


def pinned_bytes(size: int) -> int:
    """Bytes of CPU memory that a pinned buffer takes: torch rounds up to a power of two."""
    return 1 << (size - 1).bit_length()


def bucket_bytes(parameters: int) -> int:
    """Bytes of gradients in reduction, of one engine at a time."""
    return 2 * WEIGHT_BYTES * min(parameters, BUCKET_WEIGHTS)


def layer_activations(shape: NetworkShape, sizes: PPOSizes) -> int:
    """Bytes per token that all layers keep for the backward.

    Gradient checkpointing keeps the input of each layer, and the activations of one layer at a time
    while they are computed again.
    """
    if sizes.gradient_checkpointing:
        return shape.hidden * (WEIGHT_BYTES * shape.layers + LAYER_BYTES)
    return shape.hidden * LAYER_BYTES * shape.layers
