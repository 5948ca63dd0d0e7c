"""The machine: its ceilings, its memory and the load of other processes. Linux only (/proc)."""

from __future__ import annotations

import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
QUIET_CORES = 0.05
"""An update with more foreign load than this, in cores, is left out of the figures."""
CPU_SHAPES = ((2048, 256, 688), (2048, 1024, 1024), (2048, 2048, 2048))
GPU_SHAPES = ((8192, 8192, 8192),)
BF16_PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bf16 operations per second in the vendors' data sheets, by a part of the device's name."""


def busy_seconds(stat: str) -> float:
    """Processor time that all processes of the machine have used.

    Args:
        stat: Text of `/proc/stat`.

    Returns:
        Seconds of user, nice, system, irq, softirq and steal, over all cores.

    Raises:
        ValueError: If the first line is not about all cores together.
    """
    name, *fields = stat.partition("\n")[0].split() or [""]
    if name != "cpu" or len(fields) < 8:
        raise ValueError(f"/proc/stat: expected a line 'cpu' with 8 numbers, got {stat[:80]!r}")
    ticks = [int(field) for field in fields]
    return (sum(ticks[:3]) + sum(ticks[5:8])) / TICKS_PER_SECOND


class Clocks(NamedTuple):
    """Three clocks at one moment, in seconds.

    Attributes:
        wall: Wall-clock time.
        own: Processor time of this process.
        machine: Processor time of all processes.
    """

    wall: float
    own: float
    machine: float


def read_clocks() -> Clocks:
    """The clocks now."""
    stat = Path("/proc/stat").read_text("ascii")
    return Clocks(time.perf_counter(), time.process_time(), busy_seconds(stat))


def foreign_cores(start: Clocks, end: Clocks) -> float:
    """Count the cores that other processes used between two moments, on average.

    Args:
        start: The clocks at the first moment.
        end: The clocks at the second.
    """
    used_here = end.own - start.own
    used = end.machine - start.machine
    return (used - used_here) / (end.wall - start.wall)


def wait_until_quiet(limit: float, window: float = 4.0, cores: float = 0.1) -> float:
    """Wait until other processes use little.

    Args:
        limit: Seconds to wait at most.
        window: Seconds over which the load is averaged.
        cores: Load that counts as little.

    Returns:
        Load in the last window, in cores.
    """
    end = time.perf_counter() + limit
    while True:
        start = read_clocks()
        time.sleep(window)
        load = foreign_cores(start, read_clocks())
        if load < cores or time.perf_counter() > end:
            return load


def peak_memory_mib(device: str) -> float:
    """Read the peak memory of this process so far, in MiB.

    Args:
        device: `cpu` for its largest resident set, `cuda` for its largest allocation on the GPU.
    """
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return status_kib(Path("/proc/self/status").read_text("ascii"), "VmHWM") / 1024


def status_kib(status: str, field: str) -> int:
    """Read a field of `/proc/<pid>/status`, in KiB.

    Args:
        status: Text of the file.
        field: Name of the field, such as `VmHWM`.

    Raises:
        ValueError: If the field is missing.
    """
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0])
    raise ValueError(f"/proc/self/status: expected a field {field}, got none")


def median_seconds(work: Callable[[], Any], blocks: int = 7, block: float = 0.2) -> float:
    """Time a function, after a warm-up.

    Args:
        work: The function.
        blocks: Number of blocks of calls. The result is the median over them.
        block: Seconds that a block takes, roughly.

    Returns:
        Seconds of a call.
    """
    for _ in range(3):
        work()
    synchronize()
    calls, elapsed = 1, time_calls(work, 1)
    while elapsed < block / 4:
        calls *= 2
        elapsed = time_calls(work, calls)
    calls = max(1, round(calls * block / elapsed))
    return statistics.median(time_calls(work, calls) / calls for _ in range(blocks))


def time_calls(work: Callable[[], Any], calls: int) -> float:
    """Time several calls of a function.

    Args:
        work: The function.
        calls: How often it is called.

    Returns:
        Seconds of all calls: CPU seconds with one thread and no GPU, else of the wall clock.
    """
    if torch.get_num_threads() == 1 and not torch.cuda.is_available():
        start = time.process_time()
        for _ in range(calls):
            work()
        return time.process_time() - start
    start = time.perf_counter()
    for _ in range(calls):
        work()
    return synchronize() - start


def synchronize() -> float:
    """Wait for the GPU, if there is one, and return the time in seconds."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.no_grad()
