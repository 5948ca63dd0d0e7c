"""Profile decoding on a CUDA device: `python -m benchmarks.gpu.profile_decode`.

Prints the time of a step for each kind of kernels and number of rows, beside the time that reading
the weights takes; launches, graphs and kernels of a step; what captures take; the peak of memory
beside weights and cache; and the kernels that take most of the device's time. Attention and the
draw's cumulative sum have their own lines. Without CUDA graphs, the device waits for the host
between kernels. Inside a graph the rest of the time is gaps between kernels, in which it does not.
LoRA adapters have float32 weights, and decode under autocast, as `configs/ppo/hh_single_gpu.yaml`
trains them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
from jsonargparse import auto_cli
from peft import TaskType
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # not in its `__all__`
from torch.profiler import ProfilerActivity, profile

from benchmarks.speed.job import Job
from benchmarks.speed.machine import memory_bandwidth
from benchmarks.speed.ours import model_options
from benchmarks.speed.workload import SIZES, Kernels, Size, Workload, policy_network
from lit_rlhf.forward import LanguageModel, disable_dropout
from lit_rlhf.models.prepare import prepare_model
from lit_rlhf.rollout import SamplingOptions, generate_responses, graphs
from lit_rlhf.rollout.decoder import GPU_RELEASE_INTERVAL

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync")
"""Calls of the host that start work on the device, by the beginning of their names."""
N_KERNELS = 12
"""Kernels that are listed."""
N_SHORT = 8
"""Tokens of the short rollout, whose time and counts are subtracted from a longer one."""


@dataclass(frozen=True)
class KernelTime:
    """How often a kernel ran, and for how long.

    Attributes:
        count: Number of times; not whole if it is an average.
        microseconds: Time of all of them.
    """

    count: float
    microseconds: float


class StepProfile(NamedTuple):
    """A decoding step on average.

    Attributes:
        seconds: Time of a step, without the profiler.
        launches: Calls that start work on the device.
        graphs: Launches that start a CUDA graph; 0 where none ran.
        captures: Seconds of each capture of a CUDA graph in a rollout.
        peak: Largest number of bytes in use during a rollout; 0 on a CPU.
        kernels: The time of each kernel in a step by its name, the longest first.
    """

    seconds: float
    launches: float
    graphs: float
    captures: list[float]
    peak: int
    kernels: dict[str, KernelTime]


def profile_decode(
    *,
    device: Literal["cpu", "cuda"] = "cuda",
    size: Size = "1b",
    kernels: tuple[Kernels, ...] = ("plain",),
    rows: tuple[int, ...] = (16,),
    steps: int = 32,
    lora_rank: int = 0,
    without_graphs: bool = True,
) -> None:
    """Profile a bfloat16 Llama with random weights.

    Args:
        device: `cpu` only tries the script.
        size: The network.
        kernels: What runs in the network, one after the other.
        rows: Numbers of sequences in progress.
        steps: Steps to measure.
        lora_rank: Rank of LoRA adapters on all linear layers; 0: none.
        without_graphs: Profile steps without CUDA graphs too.
    """
    work = Workload(**SIZES[size])
    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    bandwidth = memory_bandwidth(device)
    print(f"{size} on {name}, {steps} steps, torch {torch.__version__}, LoRA rank {lora_rank}")
    for kind in kernels:
        model = build_network(work, kind, device=device, lora_rank=lora_rank)
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        print(
            f"\n# {kind}: weights {weights / 1e9:.2f} GB, which are read in "
            f"{weights / bandwidth * 1e3:.2f} ms at {bandwidth / 1e9:.0f} GB/s"
        )
        for n_rows in rows:
            cache = cache_values(work, n_rows, steps) * model.dtype.itemsize
            print(f"{n_rows} rows, keys and values of a rollout {cache / 1e9:.2f} GB")
            start = time.perf_counter()
            profiled = profile_steps(model, work, n_rows, steps)
            print_profile(f"{kind}, {n_rows} rows", profiled, weights / bandwidth)
            print(f"  measured in {time.perf_counter() - start:.0f} s", flush=True)
        if without_graphs:
            # a network whose capture failed once decodes without graphs from then on
            refuse = RuntimeError("to compare")
            with patch("lit_rlhf.rollout.graphs.capture_graph", side_effect=refuse):
                profiled = profile_steps(model, work, rows[0], steps)
            print_profile(f"{kind}, {rows[0]} rows, no graphs", profiled, weights / bandwidth)
        del model
        free_memory()


def build_network(
    work: Workload, kernels: Kernels, *, device: str, lora_rank: int = 0
) -> LanguageModel:
    """Build a bfloat16 language model with random weights, set up as a stage sets up its policy.

    Args:
        work: The network's shape and the seed of its weights.
        kernels: What runs in the network.
        device: `cpu` or `cuda`.
        lora_rank: Rank of LoRA adapters on all linear layers; 0: none.
    """
    job = Job(work, precision="bf16-true", device=device, kernels=kernels, lora_rank=lora_rank)
    with torch.device(device):
        network = policy_network(work, torch.bfloat16)
    model = prepare_model(network, model_options(job), TaskType.CAUSAL_LM, seed=work.seed)
    model.to(device)  # type: ignore[arg-type]  # `PreTrainedModel.to` has a wrapper without types
    return disable_dropout(model.requires_grad_(False))


def free_memory() -> None:
    """Give back the memory of networks that are no longer used."""
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def cache_values(work: Workload, rows: int, steps: int) -> int:
    """Count the keys and values in the cache of the longest rollout.

    Args:
        work: The network's shape, and the length of its prompts.
        rows: Number of sequences in progress.
        steps: Number of measured decoding steps.
    """
    capacity = work.prompt_max + N_SHORT + steps + GPU_RELEASE_INTERVAL
    return rows * capacity * 2 * work.layers * work.kv_heads * (work.hidden // work.heads)


def profile_steps(model: LanguageModel, work: Workload, rows: int, steps: int) -> StepProfile:
    """Time and profile decoding steps, as the difference of a long and a short rollout.

    Args:
        model: The policy.
        work: The length of the prompts.
        rows: Number of sequences in progress.
        steps: Number of decoding steps that the long rollout has and the short one has not.
    """
    device = model.device
    prompt_ids = torch.full((rows, work.prompt_max), 5, device=device)
    mask = torch.ones_like(prompt_ids, dtype=torch.bool)
    is_mixed = any(parameter.dtype == torch.float32 for parameter in model.parameters())

    def sample(max_new_tokens: int) -> None:
        options = SamplingOptions(max_new_tokens=max_new_tokens)
        # as Lightning's plugin for bf16-mixed does
        with torch.autocast(
            device.type, dtype=torch.bfloat16, enabled=is_mixed, cache_enabled=False
        ):
            generate_responses(
                model, prompt_ids, mask, options, eos_token_ids=[], pad_token_id=0, seed=0
            )

    # the short one has the prefill, the warm-up and the capture
    short = N_SHORT
    long = N_SHORT + steps
    sample(short)  # finds out whether a step waits
    with _timed_captures(device) as captures:
        sample(short)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    sample(long)
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    seconds = _time(lambda: sample(long), device) - _time(lambda: sample(short), device)
    counts = {n: _count(lambda n=n: sample(n), device) for n in (short, long)}  # type: ignore[misc]
    kernels: dict[str, KernelTime] = {}
    for name, kernel_time in counts[long].kernels.items():
        short_time = counts[short].kernels.get(name, KernelTime(count=0.0, microseconds=0.0))
        kernels[name] = KernelTime(
            count=(kernel_time.count - short_time.count) / steps,
            microseconds=(kernel_time.microseconds - short_time.microseconds) / steps,
        )
    by_time = sorted(kernels.items(), key=lambda item: -item[1].microseconds)
    return StepProfile(
        seconds=seconds / steps,
        launches=(counts[long].launches - counts[short].launches) / steps,
        graphs=(counts[long].graphs - counts[short].graphs) / steps,
        captures=captures,
        peak=peak,
        kernels=dict(by_time),
    )


def print_profile(name: str, step: StepProfile, bound: float) -> None:
    """Print a profile as a table of kernels below a line for the step.

    Args:
        name: What was profiled.
        step: Profile of a decoding step.
        bound: Seconds that reading the weights takes.
    """
    n_kernels = sum(kernel.count for kernel in step.kernels.values())
    busy = sum(kernel.microseconds for kernel in step.kernels.values())
    print(
        f"{name}: {step.seconds * 1e3:.2f} ms a step, {step.seconds / bound:.1f} x the weights; "
        f"{step.graphs:.1f} CUDA graphs, {step.launches:.1f} launches, {n_kernels:.1f} kernels "
        f"of {busy / 1e3:.2f} ms; {'gaps' if step.graphs else 'waits for the host'} "
        f"{max(1 - busy / 1e6 / step.seconds, 0):.0%}"
    )
    print(
        f"  {len(step.captures)} captures in a rollout, {sum(step.captures) * 1e3:.1f} ms; "
        f"peak {step.peak / 1e9:.2f} GB"
    )
    for part in ("flash", "scan"):  # attention, and the cumulative sum of the draw
        us = sum(k.microseconds for name, k in step.kernels.items() if part in name.lower())
        print(f"  {part}: {us:.0f} us a step, {us / busy if busy else 0:.0%} of the device's time")
    for kernel_name, kernel in list(step.kernels.items())[:N_KERNELS]:
        print(f"  {kernel.microseconds:8.1f} us {kernel.count:6.1f} x {kernel_name[:90]}")


@contextmanager
def _timed_captures(device: torch.device) -> Iterator[list[float]]:
    """Gives a list that the seconds of each capture are added to."""
    seconds: list[float] = []
    capture = graphs.capture_graph

    def timed(*arguments: Any) -> Any:  # noqa: ANN401  # whatever the function takes and returns
        _synchronize(device)
        start = time.perf_counter()
        result = capture(*arguments)
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
        return result

    with patch("lit_rlhf.rollout.graphs.capture_graph", timed):
        yield seconds


class _Counts(NamedTuple):
    launches: int
    graphs: int
    kernels: dict[str, KernelTime]


def _count(function: Callable[[], None], device: torch.device) -> _Counts:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        function()
        _synchronize(device)
    averages: list[Any] = list(recorded.key_averages())
    launches = sum(event.count for event in averages if event.key.startswith(LAUNCHES))
    graphs = sum(event.count for event in averages if event.key.startswith("cudaGraphLaunch"))
    return _Counts(launches=launches, graphs=graphs, kernels=cuda_kernels(averages))


def cuda_kernels(averages: list[Any]) -> dict[str, KernelTime]:
    """Sum the time of each CUDA kernel by its name.

    Args:
        averages: `key_averages()` of a profile.
    """
    return {
        event.key: KernelTime(count=event.count, microseconds=event.self_device_time_total)
        for event in averages
        if event.device_type == DeviceType.CUDA
    }


def _time(function: Callable[[], None], device: torch.device) -> float:
    """Seconds of the fastest of three calls."""
    seconds = []
    for _ in range(3):
        _synchronize(device)
        start = time.perf_counter()
        function()
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    auto_cli(profile_decode)
