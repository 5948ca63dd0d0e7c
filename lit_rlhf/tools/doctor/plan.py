"""What a configuration asks of the machine, and settings of the Trainer that examines it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

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
    # these would lengthen the examination or cut it off
    "min_epochs": None,
    "min_steps": None,
    "max_time": None,
    "fast_dev_run": False,
    "barebones": False,
    "profiler": None,
}
"""Settings of a Trainer that runs one batch in one process and writes nothing."""


@dataclass(frozen=True)
class RunPlan:
    """What a configuration asks of the machine.

    `ranks` are processes, each with a device; `engines` says that the strategy is multi-engine
    DeepSpeed, and `sharded` that it is FSDP2; `substitution` says in words what the examination
    uses instead, and is empty for nothing. The other fields are the Trainer's.
    """

    ranks: int = 1
    engines: bool = False
    offload_optimizer: bool = False
    limit_train_batches: int | float | None = None
    max_time: Any = None
    substitution: str = ""
    on_gpu: bool = False
    log_every_n_steps: int = 1
    logs: bool = True
    nodes: int = 1
    sharded: bool = False


def plan_run(trainer: Mapping[str, Any]) -> RunPlan:
    """Read from the arguments of `Trainer`, as LightningCLI parses them, what the run needs."""
    on_gpu = trainer.get("accelerator") in ("gpu", "cuda") or (
        trainer.get("accelerator", "auto") == "auto" and torch.cuda.is_available()
    )
    devices = _count_devices(trainer.get("devices", "auto"), on_gpu)
    nodes = int(trainer.get("num_nodes") or 1)
    ranks = devices * nodes
    name, options = _strategy_name_and_options(trainer.get("strategy", "auto"))
    return RunPlan(
        ranks=ranks,
        engines=name.startswith("multi_deepspeed") or name == "MultiEngineDeepSpeedStrategy",
        offload_optimizer=name.endswith("_offload") or bool(options.get("offload_optimizer")),
        limit_train_batches=trainer.get("limit_train_batches"),
        max_time=trainer.get("max_time"),
        substitution=_describe_substitution(ranks, name, on_gpu),
        on_gpu=on_gpu,
        log_every_n_steps=trainer.get("log_every_n_steps") or 1,
        logs=trainer.get("logger") not in (False, []),
        nodes=nodes,
        sharded=name in ("fsdp2", "ShardedStrategy"),
    )


def examination_settings(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the examination's Trainer that replace those of the configuration."""
    settings = dict(QUIET)
    if plan_run(trainer).on_gpu and not torch.cuda.is_available():
        settings |= {"accelerator": "cpu", "strategy": "auto"}
    return settings


def _count_devices(devices: Any, on_gpu: bool) -> int:  # noqa: ANN401  # Lightning takes many forms
    """Number of devices that `Trainer(devices=...)` uses on a node."""
    available = max(torch.cuda.device_count(), 1) if on_gpu else 1
    if isinstance(devices, list):
        return len(devices)
    if isinstance(devices, str) and "," in devices:
        return len([part for part in devices.split(",") if part.strip()])
    return available if devices in ("auto", None, "-1", -1) else int(devices)


def _strategy_name_and_options(strategy: Any) -> tuple[str, Mapping[str, Any]]:  # noqa: ANN401
    """Name and arguments of `Trainer(strategy=...)`: a name, a class with arguments, an object."""
    if isinstance(strategy, str):
        return strategy, {}
    if isinstance(strategy, Mapping) or hasattr(strategy, "class_path"):
        options = strategy.get("init_args") or {}
        plain = options if isinstance(options, Mapping) else options.as_dict()
        return str(strategy["class_path"]).rpartition(".")[2], plain
    return type(strategy).__name__, {}


def _describe_substitution(ranks: int, strategy: str, on_gpu: bool) -> str:
    """What the examination uses instead of the run's GPUs and processes; empty for nothing."""
    parts = []
    if on_gpu and not torch.cuda.is_available():
        parts.append(
            "The configuration is for GPUs and there is none here: all checks ran on the CPU, "
            f"clipping without the strategy {strategy}, and the time is the CPU's."
        )
    if ranks > 1:
        parts.append(
            f"The configuration has {ranks} processes: all checks ran in one, on its share of an "
            "iteration."
        )
    return " ".join(parts)
