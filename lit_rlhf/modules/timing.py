"""Wall-clock time and peak memory of the phases of a training step."""

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
    """Seconds and peak memory of each phase since the last call of `pop_metrics`.

    Memory is that of tensors on a GPU, or else the resident memory of the process.

    Args:
        device: Device that the phases run on; `None`: the CPU.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, int] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time inside the block to `phase`. Phases must not be nested."""
        reset_peak(self.device)
        start = self._now()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + self._now() - start
        self.peaks[phase] = max(self.peaks.get(phase, 0), peak_bytes(self.device))

    def _now(self) -> float:
        # Kernels run behind the host: a phase ends when its kernels have ended.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def pop_metrics(self, tokens: int, kind: str = "response_tokens") -> dict[str, torch.Tensor]:
        """Metrics of the phases since the last call, and of their throughput.

        Args:
            tokens: Number of tokens that the phases processed.
            kind: Kind of the tokens, for the key of the throughput.

        Returns:
            `time/<phase>` and `time/iteration` in seconds, `memory/<phase>` in GiB and
            `throughput/<kind>_per_second`, 0-dim; nothing if there was no phase.
        """
        if not self.seconds:
            return {}
        total = sum(self.seconds.values())
        metrics = {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
        metrics["time/iteration"] = total
        metrics |= {f"memory/{phase}": peak / GIB for phase, peak in self.peaks.items()}
        metrics[f"throughput/{kind}_per_second"] = tokens / max(total, 1e-9)
        self.seconds, self.peaks = {}, {}
        return {key: torch.tensor(value) for key, value in metrics.items()}


def reset_peak(device: torch.device) -> None:
    """Reset what `peak_bytes` measures, where the system allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif STATUS.exists():
        try:
            CLEAR_REFS.write_text("5")  # sets the high-water mark to what is resident now
        except OSError:
            return  # not allowed in a sandbox: the peak is then that of the process's life


def peak_bytes(device: torch.device) -> int:
    """Most bytes of tensors on a GPU, or of the process on a CPU, since `reset_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if STATUS.exists():
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # of the whole process's life
    return peak if sys.platform == "darwin" else peak * 1024
