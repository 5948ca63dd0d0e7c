"""Wall-clock time of an iteration's phases."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PhaseTimer:
    """Seconds per phase since the last call of `metrics`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time inside the block to `phase`."""
        start = self._now()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + self._now() - start

    @staticmethod
    def _now() -> float:
        # GPU work runs behind the host: a phase ends when its kernels have.
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def metrics(self, response_tokens: int) -> dict[str, torch.Tensor]:
        """`time/<phase>` in seconds and `throughput/response_tokens_per_second`; starts anew."""
        total = sum(self.seconds.values())
        metrics = {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
        metrics["time/iteration"] = total
        metrics["throughput/response_tokens_per_second"] = response_tokens / max(total, 1e-9)
        self.seconds = {}
        return {key: torch.tensor(value) for key, value in metrics.items()}
