"""Jobs for the processes of a benchmark and what these processes write, as JSON files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.machine import (
    Clocks,
    foreign_cores,
    kernels,
    peak_memory_mib,
    read_clocks,
    synchronize,
    versions,
)
from benchmarks.speed.workload import Kernels, Precision, Stage, Workload


@dataclass(frozen=True)
class Job:
    """Updates to run and time.

    Attributes:
        work: The work of an update.
        stage: What is trained.
        folder: Folder that `save_networks` wrote the networks to.
        precision: Precision of weights and computation.
        device: `cpu` or `cuda`.
        kernels: What runs in the networks of lit_rlhf.
        lora_rank: Rank of the LoRA adapters that lit_rlhf trains; 0: all weights are trained.
        strategy: Name of the strategy of lit_rlhf's Trainer; `None`: one device, without an engine.
        warmup: Updates before the timed ones. The process's memory still grows in the second.
        updates: Number of timed updates.
        threads: torch's threads on a CPU.
    """

    work: Workload
    folder: str = ""
    stage: Stage = "ppo"
    precision: Precision = "fp32"
    device: str = "cpu"
    kernels: Kernels = "plain"
    lora_rank: int = 0
    strategy: str | None = None
    warmup: int = 2
    updates: int = 4
    threads: int = 2

    @property
    def steps(self) -> int:
        """Number of updates, the untimed ones included."""
        return self.warmup + self.updates

    def in_folder(self, folder: Path) -> Job:
        """Return the same job with the networks of another folder."""
        return replace(self, folder=str(folder))

    def save(self, path: Path) -> None:
        """Write the job as JSON."""
        path.write_text(json.dumps(asdict(self)), "utf-8")

    @classmethod
    def load(cls, path: Path) -> Job:
        """Read a job, and set torch's threads and seed for it."""
        values = json.loads(path.read_text("utf-8"))
        job = cls(**values | {"work": Workload(**values["work"])})
        torch.set_num_threads(job.threads)
        torch.manual_seed(job.work.seed)
        return job


def environment(threads: int) -> dict[str, str]:
    """Make the environment variables of a measured process, which does not use the network.

    Args:
        threads: Threads of torch and MKL in the process.
    """
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


@dataclass
class Laps:
    """Records seconds, foreign load and work of one update after the other.

    Attributes:
        device: `cpu` or `cuda`.
        records: One for each update so far.
        memory_before_mib: Peak memory before the first update.
    """

    device: str
    records: list[dict[str, Any]] = field(default_factory=list)
    memory_before_mib: float = 0.0
    _last: Clocks | None = None

    def start(self) -> None:
        """Start the clocks of the first update."""
        self.memory_before_mib = peak_memory_mib(self.device)
        self._last = read_clocks()

    @property
    def started(self) -> bool:
        """Whether the first update has begun."""
        return self._last is not None

    def lap(
        self, phases: Mapping[str, float], prompts: Sequence[int], responses: Sequence[int]
    ) -> None:
        """Record an update, and start the clocks of the next one.

        Args:
            phases: Seconds by phase. The rest of the update's seconds is recorded as `other`.
            prompts: Number of tokens of each prompt.
            responses: Number of tokens of each response.

        Raises:
            RuntimeError: Before `start`.
        """
        if self._last is None:
            raise RuntimeError("lap: expected a call of start first")
        synchronize()
        now = read_clocks()
        seconds = now.wall - self._last.wall
        self.records.append(
            {
                "seconds": seconds,
                "cpu_seconds": now.own - self._last.own,
                "foreign_cores": foreign_cores(self._last, now),
                "phases": {**phases, "other": seconds - sum(phases.values())},
                "prompts": list(prompts),
                "responses": list(responses),
            }
        )
        self._last = read_clocks()

    def save(self, path: Path, job: Job, packages: Sequence[str], **more: object) -> None:
        """Write the timed updates, the process's memory, versions and kernels.

        Args:
            path: The file.
            job: What was run.
            packages: Packages whose versions are written.
            more: Further entries of the file.
        """
        result = {
            "precision": job.precision,
            "versions": versions(packages),
            "kernels": kernels(),
            "memory_before_mib": self.memory_before_mib,
            "peak_memory_mib": peak_memory_mib(self.device),
            "updates": self.records[job.warmup :],
            **more,
        }
        path.write_text(json.dumps(result), "utf-8")
