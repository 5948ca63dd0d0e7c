"""What a benchmark asks of a process of its own, and what that process answers, as JSON files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.machine import (
    Reading,
    foreign_cores,
    peak_memory_mib,
    reading,
    synchronize,
    versions,
)
from benchmarks.speed.workload import Precision, Stage, Workload


@dataclass(frozen=True)
class Job:
    """Updates to run and time.

    Attributes:
        work: One update's work.
        stage: What is trained.
        folder: Where `save_networks` put the networks.
        precision: Of weights and computation.
        device: `cpu` or `cuda`.
        warmup: Updates before the timed ones; memory is still being fetched in the second.
        updates: Timed updates.
        threads: Of torch on a CPU.
    """

    work: Workload
    folder: str = ""
    stage: Stage = "ppo"
    precision: Precision = "fp32"
    device: str = "cpu"
    warmup: int = 2
    updates: int = 4
    threads: int = 2

    @property
    def steps(self) -> int:
        """All updates."""
        return self.warmup + self.updates

    def placed(self, folder: Path) -> Job:
        """The same job with its networks in another folder."""
        return replace(self, folder=str(folder))

    def save(self, path: Path) -> None:
        """Write the job as JSON."""
        path.write_text(json.dumps(asdict(self)), "utf-8")

    @classmethod
    def load(cls, path: Path) -> Job:
        """Read a job and set torch up for it."""
        values = json.loads(path.read_text("utf-8"))
        job = cls(**values | {"work": Workload(**values["work"])})
        torch.set_num_threads(job.threads)
        torch.manual_seed(job.work.seed)
        return job


def environment(threads: int) -> dict[str, str]:
    """Environment variables of a measured process: threads, and nothing from the network."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


@dataclass
class Laps:
    """Wall-clock seconds, foreign load and work of one update after the other."""

    device: str
    records: list[dict[str, Any]] = field(default_factory=list)
    memory_before_mib: float = 0.0
    _last: Reading | None = None

    def start(self) -> None:
        """Begin the first update."""
        self.memory_before_mib = peak_memory_mib(self.device)
        self._last = reading()

    @property
    def started(self) -> bool:
        """Whether the first update has begun."""
        return self._last is not None

    def lap(
        self, phases: Mapping[str, float], prompts: Sequence[int], responses: Sequence[int]
    ) -> None:
        """End an update and begin the next.

        Args:
            phases: Its seconds by phase; what is missing to its total is `other`.
            prompts: Tokens of its prompts.
            responses: Tokens of its responses.

        Raises:
            RuntimeError: Before `start`.
        """
        if self._last is None:
            raise RuntimeError("lap: expected a call of start before")
        synchronize()
        now = reading()
        seconds = now.wall - self._last.wall
        self.records.append(
            {
                "seconds": seconds,
                "foreign_cores": foreign_cores(self._last, now),
                "phases": {**phases, "other": seconds - sum(phases.values())},
                "prompts": list(prompts),
                "responses": list(responses),
            }
        )
        self._last = reading()

    def save(self, path: Path, job: Job, packages: Sequence[str], **more: object) -> None:
        """Write the timed updates with memory and versions."""
        result = {
            "precision": job.precision,
            "versions": versions(packages),
            "memory_before_mib": self.memory_before_mib,
            "peak_memory_mib": peak_memory_mib(self.device),
            "updates": self.records[job.warmup :],
            **more,
        }
        path.write_text(json.dumps(result), "utf-8")
