"""Phases of a training step: time and peak memory, and what helps when memory runs out."""

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lit_rlhf.errors import is_out_of_memory

GIB = 2**30
CLEAR_REFS = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")


class PhaseTimer:
    """Seconds and peak memory of each phase since the last call of `pop_metrics`.

    On a GPU, memory is what tensors take; elsewhere it is the resident memory of the process.

    Args:
        module: The module whose phases are timed, on its device.

    Attributes:
        seconds: Seconds by phase.
        peaks: Peak memory by phase, in bytes.
    """

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, int] = {}

    @contextmanager
    def __call__(self, phase: str, shape: Sequence[int], settings: Sequence[str]) -> Iterator[None]:
        """Time the block, which is not nested in another.

        Args:
            phase: Name of the phase that the block is.
            shape: Sequences and tokens of each that it works on, `(B, L)`, for a message about
                memory.
            settings: What to change if memory runs out: dotted names of the module's options, or
                of settings elsewhere in a configuration.
        """
        device = self.module.device
        reset_peak(device)
        start = now(device)
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            changes = filter(None, (suggest_change(name, self.module) for name in settings))
            raise torch.OutOfMemoryError(
                f"{phase}: out of memory with {shape[0]} sequences of {shape[1]} tokens on "
                f"this rank. What helps: {', or '.join(changes)}. The allocator said: {error}"
            ) from error
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now(device) - start
        self.peaks[phase] = max(self.peaks.get(phase, 0), peak_bytes(device))

    def pop_metrics(self, tokens: int, kind: str = "response_tokens") -> dict[str, Tensor]:
        """Return the metrics since the last call, and start anew.

        Args:
            tokens: Tokens that were worked on since then, for the throughput.
            kind: What kind of tokens they are.

        Returns:
            `time/<phase>` and `time/iteration` in seconds, `memory/<phase>` in GiB, and
            `throughput/<kind>_per_second`, 0-dim each; empty if no phase has run.
        """
        if not self.seconds:
            return {}
        total = sum(self.seconds.values())
        metrics = {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
        metrics["time/iteration"] = total
        metrics |= {f"memory/{phase}": peak / GIB for phase, peak in self.peaks.items()}
        metrics[f"throughput/{kind}_per_second"] = tokens / max(total, 1e-9)
        self.seconds = {}
        self.peaks = {}
        return {key: torch.tensor(value) for key, value in metrics.items()}


def now(device: torch.device) -> float:
    """Seconds of a clock, once the device has done what it was given."""
    # Kernels run behind the host: a phase ends when its kernels have ended.
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def reset_peak(device: torch.device) -> None:
    """Reset what `peak_bytes` measures, where the system allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif STATUS.exists():
        with suppress(OSError):  # not allowed in a sandbox: the peak is then the process's so far
            CLEAR_REFS.write_text("5")  # sets the high-water mark to what is resident now


def peak_bytes(device: torch.device) -> int:
    """Most bytes of tensors on a GPU, or of the process on a CPU, since `reset_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if STATUS.exists():
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # over the life of the process
    return peak if sys.platform == "darwin" else peak * 1024


def suggest_change(name: str, module: object) -> str:
    """Suggest how to change the option or setting `name` of a module for less memory.

    Returns:
        The suggestion; empty if the module has it already.
    """
    try:
        value = attrgetter(name)(module)
    except AttributeError:
        return f"lower {name}"
    if isinstance(value, bool):
        return "" if value else f"set {name}: true"
    return f"set {name} (now None)" if value is None else f"lower {name} (now {value})"
