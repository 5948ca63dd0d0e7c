"""The check that the run fits into the memory of its devices, by an estimate."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lit_rlhf.forward import LanguageModel, Offloaded, resident_bytes, unwrap_model
from lit_rlhf.modules import (
    ROLLOUT_MEMORY,
    UPDATE_MEMORY,
    suggest_change,
    tokens_within_memory,
)
from lit_rlhf.rollout import default_tokens_per_forward
from lit_rlhf.tools.doctor.case import Case
from lit_rlhf.tools.doctor.report import Finding, failure, ok, warning
from lit_rlhf.tools.doctor.zero2_memory import (
    WEIGHT_BYTES,
    ModelStates,
    NetworkShape,
    PPOMemory,
    PPOSizes,
    bucket_bytes,
    pinned_bytes,
    ppo_memory,
    zero2_model_states,
)

GIB = 2**30
TIGHT = 0.9  # share of the memory above which fragmentation may be too much
MEMORY = Path("/proc/meminfo")  # Linux only
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def check_memory(case: Case) -> Finding:
    """Compare the estimate with the memory of the device, and with that of the CPU."""
    estimate = estimate_memory(case)
    parts = (
        f"policy and critic {format_gib(estimate.trained)}, frozen networks "
        f"{format_gib(estimate.frozen)}, rollout {format_gib(estimate.rollout)}, scoring "
        f"{format_gib(estimate.scoring)} or update "
        f"{format_gib(estimate.update + estimate.gradients)}"
    )
    total = (
        f"About {format_gib(estimate.peak)} GiB per device at the longest prompts and responses "
        f"({parts})"
    )
    if case.plan.on_gpu and not torch.cuda.is_available():
        return warning(
            f"{total}; there is no GPU here to compare it with.",
            "Run the doctor on the machine of the run, or compare it with your GPU's memory.",
        )
    free = case.free_memory
    assert free is not None
    if estimate.peak > free:
        return failure(
            f"{total}; {format_gib(free)} GiB are free.", suggest_settings(case, estimate)
        )
    if case.plan.on_gpu and estimate.cpu > (free_cpu := free_cpu_memory()):
        return failure(
            f"About {format_gib(estimate.cpu)} GiB of CPU memory; {format_gib(free_cpu)} GiB are "
            "free.",
            "Use trainer.strategy without _offload, or model.memory.shard_frozen: true.",
        )
    if estimate.peak > TIGHT * free:
        return warning(
            f"{total}; {format_gib(free)} GiB are free, and fragmentation takes some.",
            suggest_settings(case, estimate),
        )
    return ok(f"{total}; {format_gib(free)} GiB are free.")


def format_gib(count: int) -> str:
    """Bytes in GiB."""
    return f"{count / GIB:.1f}" if count >= GIB / 10 else f"{count / GIB:.3f}"


def suggest_settings(case: Case, estimate: PPOMemory) -> str:
    """Settings that lower the largest part of the estimate, as a sentence."""
    states = estimate.trained + estimate.frozen
    names: tuple[str, ...]
    if states > estimate.peak - states:
        names = ("memory.offload_frozen", *["memory.shard_frozen"] * (case.plan.ranks > 1))
        more = [
            "set memory.frozen_dtype: bfloat16",
            "set network.lora_rank: 16",
            "set network.load_in_4bit: true with LoRA",
            "use trainer.strategy multi_deepspeed_stage_2_offload on GPUs",
        ]
    elif estimate.update + estimate.gradients >= max(estimate.rollout, estimate.scoring):
        names, more = UPDATE_MEMORY, []
    else:
        names, more = ROLLOUT_MEMORY, []
    parts = [*(suggest_change(name, case.module) for name in names), *more]
    return f"What helps: {'; '.join(filter(None, parts))}."


def estimate_memory(case: Case) -> PPOMemory:
    """Estimate the memory of the run from its networks.

    States are counted from the networks as they are. Phases are those of `ppo_memory`, which are
    for bfloat16, doubled if computation is in float32. CPU memory is that of offloaded optimizers
    and networks alone.
    """
    module, plan = case.module, case.plan
    in_float32 = (
        case.trainer.precision in ("32-true", "64-true") and module.network.dtype == "float32"
    )
    factor = 2 if in_float32 else 1
    phases = ppo_memory(network_shape(module.policy), ppo_sizes(case))
    counted: set[int] = set()  # with LoRA, networks have frozen weights in common
    states = [trained_states(network, case, counted) for network in (module.policy, module.critic)]
    # An offloaded network is not a module: what is found here is on the device.
    frozen = [
        parameter
        for network in (module.reference, module.reward)
        if isinstance(network, nn.Module)
        for parameter in not_counted(network, counted)
    ]
    visitors = [module.reference, *(model.model for model in module.reward.models)]
    sharing = plan.ranks if module.memory.shard_frozen else 1
    kept = [
        sum(tensor.nbytes for tensor in network.network.parameters()) // sharing
        for network in visitors
        if isinstance(network, Offloaded)
    ]
    to_cpu = module.memory.offload_frozen
    return PPOMemory(
        trained=sum(state.gpu for state in states),
        frozen=frozen_bytes(frozen, plan.engines) + (0 if to_cpu else sum(kept)),
        rollout=factor * phases.rollout,
        scoring=factor * phases.scoring,
        update=factor * phases.update,
        # policy and critic are updated in turn
        gradients=max(state.gradients for state in states),
        cpu=(sum(state.cpu for state in states) if plan.offload_optimizer else 0)
        + (plan.ranks * sum(map(pinned_bytes, kept)) if to_cpu else 0),
    )


def not_counted(network: nn.Module, counted: set[int]) -> list[nn.Parameter]:
    """The parameters of a network that are not in `counted`, to which their ids are added."""
    found = [p for p in network.parameters() if id(p) not in counted]
    counted.update(map(id, found))
    return found


def frozen_bytes(parameters: Iterable[nn.Parameter], engines: bool = False) -> int:
    """Bytes of frozen weights, which the multi-engine strategy casts to bfloat16.

    Weights in 4 bits stay as they are; their scales are counted too.
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
    """Bytes of a trained network's weights, gradients and moments.

    Under an engine those of ZeRO-2, else those of Adam in the weights' type.

    Args:
        network: Policy or critic.
        case: The run.
        counted: Ids of the parameters that are counted already; those of the network are added.
    """
    parameters = not_counted(network, counted)
    trained = [p for p in parameters if p.requires_grad]
    fixed = [p for p in parameters if not p.requires_grad]
    if case.plan.engines:
        count = sum(p.numel() for p in trained)
        states = zero2_model_states(count, case.plan.ranks, case.plan.offload_optimizer)
        return states._replace(
            gpu=states.gpu + frozen_bytes(fixed, engines=True),
            gradients=states.gradients + bucket_bytes(count),
        )
    learned = sum(p.nbytes for p in trained)
    return ModelStates(3 * learned + frozen_bytes(fixed), learned, 0)


