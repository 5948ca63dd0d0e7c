"""The check that the run fits into the memory of its devices, by an estimate."""

import os
from pathlib import Path

import torch

from lit_rlhf.forward import resident_bytes
from lit_rlhf.modules import suggest_change
from lit_rlhf.ppo import ROLLOUT_MEMORY, UPDATE_MEMORY
from lit_rlhf.tools.doctor.case import Case
from lit_rlhf.tools.doctor.memory import PPOMemory, estimate_memory
from lit_rlhf.tools.doctor.report import Finding, failure, ok, warning

GIB = 2**30
TIGHT = 0.9  # share of the memory above which fragmentation may be too much
MEMORY = Path("/proc/meminfo")  # Linux only
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def check_memory(case: Case) -> Finding:
    """Compare the estimate with the memory of the device and of the CPU."""
    estimate = estimate_memory(case)
    trained = "policy" if case.module.critic is None else "policy and critic"
    parts = (
        f"{trained} {format_gib(estimate.trained)}, frozen networks "
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
    comparison = f"{total}; {format_gib(case.free_memory)} GiB are free"
    if estimate.peak > case.free_memory:
        return failure(f"{comparison}.", suggest_settings(case, estimate))
    if case.plan.on_gpu and estimate.cpu > (free_cpu := free_cpu_memory()):
        return failure(
            f"About {format_gib(estimate.cpu)} GiB of CPU memory; {format_gib(free_cpu)} GiB are "
            "free.",
            "Use trainer.strategy without _offload, or model.memory.shard_frozen: true.",
        )
    if estimate.peak > TIGHT * case.free_memory:
        change = suggest_settings(case, estimate)
        return warning(f"{comparison}, and fragmentation takes some.", change)
    return ok(f"{comparison}.")


def format_gib(count: int) -> str:
    """Format bytes in GiB."""
    return f"{count / GIB:.1f}" if count >= GIB / 10 else f"{count / GIB:.3f}"


def suggest_settings(case: Case, estimate: PPOMemory) -> str:
    """Suggest settings that lower the largest part of an estimate, as a sentence.

    Args:
        case: The run.
        estimate: Its memory.
    """
    states = estimate.trained + estimate.frozen
    names: tuple[str, ...]
    other_advice: list[str] = []
    if states > estimate.peak - states:
        names = ("memory.offload_frozen",)
        if case.plan.ranks > 1:
            names = (*names, "memory.shard_frozen")
        other_advice = [
            "set memory.frozen_dtype: bfloat16",
            "set network.lora_rank: 16",
            "set network.load_in_4bit: true with LoRA",
            "use trainer.strategy multi_deepspeed_stage_2_offload on GPUs",
        ]
    elif estimate.update + estimate.gradients >= max(estimate.rollout, estimate.scoring):
        names = UPDATE_MEMORY
    else:
        names = ROLLOUT_MEMORY
    parts = [*(suggest_change(name, case.module) for name in names), *other_advice]
    return f"What helps: {'; '.join(filter(None, parts))}."


def free_memory(device: torch.device) -> int:
    """Bytes of `device` that this process can use, including those that it uses already."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    return free_cpu_memory()


def free_cpu_memory() -> int:
    """Bytes of CPU memory that this process can use, including those that it uses already."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if MEMORY.is_file():
        # `MemAvailable` leaves out what other processes use and counts caches, which shrink.
        lines = dict(line.split(":", 1) for line in MEMORY.read_text("utf-8").splitlines())
        free = min(free, int(lines["MemAvailable"].split()[0]) * 1024 + resident_bytes())
    # A container may be limited to less than the machine has.
    limit = CGROUP_LIMIT.read_text("utf-8").strip() if CGROUP_LIMIT.is_file() else "max"
    return free if limit == "max" else min(free, int(limit))
