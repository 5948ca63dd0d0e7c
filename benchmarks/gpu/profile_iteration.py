"""Profile a PPO iteration on a CUDA device: `python -m benchmarks.gpu.profile_iteration`.

Prints, for each kind of kernels and each phase, its seconds, the time that kernels take, the share
of the seconds in which none runs, the number of kernels, the rate of useful operations as a share
of the fastest `torch.mm`, and the peak of memory; then the kernels that take most of the device's
time. The seconds are from an iteration without the profiler. In the rollout, kernels of a CUDA
graph have gaps between them that are counted as time in which none runs.
"""

from __future__ import annotations

import time
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

from benchmarks.gpu.profile_decode import N_KERNELS, KernelTime, cuda_kernels, free_memory
from benchmarks.speed.flops import update_flops
from benchmarks.speed.job import Job
from benchmarks.speed.machine import matmul_ceiling
from benchmarks.speed.ours import build_loader, build_module, build_trainer
from benchmarks.speed.workload import (
    SIZES,
    Kernels,
    Mode,
    Precision,
    Size,
    Workload,
    save_networks,
)
from experiments.device import device_name
from lit_rlhf.data import PromptBatch
from lit_rlhf.modules.phase_timer import PhaseTimer


class PhaseProfile(NamedTuple):
    """A phase of an iteration.

    Attributes:
        seconds: Its time without the profiler.
        busy: Seconds in which kernels ran.
        kernels: Number of kernels.
        rate: Useful operations per second.
        peak: Peak memory in GiB.
    """

    seconds: float
    busy: float
    kernels: int
    rate: float
    peak: float

    @property
    def idle(self) -> float:
        """Share of its time in which no kernel ran."""
        return max(1 - self.busy / self.seconds, 0.0)


class LastIteration(Callback):
    """Profiles the phases of the last iteration.

    Attributes:
        metrics: What the iteration before it logged.
        operations: Useful operations of that iteration by phase.
        kernels: By phase, the time of each kernel by its name.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.metrics: dict[str, float] = {}
        self.operations: dict[str, float] = {}
        self.kernels: dict[str, dict[str, KernelTime]] = {}
        # without the operations of the host, whose records take longer than the iteration
        gpu = ProfilerActivity.CUDA
        cpu = ProfilerActivity.CPU
        self.activities = [gpu if job.device == "cuda" else cpu]

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,  # noqa: ANN401  # Lightning's signature
        batch: PromptBatch,
        batch_idx: int,
    ) -> None:
        """Keep what the last iteration but one logged, and count its work."""
        if batch_idx != self.job.steps - 2:
            return
        self.metrics = {name: float(v) for name, v in trainer.callback_metrics.items()}
        prompts = batch.attention_mask.sum(1).tolist()
        responses = outputs["response_lengths"].tolist()
        work = update_flops(self.job.work, prompts, responses)
        # a third each: score is the reward model's forward, estimate reference's and critic's
        self.operations = {
            "rollout": work.rollout,
            "score": work.score / 3,
            "estimate": work.score * 2 / 3,
            "update": work.update,
        }

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
                seconds=self.metrics[f"time/{phase}"],
                busy=sum(kernel.microseconds for kernel in kernels.values()) / 1e6,
                kernels=int(sum(kernel.count for kernel in kernels.values())),
                rate=self.operations[phase] / self.metrics[f"time/{phase}"],
                peak=self.metrics[f"memory/{phase}"],
            )
            for phase, kernels in self.kernels.items()
        }


def profile_iteration(
    *,
    device: Literal["cpu", "cuda"] = "cuda",
    size: Size = "1b",
    precision: Precision = "bf16-mixed",
    mode: Mode = "ragged",
    kernels: tuple[Kernels, ...] = ("plain",),
    lora_rank: int = 0,
    strategy: str | None = None,
    iterations: int = 4,
) -> None:
    """Profile an iteration of networks with random weights.

    Args:
        device: `cpu` only tries the script.
        size: Networks, batch and lengths.
        precision: Precision of weights and computation.
        mode: `ragged` for responses that end at random, `full` for responses that do not end.
        kernels: What runs in the networks, one after the other.
        lora_rank: Rank of the LoRA adapters that are trained; 0: all weights are trained.
        strategy: Name of the Trainer's strategy, for instance `multi_deepspeed_stage_1`; `None`:
            one device, without an engine.
        iterations: Iterations of each kind of kernels, at least 2. The last is profiled, and the
            one before it is timed.
    """
    # saving the networks would show one
    disable_progress_bar()  # type: ignore[no-untyped-call]
    work = Workload(mode=mode, **SIZES[size])
    ceiling = matmul_ceiling(torch.float32 if precision == "fp32" else torch.bfloat16, device)
    print(f"{size}, {mode}, {precision} on {device_name(device)}, torch {torch.__version__}")
    print(f"LoRA rank {lora_rank}, strategy {strategy}, torch.mm {ceiling / 1e12:.0f} TFLOP/s")
    with TemporaryDirectory(prefix="profile_") as folder:
        save_networks(work, Path(folder), precision, device)
        for kind in kernels:
            job = Job(
                work,
                folder,
                precision=precision,
                device=device,
                kernels=kind,
                lora_rank=lora_rank,
                strategy=strategy,
                warmup=iterations - 2,
                updates=2,
            )
            start = time.perf_counter()
            last = profile_last_iteration(job)
            print(f"\n# {kind}: {iterations} iterations in {time.perf_counter() - start:.0f} s")
            print_phases(last, ceiling)
            print(describe_update(kind, last, ceiling), flush=True)
            del last
            free_memory()


def profile_last_iteration(job: Job) -> LastIteration:
    """Train for the job's iterations, and profile the last of them."""
    last = LastIteration(job)
    with last.profiled():
        batches = build_loader(job.work, job.steps)
        build_trainer(job, last).fit(build_module(job), train_dataloaders=batches)
    return last


