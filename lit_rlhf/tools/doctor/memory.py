"""An estimate of the memory of PPO's four networks, on each GPU and on the CPU.

Weights, master weights and moments stay through all phases. What a phase takes on top is freed at
its end: keys and values in the rollout, a visiting frozen network and the forward's tensors in
scoring, gradients and activations in the update. Policy and critic are updated in turn, so the
gradients of one of them are there at a time. DeepSpeed's own estimate counts the gradients of each
engine all the time, and a bfloat16 copy of them that DeepSpeed 0.19.8 does not make.

Activations are those that micro-batches are cut by, see `lit_rlhf.forward.activations`. Constants
are measured on a CPU. CUDA, NCCL and fragmentation take some GB more.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from lit_rlhf.checks import check_count
from lit_rlhf.forward import (
    MAX_LOWER_BYTES,
    LanguageModel,
    MatmulWidths,
    Offloaded,
    activation_bytes,
    logit_bytes,
    logits_per_chunk,
    matmul_widths,
    unwrap_model,
)
from lit_rlhf.micro_batches import CUDA_MEMORY_SHARE, micro_batch_memory, tokens_within_memory
from lit_rlhf.rollout import default_tokens_per_forward
from lit_rlhf.tools.doctor.case import Case

WEIGHT_BYTES = 2  # a weight in bfloat16
SHARD_BYTES = 12  # per weight that ZeRO-2 partitions: master weight and two moments in float32
GRADIENT_BYTES = 4  # per weight of the partitioned gradient, which is float32
CPU_BUFFER_FACTOR = 1.5  # DeepSpeed's allowance for buffers in CPU memory
BUCKET_WEIGHTS = 200_000_000
"""Largest gradient bucket of the multi-engine strategy, in weights. Reduction overlaps in two."""
FORWARD_BYTES = 25
"""Bytes of a forward without gradients per token and hidden unit, in transformers' Llama.

With an MLP of 3.5 times the hidden size, as in Llama 3, it is 29.
"""
SCORED_LOGIT_BYTES = 18
"""Bytes of a logit in scoring, entropy included: in bfloat16, and four float32 temporaries."""
CUDA = torch.device("cuda")
A100_BYTES = 80 * 10**9
"""Memory of the device that a run for GPUs is estimated for where there is none."""


@dataclass(frozen=True, kw_only=True)
class NetworkShape:
    """The shape of a decoder that policy, critic, reference and reward model share.

    Attributes:
        parameters: Number of weights.
        layers: Number of layers.
        hidden: Width of a token's hidden state.
        kv_width: Width of a token's keys in one layer: key-value heads times their size.
        vocabulary: Number of tokens in the vocabulary.
        matmul_width: Numbers per token that go into and come out of the matmuls of one layer. In a
            Llama whose heads share no keys they are 11 times the hidden size and 3 times the MLP's.
    """

    parameters: int
    layers: int
    hidden: int
    kv_width: int
    vocabulary: int
    matmul_width: float


@dataclass(frozen=True, kw_only=True)
class PPOSizes:
    """The sizes of a PPO run that decide its memory, per GPU, with as many GPUs on each node.

    Attributes:
        gpus: Number of GPUs on all nodes.
        prompt_tokens: Longest prompt (`data.max_prompt_length`).
        response_tokens: Longest response (`sampling.max_new_tokens`).
        rollouts: Rollouts in progress (`memory.rollout_batch_size`).
        rows: Most rollouts in a forward and backward (`minibatches.micro_batch_size`).
        micro_batch_tokens: Most tokens in one; `None`: no limit.
        scored_tokens: Most tokens in a forward of scoring: `memory.max_tokens_per_forward`, or all
            of an iteration if they are fewer.
        gradient_checkpointing: Whether activations are computed again in the backward.
        offload_optimizer: Whether the strategy is `multi_deepspeed_stage_2_offload`.
        offload_frozen: Whether reference and reward model are in CPU memory between uses.
        shard_frozen: Whether each GPU, or each rank's part of CPU memory, has a share of them then.
        nodes: Number of nodes.
        trained_layers: Layers that are trained, from the top, while the outputs of the others are
            kept; `None` for all.
        sharded: Whether the strategy is `fsdp2`, which shards all networks.
        device: The kind of device that computes.
        itemsize: Bytes of a number in computation: 2 in bfloat16, 4 in float32.
    """

    gpus: int
    prompt_tokens: int
    response_tokens: int
    rollouts: int
    rows: int
    micro_batch_tokens: int | None = None
    scored_tokens: int = default_tokens_per_forward(CUDA)
    gradient_checkpointing: bool = True
    offload_optimizer: bool = False
    offload_frozen: bool = False
    shard_frozen: bool = False
    nodes: int = 1
    trained_layers: int | None = None
    sharded: bool = False
    device: torch.device = CUDA
    itemsize: int = WEIGHT_BYTES

    def __post_init__(self) -> None:
        check_count("gpus", self.gpus)
        check_count("prompt_tokens", self.prompt_tokens)
        check_count("response_tokens", self.response_tokens)
        check_count("rollouts", self.rollouts)
        check_count("rows", self.rows)
        check_count("scored_tokens", self.scored_tokens)


class PPOMemory(NamedTuple):
    """Bytes on each GPU, and in the CPU memory of each node.

    The first two stay through all phases; the phases take the others in turn.

    Attributes:
        trained: Weights, master weights and moments of policy and critic.
        frozen: Reference and reward model between uses.
        rollout: Keys and values.
        scoring: A forward, logits, and a visiting frozen network.
        update: Activations and logits of a micro-batch.
        gradients: Gradients of one network, beside `update`.
        cpu: CPU memory of each node.
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
    """Bytes of a trained network.

    Attributes:
        states: Weights and moments, on each GPU.
        gradients: Gradients, on each GPU.
        cpu: CPU memory of each node.
    """

    states: int
    gradients: int
    cpu: int


