"""The check that the run fits into the memory of its devices, by an estimate."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from lit_rlhf.doctor.case import Case
from lit_rlhf.doctor.findings import Finding, failure, ok, warning
from lit_rlhf.doctor.zero2_memory import (
    WEIGHT_BYTES,
    NetworkShape,
    PPOSizes,
    ppo_memory,
    zero2_model_states,
)
from lit_rlhf.forward import LanguageModel, Offloaded, unwrap_model
from lit_rlhf.modules.out_of_memory import suggest_change
from lit_rlhf.modules.ppo import ROLLOUT_MEMORY, UPDATE_MEMORY

GIB = 2**30
TIGHT = 0.9  # share of the memory from which on fragmentation may be too much
MEMORY, OWN_PAGES = Path("/proc/meminfo"), Path("/proc/self/statm")  # Linux's
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


class Needs(NamedTuple):
    """Bytes on a device: states that stay, and the phases of an iteration, one at a time.

    Attributes:
        trained: Weights, gradients and moments of policy and critic.
        frozen: Weights of reference and reward models on the device.
        rollout: Keys and values.
        scoring: Logits, and an offloaded network on its visit.
        update: Activations, logits and gradient buckets.
        host: In CPU memory of a node, where a strategy keeps states there.
    """

    trained: int
    frozen: int
    rollout: int
    scoring: int
    update: int
    host: int

    @property
    def peak(self) -> int:
        """Bytes in the phase that takes the most."""
        return self.trained + self.frozen + max(self.rollout, self.scoring, self.update)


def memory(case: Case) -> Finding:
    """The estimate of `lit_rlhf.doctor.zero2_memory` against what there is."""
    needs = estimated_needs(case)
    split = (
        f"policy and critic {gib(needs.trained)}, frozen networks {gib(needs.frozen)}, rollout "
        f"{gib(needs.rollout)}, scoring {gib(needs.scoring)} or update {gib(needs.update)}"
    )
    total = f"About {gib(needs.peak)} GiB a device at the longest prompts and responses ({split})"
    if case.plan.on_gpu and not torch.cuda.is_available():
        return warning(
            f"{total}; there is no GPU here to compare it with.",
            "Run the doctor where the run is to be, or compare it with your GPU's memory.",
        )
    free = case.free_memory
    assert free is not None
    if needs.peak > free:
        return failure(f"{total}; {gib(free)} GiB are there.", what_helps(case, needs))
    if case.plan.on_gpu and needs.host > (host := host_memory()):
        return failure(
            f"About {gib(needs.host)} GiB of CPU memory, {gib(host)} GiB are there.",
            "Take trainer.strategy without _offload, or model.memory.offload_frozen: false.",
        )
    if needs.peak > TIGHT * free:
        return warning(
            f"{total}; {gib(free)} GiB are there, and fragmentation takes some.",
            what_helps(case, needs),
        )
    return ok(f"{total}; {gib(free)} GiB are there.")


def gib(count: int) -> str:
    """Bytes in GiB."""
    return f"{count / GIB:.1f}" if count >= GIB / 10 else f"{count / GIB:.3f}"


def what_helps(case: Case, needs: Needs) -> str:
    """Settings that lower what takes the most."""
    states = needs.trained + needs.frozen
    if states > needs.peak - states:
        names = ["memory.offload_frozen"]
        more = [
            "set memory.frozen_dtype: bfloat16",
            "set network.lora_rank: 16",
            "take multi_deepspeed_stage_2_offload on GPUs",
        ]
    elif needs.update >= max(needs.rollout, needs.scoring):
        names, more = [*UPDATE_MEMORY], []
    else:
        names, more = [*ROLLOUT_MEMORY], []
    parts = [*(suggest_change(name, case.module) for name in names), *more]
    return f"What helps: {'; '.join(filter(None, parts))}."


def estimated_needs(case: Case) -> Needs:
    """States counted from the networks as they are, phases by `ppo_memory`.

    Phases are estimated for bfloat16 and doubled where float32 is computed in.
    """
    module, plan = case.module, case.plan
    wide = case.trainer.precision in ("32-true", "64-true") and module.network.dtype == "float32"
    factor = 2 if wide else 1
    estimate = ppo_memory(shape_of(module.policy), sizes_of(case))
    trained = [states(network, case) for network in (module.policy, module.critic)]
    frozen = [module.reference, module.reward]
    on_device = [
        parameter
        for network in frozen
        if isinstance(network, nn.Module)
        for parameter in network.parameters()
    ]
    # engines cast frozen networks that they find on the device
    frozen_bytes = sum(
        p.numel() * (WEIGHT_BYTES if plan.engines else p.itemsize) for p in on_device
    )
    return Needs(
        trained=sum(device for device, _ in trained),
        frozen=frozen_bytes,
        rollout=factor * estimate.rollout,
        scoring=factor * estimate.scoring,
        update=factor * estimate.update + (estimate.buckets if plan.engines else 0),
        host=sum(host for _, host in trained) if plan.offload_optimizer else 0,
    )


def states(network: LanguageModel, case: Case) -> tuple[int, int]:
    """Bytes of a trained network's weights, gradients and moments: on the device, and on the host.

    Under an engine DeepSpeed's estimate for ZeRO-2; else Adam's, all in the weights' type.
    """
    learned = [p for p in network.parameters() if p.requires_grad]
    fixed = [p for p in network.parameters() if not p.requires_grad]
    if case.plan.engines:
        count = sum(p.numel() for p in learned)
        device, host = zero2_model_states(count, case.plan.ranks, case.plan.offload_optimizer)
        return device + WEIGHT_BYTES * sum(p.numel() for p in fixed), host
    return sum(4 * p.nbytes for p in learned) + sum(p.nbytes for p in fixed), 0


def shape_of(policy: LanguageModel) -> NetworkShape:
    """The policy's shape, by its transformers config."""
    config = unwrap_model(policy).config.get_text_config()
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    return NetworkShape(
        parameters=sum(p.numel() for p in policy.parameters()),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        kv_width=key_heads * head,
        vocabulary=config.vocab_size,
    )