def network_shape(policy: LanguageModel) -> NetworkShape:
    """The policy's shape, by its transformers config."""
    config = unwrap_model(policy).config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return NetworkShape(
        parameters=sum(p.numel() for p in policy.parameters()),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        kv_width=kv_heads * head_size,
        vocabulary=config.vocab_size,
    )


def ppo_sizes(case: Case) -> PPOSizes:
    """The sizes of the run that decide its memory, at the longest prompts and responses."""
    module, encoder = case.module, case.module.encoder
    minibatches = module.minibatches
    batch = int(getattr(case.data, "batch_size", minibatches.minibatch_size))
    batch *= module.responses_per_prompt
    positions = getattr(unwrap_model(case.module.policy).config, "max_position_embeddings", 2048)
    prompt = positions if encoder is None else encoder.max_prompt_length
    response = module.sampling.max_new_tokens
    device = torch.device("cuda" if case.plan.on_gpu else "cpu")
    limit = module.memory.max_tokens_per_forward or default_tokens_per_forward(device)
    micro_batch_tokens = minibatches.micro_batch_tokens
    if micro_batch_tokens is None and minibatches.micro_batch_size is None and device.type == "cpu":
        micro_batch_tokens = tokens_within_memory(module.policy)  # as the module does
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
    )


def free_memory(device: torch.device) -> int:
    """Bytes of `device` that this process can use, those that it uses already included."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    return free_cpu_memory()


def free_cpu_memory() -> int:
    """Bytes of CPU memory that this process can use, those that it uses already included."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if MEMORY.is_file():
        # `MemAvailable` leaves out what other processes use and counts caches, which shrink.
        lines = dict(line.split(":", 1) for line in MEMORY.read_text("utf-8").splitlines())
        free = min(free, int(lines["MemAvailable"].split()[0]) * 1024 + resident_bytes())
    # A container may be limited to less than the machine has.
    limit = CGROUP_LIMIT.read_text("utf-8").strip() if CGROUP_LIMIT.is_file() else "max"
    return free if limit == "max" else min(free, int(limit))