def ppo_memory(shape: NetworkShape, sizes: PPOSizes) -> PPOMemory:
    """Estimate the memory of PPO on four networks of one shape, under ZeRO-2 or FSDP2.

    Trained networks are in bfloat16 with masters in float32.

    Args:
        shape: Shape of each network.
        sizes: Sizes and settings of the run.
    """
    itemsize = sizes.itemsize
    weights = itemsize * shape.parameters
    in_shares = sizes.shard_frozen or sizes.sharded
    resident = weights // sizes.gpus if in_shares else weights
    visits = weights if sizes.offload_frozen or in_shares else 0
    if sizes.offload_frozen and sizes.shard_frozen:
        visits += resident  # the share goes to the GPU before it is gathered
    network = zero2_model_states(
        shape.parameters,
        gpus=sizes.gpus,
        offload=sizes.offload_optimizer,
        nodes=sizes.nodes,
    )
    tokens = sizes.prompt_tokens + sizes.response_tokens
    scored_logits = min(
        sizes.rollouts * sizes.response_tokens * shape.vocabulary,
        logits_per_chunk(sizes.device, training=False),
    )
    learned = sizes.rows * tokens
    if sizes.micro_batch_tokens is not None:
        learned = min(learned, max(sizes.micro_batch_tokens, tokens))  # a long row is a part
    targets = min(sizes.rows * sizes.response_tokens, learned)
    learned_logits = min(targets * shape.vocabulary, logits_per_chunk(sizes.device, training=True))
    trained = network.states
    if sizes.sharded:
        trained -= WEIGHT_BYTES * shape.parameters
    # FSDP2 gathers the policy for a rollout, and for an update its ends and two layers at a time
    ends = 2 * itemsize * shape.vocabulary * shape.hidden
    two_layers = 2 * (weights - ends) // shape.layers
    keys_and_values = 2 * itemsize * shape.layers * shape.kv_width * tokens * sizes.rollouts
    forward = FORWARD_BYTES * shape.hidden * sizes.scored_tokens
    scoring = itemsize * (forward + SCORED_LOGIT_BYTES * scored_logits) // WEIGHT_BYTES
    update = (
        learned * layer_activations(shape, sizes)
        + 2 * kept_states(shape, sizes)
        + logit_bytes(itemsize) * learned_logits
    )
    gradients = network.gradients
    cpu = 2 * network.cpu
    if sizes.sharded:
        update += ends + two_layers
        gradients += 2 * two_layers
    else:
        gradients += bucket_bytes(shape.parameters)
    if sizes.offload_frozen:
        cpu += 2 * sizes.gpus // sizes.nodes * pinned_bytes(resident)
    return PPOMemory(
        trained=2 * trained,
        frozen=0 if sizes.offload_frozen else 2 * resident,
        rollout=keys_and_values + sizes.sharded * weights,
        scoring=scoring + visits,
        update=update,
        gradients=gradients,
        cpu=cpu,
    )