def sizes_of(case: Case) -> PPOSizes:
    """The sizes of the run that decide its memory, at the longest prompts and responses."""
    module, encoder = case.module, case.module.encoder
    minibatches = module.minibatches
    batch = int(getattr(case.data, "batch_size", minibatches.minibatch_size))
    limit = getattr(unwrap_model(case.module.policy).config, "max_position_embeddings", 2048)
    return PPOSizes(
        gpus=case.plan.ranks,
        prompt_tokens=limit if encoder is None else encoder.max_prompt_length,
        response_tokens=module.sampling.max_new_tokens,
        rollouts=min(module.memory.rollout_batch_size or batch, batch),
        rows=min(minibatches.micro_batch_size or minibatches.minibatch_size, batch),
        gradient_checkpointing=module.network.gradient_checkpointing,
        offload_optimizer=case.plan.offload_optimizer,
        offload_frozen=isinstance(case.module.reference, Offloaded),
    )


def free_memory(device: torch.device) -> int:
    """Bytes that this process can have on `device`, what it has already among them."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    return host_memory()


def host_memory() -> int:
    """Bytes of CPU memory that this process can have, what it has already among them."""
    page = os.sysconf("SC_PAGE_SIZE")
    there = os.sysconf("SC_PHYS_PAGES") * page
    if MEMORY.is_file():  # what others have is gone; what caches have would be given back
        lines = dict(line.split(":", 1) for line in MEMORY.read_text("utf-8").splitlines())
        own = int(OWN_PAGES.read_text("utf-8").split()[1]) * page
        there = min(there, int(lines["MemAvailable"].split()[0]) * 1024 + own)
    limit = CGROUP_LIMIT.read_text("utf-8").strip() if CGROUP_LIMIT.is_file() else "max"
    return there if limit == "max" else min(there, int(limit))
