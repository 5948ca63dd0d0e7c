"""What a configuration asks of the machine, and the Trainer that examines it in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

GPU = ("gpu", "cuda")
QUIET: dict[str, Any] = {
    "logger": False,
    "callbacks": None,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
    "devices": 1,
    "num_nodes": 1,
    # they would lengthen or cut the examination
    "min_epochs": None,
    "min_steps": None,
    "max_time": None,
    "fast_dev_run": False,
    "barebones": False,
    "profiler": None,
}
"""Settings of a Trainer that runs one batch in this process and leaves nothing behind."""


@dataclass(frozen=True)
class RunPlan:
    """What the configuration asks for.

    Attributes:
        ranks: Processes, each with a device.
        strategy: Name or class of the strategy.
        engines: Whether it is one of the multi-engine DeepSpeed strategies.
        offload_optimizer: Whether these keep the optimizers in CPU memory.
        limit_train_batches: Lightning's, an integer or a share; `None`: all.
        max_time: Lightning's limit of the run, or `None`.
        stand_in: What the examination uses instead, in words; empty: nothing.
        on_gpu: Whether the run is on GPUs; without one here nothing is known of theirs.
    """

    ranks: int = 1
    strategy: str = "auto"
    engines: bool = False
    offload_optimizer: bool = False
    limit_train_batches: int | float | None = None
    max_time: Any = None
    stand_in: str = ""
    on_gpu: bool = False


def run_plan(trainer: Mapping[str, Any]) -> RunPlan:
    """What the Trainer's settings in a configuration ask for.

    Args:
        trainer: Arguments of `Trainer`, as LightningCLI parses them.
    """
    on_gpu = trainer.get("accelerator") in GPU or (
        trainer.get("accelerator", "auto") == "auto" and torch.cuda.is_available()
    )
    ranks = _devices(trainer.get("devices", "auto"), on_gpu) * int(trainer.get("num_nodes") or 1)
    name, options = _strategy(trainer.get("strategy", "auto"))
    return RunPlan(
        ranks=ranks,
        strategy=name,
        engines=name.startswith("multi_deepspeed") or name == "MultiEngineDeepSpeedStrategy",
        offload_optimizer=name.endswith("_offload") or bool(options.get("offload_optimizer")),
        limit_train_batches=trainer.get("limit_train_batches"),
        max_time=trainer.get("max_time"),
        stand_in=_stand_in(ranks, name, on_gpu),
        on_gpu=on_gpu,
    )


def examining_settings(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the Trainer of the examination that are not the configuration's own."""
    settings = dict(QUIET)
    if run_plan(trainer).on_gpu and not torch.cuda.is_available():
        settings |= {"accelerator": "cpu", "strategy": "auto"}
    return settings


def _devices(devices: Any, on_gpu: bool) -> int:  # noqa: ANN401  # Lightning takes many forms
    there = max(torch.cuda.device_count(), 1) if on_gpu else 1
    if isinstance(devices, list):
        return len(devices)
    if isinstance(devices, str) and "," in devices:
        return len([part for part in devices.split(",") if part.strip()])
    count = there if devices in ("auto", None) else int(devices)
    return there if count == -1 else count


def _strategy(strategy: Any) -> tuple[str, Mapping[str, Any]]:  # noqa: ANN401  # name or class
    if isinstance(strategy, str):
        return strategy, {}
    if isinstance(strategy, Mapping) or hasattr(strategy, "class_path"):
        options = strategy.get("init_args") or {}
        plain = options if isinstance(options, Mapping) else options.as_dict()
        return str(strategy["class_path"]).rpartition(".")[2], plain
    return type(strategy).__name__, {}


def _stand_in(ranks: int, strategy: str, on_gpu: bool) -> str:
    parts = []
    if on_gpu and not torch.cuda.is_available():
        parts.append(
            f"The configuration is for GPUs and there is none here: all checks ran on the CPU, "
            f"clipping without the strategy {strategy}, and the time is the CPU's."
        )
    if ranks > 1:
        parts.append(
            f"The configuration has {ranks} processes: ratio, clipping and time were checked in "
            "one, on its share of an iteration."
        )
    return " ".join(parts)