def zero2_model_states(parameters: int, *, gpus: int, offload: bool, nodes: int = 1) -> ModelStates:
    """Estimate the states of a network under ZeRO-2.

    Args:
        parameters: Number of trained weights.
        gpus: Number of GPUs on all nodes.
        offload: Whether gradients, master weights and moments are in CPU memory.
        nodes: Number of nodes.
    """
    weights = WEIGHT_BYTES * parameters
    if offload:
        cpu = parameters * max(4 * gpus, 16) / nodes * CPU_BUFFER_FACTOR
        return ModelStates(states=weights, gradients=0, cpu=int(cpu))
    return ModelStates(
        states=weights + SHARD_BYTES * parameters // gpus,
        gradients=GRADIENT_BYTES * parameters // gpus,
        cpu=int(parameters * 4 * gpus / nodes * CPU_BUFFER_FACTOR),
    )


def pinned_bytes(size: int) -> int:
    """Count the bytes that a pinned buffer takes: torch rounds up to a power of two.

    Args:
        size: Bytes of the buffer's content, at least 1.
    """
    return 1 << (size - 1).bit_length()


def bucket_bytes(parameters: int) -> int:
    """Count the bytes of gradients in reduction, of one engine at a time.

    Args:
        parameters: Number of trained weights.
    """
    return 2 * WEIGHT_BYTES * min(parameters, BUCKET_WEIGHTS)


def kept_states(shape: NetworkShape, sizes: PPOSizes) -> int:
    """Count the bytes of the kept outputs of a network's layers below the trained ones.

    Args:
        shape: Shape of the network.
        sizes: Sizes and settings of the run.
    """
    tokens = sizes.rollouts * (sizes.prompt_tokens + sizes.response_tokens)
    size = sizes.itemsize * shape.hidden * tokens
    return size if sizes.trained_layers is not None and size <= MAX_LOWER_BYTES else 0


def layer_activations(shape: NetworkShape, sizes: PPOSizes) -> int:
    """Count the bytes per token that the trained layers keep for the backward pass.

    Args:
        shape: Shape of the network.
        sizes: Settings of the run.
    """
    n_layers = sizes.trained_layers or shape.layers
    widths = MatmulWidths(
        layers=n_layers, hidden=shape.hidden, matmuls=n_layers * shape.matmul_width
    )
    return activation_bytes(
        widths, itemsize=sizes.itemsize, checkpointing=sizes.gradient_checkpointing
    )


