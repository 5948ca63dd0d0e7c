"""Profile a PPO iteration on a CUDA device: `python -m benchmarks.gpu.profile_iteration`.

Prints, for each phase, its seconds, the time that kernels take, the share of the seconds in which
the device waits for the host, the kernels, and the peak of memory; then the kernels that take most
of the device's time. The seconds are those of an iteration without the profiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
from jsonargparse import auto_cli
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.profiler import ProfilerActivity, profile
from transformers.utils.logging import disable_progress_bar

from benchmarks.gpu.profile_decode import N_KERNELS, cuda_kernels
from benchmarks.speed.job import Job
from benchmarks.speed.ours import build_loader, build_module, build_trainer
from benchmarks.speed.workload import SIZES, Mode, Precision, Size, Workload, save_networks
from experiments.device import device_name
from lit_rlhf.modules.phase_timer import PhaseTimer


class PhaseProfile(NamedTuple):
    """A phase of an iteration.

    Attributes:
        seconds: Its time without the profiler.
        busy: Seconds in which kernels ran.
        kernels: Number of kernels.
        peak: Peak memory in GiB.
    """

    seconds: float
    busy: float
    kernels: int
    peak: float


class LastIteration(Callback):
    """Profiles the phases of the last iteration.

    Attributes:
        metrics: What the iteration before it logged.
        kernels: By phase, the number of each kernel and its microseconds.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.metrics: dict[str, float] = {}
        self.kernels: dict[str, dict[str, tuple[int, float]]] = {}
        # without the operations of the host, whose records take longer than the iteration
        gpu = ProfilerActivity.CUDA
        cpu = ProfilerActivity.CPU
        self.activities = [gpu if job.device == "cuda" else cpu]

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,  # noqa: ANN401  # Lightning's signature
        batch_idx: int,
    ) -> None:
        """Keep what the iteration before the last logged."""
        if batch_idx == self.job.steps - 1:
            self.metrics = {name: float(v) for name, v in trainer.callback_metrics.items()}

    @contextmanager
    def profiled(self) -> Iterator[None]:
        """Lets phases that are timed be profiled, once the last iteration has begun."""
        time_phase = PhaseTimer.__call__

        @contextmanager
        def call(timer: PhaseTimer, phase: str, *arguments: Any) -> Iterator[None]:
            if not self.metrics:
                with time_phase(timer, phase, *arguments):
                    yield
                return
            recorded = profile(activities=self.activities)
            with recorded, time_phase(timer, phase, *arguments):
                yield
            self.kernels[phase] = cuda_kernels(list(recorded.key_averages()))

        with patch.object(PhaseTimer, "__call__", call):
            yield

    def phases(self) -> dict[str, PhaseProfile]:
        """The profile of each phase. Kernels of one stream do not overlap."""
        return {
            phase: PhaseProfile(
                self.metrics[f"time/{phase}"],
                sum(us for _, us in kernels.values()) / 1e6,
                sum(n for n, _ in kernels.values()),
                self.metrics[f"memory/{phase}"],
            )
            for phase, kernels in self.kernels.items()
        }


def profile_iteration(
    device: Literal["cpu", "cuda"] = "cuda",
    size: Size = "1b",
    precision: Precision = "bf16-mixed",
    mode: Mode = "ragged",
) -> None:
    """Profile an iteration of networks with random weights.

    Args:
        device: `cpu` only tries the script.
        size: Networks, batch and lengths.
        precision: Precision of weights and computation.
        mode: `ragged` for responses that end at random, `full` for responses that do not end.
    """
    disable_progress_bar()  # of saving the networks
    work = Workload(mode=mode, **SIZES[size])
    with TemporaryDirectory(prefix="profile_") as folder:
        job = Job(work, folder, precision=precision, device=device, warmup=2, updates=2)
        save_networks(work, Path(folder), precision, device)
        last = LastIteration(job)
        with last.profiled():
            batches = build_loader(work, job.steps)
            build_trainer(job, last).fit(build_module(job), train_dataloaders=batches)
    print(f"{size}, {mode}, {precision} on {device_name(device)}, torch {torch.__version__}")
    print(
        f"{'phase':10} {'seconds':>8} {'kernels take':>13} {'waits':>6} {'kernels':>8} {'GiB':>6}"
    )
    for phase, found in last.phases().items():
        waits = max(1 - found.busy / found.seconds, 0)
        print(
            f"{phase:10} {found.seconds:8.3f} {found.busy:13.3f} {waits:6.0%} {found.kernels:8} "
            f"{found.peak:6.1f}"
        )
    totals: dict[str, float] = {}
    for kernels in last.kernels.values():
        for name, (_, us) in kernels.items():
            totals[name] = totals.get(name, 0.0) + us
    for kernel, us in sorted(totals.items(), key=lambda item: -item[1])[:N_KERNELS]:
        print(f"  {us / 1e3:8.1f} ms  {kernel[:90]}")


if __name__ == "__main__":
    auto_cli(profile_iteration)