def describe_update(kind: Kernels, last: LastIteration, ceiling: float) -> str:
    """The figures that the GPU report compares with what it expects, in one line.

    Args:
        kind: What ran in the networks.
        last: The profile.
        ceiling: Operations per second of the fastest `torch.mm`.
    """
    phases = last.phases()
    update = phases["update"]
    return (
        f"{kind}: {sum(phase.seconds for phase in phases.values()):.2f} s an iteration, update "
        f"{update.seconds:.2f} s at {update.rate / ceiling:.0%} of torch.mm, idle {update.idle:.0%}"
    )


def print_phases(last: LastIteration, ceiling: float) -> None:
    """Print the phases as a table, and below it the kernels that take most of the time.

    Args:
        last: The profile.
        ceiling: Operations per second of the fastest `torch.mm`.
    """
    print(
        f"{'phase':10} {'seconds':>8} {'kernels take':>13} {'idle':>6} {'kernels':>8} "
        f"{'of mm':>6} {'GiB':>6}"
    )
    for phase, totals in last.phases().items():
        print(
            f"{phase:10} {totals.seconds:8.3f} {totals.busy:13.3f} {totals.idle:6.0%} "
            f"{totals.kernels:8} {totals.rate / ceiling:6.0%} {totals.peak:6.1f}"
        )
    seconds = sum(totals.seconds for totals in last.phases().values())
    rate = sum(last.operations.values()) / seconds
    print(f"{'all':10} {seconds:8.3f} {'':13} {'':6} {'':8} {rate / ceiling:6.0%}")
    times: dict[str, float] = {}
    for kernels in last.kernels.values():
        for name, kernel in kernels.items():
            times[name] = times.get(name, 0.0) + kernel.microseconds
    for name, microseconds in sorted(times.items(), key=lambda item: -item[1])[:N_KERNELS]:
        print(f"  {microseconds / 1e3:8.1f} ms  {name[:90]}")


if __name__ == "__main__":
    auto_cli(profile_iteration)