def matmul_ceiling(dtype: torch.dtype, device: str, onednn: bool = False) -> float:
    """Operations per second of the fastest of a few matrix products.

    Args:
        dtype: Type of the matrices.
        device: `cpu` or `cuda`.
        onednn: Multiply with oneDNN, whatever torch would choose; only on a CPU.
    """
    rates = []
    for rows, inner, columns in GPU_SHAPES if device == "cuda" else CPU_SHAPES:
        matrix = torch.randn(rows, inner, device=device).to(dtype)
        weight = torch.randn(columns, inner, device=device).to(dtype)
        matrix = matrix.to_mkldnn() if onednn else matrix

        def multiply(matrix: torch.Tensor = matrix, weight: torch.Tensor = weight) -> torch.Tensor:
            return torch.nn.functional.linear(matrix, weight)

        rates.append(2 * rows * inner * columns / median_seconds(multiply))
    return max(rates)


@torch.no_grad()
def memory_bandwidth(device: str) -> float:
    """Measure the bytes per second at which a large tensor is read.

    Args:
        device: `cpu` or `cuda`.
    """
    values = torch.ones(2**28 if device == "cuda" else 2**27, device=device)
    return values.numel() * values.element_size() / median_seconds(values.sum)


def bf16_peak(device_name: str) -> float | None:
    """Look up a GPU's peak rate in dense bfloat16, in operations per second.

    Args:
        device_name: Name of the GPU, as torch knows it.

    Returns:
        The rate; `None` if `BF16_PEAKS` does not have the GPU.
    """
    peaks = (peak for part, peak in BF16_PEAKS.items() if part in device_name)
    return next(peaks, None)


KERNEL_LIBRARY = re.compile(
    r"lib(?:[^/ ]*(?:mkl|blas|dnnl)[^/ ]*|gomp|iomp|omp|torch_cpu)[^/ ]*\.so[^/ ]*$", re.MULTILINE
)
KERNEL_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "THP_MEM_ALLOC_ENABLE")


def kernels() -> dict[str, Any]:
    """What this process computes with on a CPU.

    Returns:
        The instructions that torch's own kernels use, the versions of MKL and oneDNN that torch was
        built with, the number of threads, the names of the libraries with kernels and threads that
        are loaded, and the environment variables that change their speed.
    """
    built = torch.__config__.show()
    mkl = re.search(r"Math Kernel Library Version (\S+)", built)
    onednn = re.search(r"MKL-DNN v(\S+)", built)
    loaded = KERNEL_LIBRARY.findall(Path("/proc/self/maps").read_text("utf-8"))
    return {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "mkl": mkl[1] if mkl else None,
        "onednn": onednn[1] if onednn else None,
        "threads": torch.get_num_threads(),
        "libraries": sorted(set(loaded)),
        "variables": {n: os.environ[n] for n in KERNEL_VARIABLES if n in os.environ},
    }


def folder_name(device: str) -> str:
    """A device's name as a folder, for instance `intel_xeon`.

    Args:
        device: What `experiments.device.device_name` returns.
    """
    words = re.sub(r"\((R|TM)\)|\bProcessor\b|\bCPU\b|@.*", " ", device, flags=re.IGNORECASE)
    return "_".join(re.findall(r"\w+", words.lower()))


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Installed versions of `packages`, and Python's."""
    return {"python": platform.python_version()} | {name: version(name) for name in packages}
