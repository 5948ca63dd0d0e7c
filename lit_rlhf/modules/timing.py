"""Wall-clock time and peak memory of a training step's phases."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

GIB = 2**30
CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


class PhaseTimer:
    """Seconds and peak memory of each phase since the last call of `metrics`.

    Memory is that of the GPU's tensors in training on one, and else the process's resident memory.

    Args:
        device: Where the phases run.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, int] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time inside the block to `phase`. Phases do not lie within one another."""
        start_peak(self.device)
        start = self._now()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + self._now() - start
        self.peaks[phase] = max(self.peaks.get(phase, 0), peak_bytes(self.device))

    def _now(self) -> float:
        # GPU work runs behind the host: a phase ends when its kernels have.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def metrics(self, tokens: int, what: str = "response_tokens") -> dict[str, torch.Tensor]:
        """What is logged of a step; starts anew.

        Args:
            tokens: How many tokens it was about.
            what: What they are called.

        Returns:
            `time/<phase>` and `time/iteration` in seconds, `memory/<phase>` in GiB and
            `throughput/<what>_per_second`, 0-dim.
        """
        total = sum(self.seconds.values())
        metrics = {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
        metrics["time/iteration"] = total
        metrics |= {f"memory/{phase}": peak / GIB for phase, peak in self.peaks.items()}
        metrics[f"throughput/{what}_per_second"] = tokens / max(total, 1e-9)
        self.seconds, self.peaks = {}, {}
        return {key: torch.tensor(value) for key, value in metrics.items()}


def start_peak(device: torch.device) -> None:
    """Let `peak_bytes` begin anew, where the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif STATUS.exists():
        try:
            CLEAR_REFS.write_text("5")  # sets the high-water mark to what is resident now
        except OSError:
            return  # not allowed here (a sandbox): the mark is of the whole process's life then


def peak_bytes(device: torch.device) -> int:
    """The most bytes of tensors on a GPU, or of the process on a CPU, since `start_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if STATUS.exists():
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # of the whole process's life
    return peak if sys.platform == "darwin" else peak * 1024
