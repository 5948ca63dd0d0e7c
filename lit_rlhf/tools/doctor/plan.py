"""The demands of a configuration on the machine, and settings of the Trainer that examines it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

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


class StrategyChoice(NamedTuple):
    """The strategy of a Trainer.

    Attributes:
        name: Its short name or the name of its class.
        options: Its arguments by name, as far as the configuration gives them.
    """

    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class RunPlan:
    """Demands of a configuration on the machine.

    Attributes:
        ranks: Number of processes on all nodes, each with a device.
        engines: Whether the strategy is multi-engine DeepSpeed.
        offload_optimizer: Whether the strategy keeps the optimizers' states in CPU memory.
        limit_train_batches: The Trainer's: number or share of an epoch's batches.
        max_time: The Trainer's, in any of its forms.
        substitution: What the examination uses instead, in words; empty for nothing.
        on_gpu: Whether the run is for GPUs.
        log_every_n_steps: The Trainer's.
        logs: Whether the Trainer has a logger.
        nodes: Number of nodes.
        sharded: Whether the strategy is FSDP2.
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
    """Read what a run needs from the arguments of its `trainer`, as LightningCLI parses them."""
    on_gpu = trainer.get("accelerator") in ("gpu", "cuda") or (
        trainer.get("accelerator", "auto") == "auto" and torch.cuda.is_available()
    )
    devices = _count_devices(trainer.get("devices", "auto"), on_gpu)
    nodes = int(trainer.get("num_nodes") or 1)
    ranks = devices * nodes
    strategy = _read_strategy(trainer.get("strategy", "auto"))
    name = strategy.name
    return RunPlan(
        ranks=ranks,
        engines=name.startswith("multi_deepspeed") or name == "MultiEngineDeepSpeedStrategy",
        offload_optimizer=name.endswith("_offload")
        or bool(strategy.options.get("offload_optimizer")),
        limit_train_batches=trainer.get("limit_train_batches"),
        max_time=trainer.get("max_time"),
        substitution=_describe_substitution(ranks=ranks, strategy=name, on_gpu=on_gpu),
        on_gpu=on_gpu,
        log_every_n_steps=trainer.get("log_every_n_steps") or 1,
        logs=trainer.get("logger") not in (False, []),
        nodes=nodes,
        sharded=name in ("fsdp2", "ShardedStrategy"),
    )


def examination_settings(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Choose the arguments of the examination's Trainer that differ from `trainer`, the run's."""
    settings = dict(QUIET)
    if plan_run(trainer).on_gpu and not torch.cuda.is_available():
        settings |= {"accelerator": "cpu", "strategy": "auto"}
    return settings


def _count_devices(devices: Any, on_gpu: bool) -> int:  # noqa: ANN401  # Lightning takes many forms
    """Count the devices that `Trainer(devices=...)` uses on a node."""
    available = max(torch.cuda.device_count(), 1) if on_gpu else 1
    if isinstance(devices, list):
        return len(devices)
    if isinstance(devices, str) and "," in devices:
        return len([part for part in devices.split(",") if part.strip()])
    return available if devices in ("auto", None, "-1", -1) else int(devices)


def _read_strategy(strategy: Any) -> StrategyChoice:  # noqa: ANN401  # Lightning takes many forms
    """Read `Trainer(strategy=...)`, which is a name, a class with arguments, or an object."""
    if isinstance(strategy, str):
        return StrategyChoice(name=strategy, options={})
    if isinstance(strategy, Mapping) or hasattr(strategy, "class_path"):
        options = strategy.get("init_args") or {}
        return StrategyChoice(
            name=str(strategy["class_path"]).rpartition(".")[2],
            options=options if isinstance(options, Mapping) else options.as_dict(),
        )
    return StrategyChoice(name=type(strategy).__name__, options={})


def _describe_substitution(*, ranks: int, strategy: str, on_gpu: bool) -> str:
    """Say what replaces the run's GPUs and processes in the examination; empty for nothing."""
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