def estimate_memory(case: Case) -> PPOMemory:
    """Estimate the memory of the run from its networks.

    States are counted from the networks as they are. CPU memory counts only offloaded optimizers
    and networks.
    """
    module = case.module
    plan = case.plan
    phases = ppo_memory(network_shape(module.policy), ppo_sizes(case))
    counted: set[int] = set()  # with LoRA, networks have frozen weights in common
    trained = [
        trained_states(network, case, counted)
        for network in (module.policy, module.critic)
        if network is not None
    ]
    shares = plan.ranks if plan.sharded else 1
    # An offloaded network is not a module, so all of these are on the device.
    frozen = [
        parameter
        for network in (module.reference, module.reward)
        if isinstance(network, nn.Module)
        for parameter in take_uncounted(network, counted)
    ]
    visitors = [module.reference, *(model.model for model in module.reward.models)]
    sharing = plan.ranks if module.memory.shard_frozen else 1
    offloaded = [
        sum(tensor.nbytes for tensor in network.network.parameters()) // sharing
        for network in visitors
        if isinstance(network, Offloaded)
    ]
    to_cpu = module.memory.offload_frozen
    return PPOMemory(
        trained=sum(network.states for network in trained),
        frozen=frozen_bytes(frozen, plan.engines or plan.sharded) // shares
        + (0 if to_cpu else sum(offloaded)),
        rollout=phases.rollout,
        scoring=phases.scoring,
        update=phases.update,
        # policy and critic are updated in turn
        gradients=max(network.gradients for network in trained),
        cpu=(sum(network.cpu for network in trained) if plan.offload_optimizer else 0)
        + (plan.ranks // plan.nodes * sum(map(pinned_bytes, offloaded)) if to_cpu else 0),
    )


def take_uncounted(network: nn.Module, counted: set[int]) -> list[nn.Parameter]:
    """Take the parameters of a network that no other network has counted.

    Args:
        network: The network.
        counted: Ids of counted parameters. The network's are added.
    """
    parameters = [p for p in network.parameters() if id(p) not in counted]
    counted.update(map(id, parameters))
    return parameters


def frozen_bytes(parameters: Iterable[nn.Parameter], engines: bool = False) -> int:
    """Count the bytes of frozen weights.

    Args:
        parameters: The weights.
        engines: Whether an engine holds them. It casts them to bfloat16 unless they are in 4 bits.
    """
    total = 0
    for parameter in parameters:
        floating = engines and parameter.is_floating_point()
        total += WEIGHT_BYTES * parameter.numel() if floating else parameter.nbytes
        scales: Any = getattr(parameter, "quant_state", None)
        if scales is not None:
            total += int(scales.absmax.nbytes) + int(scales.state2.absmax.nbytes)
    return total


def trained_states(network: LanguageModel, case: Case, counted: set[int]) -> ModelStates:
    """Count the states of policy or critic, as ZeRO-2 has them under an engine, else as Adam.

    Args:
        network: Policy or critic.
        case: The run.
        counted: Ids of the parameters that are left out. The others are added to it.
    """
    parameters = take_uncounted(network, counted)
    trained = [p for p in parameters if p.requires_grad]
    fixed = [p for p in parameters if not p.requires_grad]
    if case.plan.engines:
        count = sum(p.numel() for p in trained)
        zero2 = zero2_model_states(
            count,
            gpus=case.plan.ranks,
            offload=case.plan.offload_optimizer,
            nodes=case.plan.nodes,
        )
        return ModelStates(
            states=zero2.states + frozen_bytes(fixed, engines=True),
            gradients=zero2.gradients + bucket_bytes(count),
            cpu=zero2.cpu,
        )
    if case.plan.sharded:  # float32, whatever type they were loaded in
        share = 4 * sum(p.numel() for p in trained) // case.plan.ranks
        frozen_share = 4 * sum(p.numel() for p in fixed) // case.plan.ranks
        return ModelStates(states=3 * share + frozen_share, gradients=share, cpu=0)
    learned = sum(p.nbytes for p in trained)
    return ModelStates(states=3 * learned + frozen_bytes(fixed), gradients=learned, cpu=0)


def network_shape(policy: LanguageModel) -> NetworkShape:
    """Read the policy's shape from its transformers config."""
    config = unwrap_model(policy).config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    widths = matmul_widths(policy)
    return NetworkShape(
        parameters=sum(p.numel() for p in policy.parameters()),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        kv_width=kv_heads * head_size,
        vocabulary=config.vocab_size,
        matmul_width=widths.matmuls / widths.layers,
    )


def ppo_sizes(case: Case) -> PPOSizes:
    """The sizes of the run that decide its memory, at the longest prompts and responses."""
    module = case.module
    encoder = module.encoder
    minibatches = module.minibatches
    batch = case.n_rollouts
    positions = getattr(unwrap_model(case.module.policy).config, "max_position_embeddings", 2048)
    prompt = positions if encoder is None else encoder.max_prompt_length
    response = module.sampling.max_new_tokens
    device = torch.device("cuda" if case.plan.on_gpu else "cpu")
    limit = module.memory.max_tokens_per_forward or default_tokens_per_forward(device)
    in_float32 = (
        case.trainer.precision in ("32-true", "64-true") and module.network.dtype == "float32"
    )
    itemsize = 4 if in_float32 else 2
    micro_batch_tokens = minibatches.micro_batch_tokens
    if micro_batch_tokens is None and minibatches.micro_batch_size is None:  # as the module does
        absent = case.plan.on_gpu and not torch.cuda.is_available()
        memory = int(CUDA_MEMORY_SHARE * A100_BYTES) if absent else micro_batch_memory(device)
        assert memory is not None
        micro_batch_tokens = tokens_within_memory(
            module.policy, device, memory=memory, itemsize=itemsize
        )
    return PPOSizes(
        gpus=case.plan.ranks,
        prompt_tokens=prompt,
        response_tokens=response,
        rollouts=min(module.memory.rollout_batch_size or batch, batch),
        rows=min(minibatches.micro_batch_size or minibatches.minibatch_size, batch),
        micro_batch_tokens=micro_batch_tokens,
        # a sequence that is longer than the limit is a forward of its own
        scored_tokens=min(max(limit, prompt + response), batch * (prompt + response)),
        gradient_checkpointing=module.network.gradient_checkpointing,
        offload_optimizer=case.plan.offload_optimizer,
        offload_frozen=module.memory.offload_frozen,
        shard_frozen=module.memory.shard_frozen,
        nodes=case.plan.nodes,
        trained_layers=module.network.trained_layers,
        sharded=case.plan.sharded,
        device=device,
        itemsize=itemsize,
    )
