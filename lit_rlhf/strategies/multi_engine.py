"""A Lightning strategy that gives every optimizer its own DeepSpeed engine."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.optim import Optimizer

from lit_rlhf.checks import check_choice
from lit_rlhf.strategies.engine_config import (
    PRECISION_DTYPES,
    engine_config,
    validate_overrides,
    validate_stage,
)
from lit_rlhf.strategies.engine_optimizer import EngineOptimizer, EnginePrecision
from lit_rlhf.strategies.engine_shards import (
    EngineLayout,
    ShardReader,
    engine_layout,
    engine_partitions,
    trained_parameters,
)
from lit_rlhf.strategies.folder_checkpoints import (
    FolderCheckpoints,
    cast_parameters,
    optimized_networks,
)
from lit_rlhf.strategies.sharded import ShardedStrategy

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class MultiEngineDeepSpeedStrategy(FolderCheckpoints, DeepSpeedStrategy):
    """DeepSpeed ZeRO for modules with several optimizers, which Lightning's strategy refuses.

    The parameters of each optimizer must belong to one direct child of the LightningModule
    (`self.policy`, `self.critic`). Each such network gets an engine, with its own gradient norm and
    optimizer state. Other networks (a frozen reference or reward model) stay outside the engines,
    on the rank's device. The module optimizes manually, calls its networks directly, and uses
    `backward` and `clipped_step` of `lit_rlhf.strategies`. Learning-rate schedules act on its
    optimizers as usual.

    Under bf16 precision the weights of all networks are bfloat16, so that equal weights give equal
    outputs. Engines keep float32 master weights and moments, and buffers keep their type. Under
    32-true, networks without an engine keep the type that they were loaded in.

    A checkpoint is a folder with Lightning's own state and a folder of shards per engine. A run can
    resume from it with any number of processes, and `read_state_dict` reads it without DeepSpeed.

    On CPU (over gloo, for tests) set `DS_ACCELERATOR=cpu` in the environment before Python starts.

    Args:
        accelerator: Set by the Trainer.
        stage: ZeRO stage: 1 partitions optimizer state, 2 gradients too.
        offload_optimizer: Keep master weights and moments in CPU memory, and step there.
        config: DeepSpeed keys for all engines, which win over the strategy's own.
        fp32_networks: Networks that stay float32 under bf16 precision.
        parallel_devices: Set by the Trainer.
        cluster_environment: Where the processes run; `None` lets the Trainer find out.
        precision_plugin: Set by the Trainer.
        process_group_backend: `nccl` or `gloo`; `None` for the device's default.
        timeout: Time after which a collective that a rank does not join ends the run; in YAML
            `"0:30:00"` (hours, minutes and seconds).
        logging_level: Level of DeepSpeed's logger, from `logging`.
    """

    strategy_name = "multi_deepspeed"

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        *,
        stage: int = 2,
        offload_optimizer: bool = False,
        config: dict[str, Any] | None = None,
        fp32_networks: Sequence[str] = (),
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        logging_level: int = logging.WARN,
    ) -> None:
        self.stage = validate_stage(stage)
        self.offload_optimizer = offload_optimizer
        self.overrides = validate_overrides(config or {})
        self.fp32_networks = frozenset(fp32_networks)
        self.timeout = timeout
        self.engines: dict[str, DeepSpeedEngine] = {}
        self.layouts: dict[str, EngineLayout] = {}
        super().__init__(
            accelerator=accelerator,
            # This is not the configuration of the engines. Lightning reads the stage from it for
            # `zero_stage_3`, and then does not look for a file in PL_DEEPSPEED_CONFIG_PATH.
            config={"zero_optimization": {"stage": stage}},
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            logging_level=logging_level,
        )
        require_deepspeed()

    # Setup

    def setup_environment(self) -> None:
        """Set up the device and the process group, on CUDA or CPU."""
        from deepspeed.accelerator import get_accelerator

        if not isinstance(self.accelerator, CUDAAccelerator | CPUAccelerator):
            raise RuntimeError(
                f"trainer.accelerator: expected cuda or cpu, got {type(self.accelerator).__name__}"
            )
        if get_accelerator().device_name() != self.root_device.type:
            raise RuntimeError(
                f"DeepSpeed was set up for {get_accelerator().device_name()}, the Trainer for "
                f"{self.root_device.type}: set DS_ACCELERATOR={self.root_device.type} in the "
                "environment before Python starts"
            )
        # skip the method of DeepSpeedStrategy, which refuses everything but CUDA
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        """Join the process group, for torch and for DeepSpeed."""
        if self.root_device.type == "cuda":
            super().setup_distributed()
            return
        import deepspeed

        # Where there is a compiler, DeepSpeed 0.19.8 compiles a shared-memory all-reduce when it is
        # initialized on a CPU. If the op is marked as incompatible, gloo reduces instead.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # call DDP's method: DeepSpeedStrategy's validates CUDA device indices
        DDPStrategy.setup_distributed(self)
        # engines read it; torchrun and Lightning's own launcher set it, but SLURM does not
        os.environ["LOCAL_RANK"] = str(self.local_rank)
        deepspeed.init_distributed(self.process_group_backend, auto_mpi_discovery=False)

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Do nothing: weights are never partitioned."""
        yield

    @property
    def precision_plugin(self) -> Precision:
        """Precision of the engines."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        # the Trainer makes Lightning's plugin for any DeepSpeedStrategy and assigns it here
        if isinstance(plugin, DeepSpeedPrecision):
            check_choice("trainer.precision", plugin.precision, tuple(PRECISION_DTYPES))
            plugin = EnginePrecision(plugin.precision)  # type: ignore[arg-type]  # just checked
        # `super()` gives no access to the setter of an overridden property
        Strategy.precision_plugin.fset(self, plugin)  # type: ignore[attr-defined]

    @property
    def deepspeed_engine(self) -> DeepSpeedEngine:
        """Not defined: there is one engine per network, see `engines`."""
        raise AttributeError("there is one engine per network: use strategy.engines[name]")

    @property
    def handles_gradient_accumulation(self) -> bool:
        """False: the module accumulates, with any number of backwards before a step."""
        return False

    def setup(self, trainer: Trainer) -> None:
        """Move the module to the device and, when fitting, build the engines."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        check_shared_weights(self.lightning_module, self.fp32_networks)
        for name, network in self.lightning_module.named_children():
            if self.network_dtype(name) == torch.bfloat16:
                cast_parameters(network, torch.bfloat16)  # first, so that less is moved
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.barrier()

    def network_dtype(self, name: str) -> torch.dtype:
        """Type of the weights of a network that has an engine."""
        if name in self.fp32_networks:
            return torch.float32
        assert isinstance(self.precision_plugin, EnginePrecision)
        return PRECISION_DTYPES[self.precision_plugin.precision]

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Build each optimizer's engine and replace the optimizer by one that steps through it."""
        module = self.lightning_module
        assert module is not None
        if module.automatic_optimization:
            raise ValueError(
                f"{type(module).__name__}.automatic_optimization: expected False, got True. The "
                "multi-engine strategy is for manual optimization; with automatic optimization and "
                "one optimizer use Lightning's deepspeed_stage_2"
            )
        DDPStrategy.setup_optimizers(self, trainer)
        optimizers = list(self.optimizers)
        names = optimized_networks(module, optimizers)
        children = [name for name, _ in module.named_children()]
        if unknown := self.fp32_networks - set(children):
            raise ValueError(f"fp32_networks: expected some of {children}, got {sorted(unknown)}")
        self.optimizers = [
            self.build_engine(name, optimizer)
            for name, optimizer in zip(names, optimizers, strict=True)
        ]

    def build_engine(self, name: str, optimizer: Optimizer) -> EngineOptimizer:
        """Build the engine of one network."""
        import deepspeed

        assert self.lightning_module is not None
        network = self.lightning_module.get_submodule(name)
        cast_parameters(network, self.network_dtype(name))
        groups = trained_parameters(optimizer)
        config = engine_config(
            stage=self.stage,
            offload_optimizer=self.offload_optimizer,
            dtype=self.network_dtype(name),
            device_type=self.root_device.type,
            numel=sum(p.numel() for group in groups for p in group),
            overrides=self.overrides,
        )
        engine, _, _, _ = deepspeed.initialize(
            # by default DeepSpeed takes the device numbered LOCAL_RANK
            args=argparse.Namespace(device_rank=self.root_device.index or 0),
            model=network,
            optimizer=optimizer,
            config=config,
            dist_init_required=False,
        )
        if engine.optimizer.optimizer is not optimizer:
            raise ValueError(
                f"optimizer of {name!r}: DeepSpeed replaces {type(optimizer).__name__}, so that "
                "schedules would not act on it; use another, for instance AdamW"
            )
        # DeepSpeed clones the process group, with torch's default timeout. The function is private
        # to torch; its public successor `ProcessGroup.set_timeout` came with 2.9.
        _set_pg_timeout(self.timeout, engine.data_parallel_group)
        self.engines[name] = engine
        self.layouts[name] = engine_layout(network, groups, self.world_size)
        return EngineOptimizer(name, engine, optimizer)

    def teardown(self) -> None:
        """Destroy the engines. Their networks stay usable."""
        for engine in self.engines.values():
            # `destroy` leaves the engine's hooks on the network
            engine.module_forward_pre_hook.remove()
            engine.module_forward_post_hook.remove()
            engine.destroy()
        self.engines.clear()
        super().teardown()

    # Checkpoints

    def partitions(
        self, network: str, optimizer: Optimizer, with_moments: bool
    ) -> dict[str, Tensor]:
        """This rank's flat partitions of an engine.

        Args:
            network: Name of the network.
            optimizer: The optimizer of its engine.
            with_moments: Whether to include moments.
        """
        assert isinstance(optimizer, EngineOptimizer)
        return engine_partitions(optimizer, with_moments)

    def restore_optimizer(
        self, optimizer: Optimizer, reader: ShardReader, saved: Mapping[str, Any]
    ) -> None:
        """Restore master weights, moments and group settings of an engine's optimizer.

        Args:
            optimizer: The optimizer of an engine.
            reader: Reads the network's shards.
            saved: The optimizer's state in the checkpoint.
        """
        assert isinstance(optimizer, EngineOptimizer)
        reader.load_optimizer(optimizer, saved, self.global_rank)


def check_shared_weights(module: nn.Module, fp32_networks: Collection[str]) -> None:
    """Refuse float32 networks that share weights with networks of another type.

    Args:
        module: The module; its networks are its direct children.
        fp32_networks: Names of networks that stay float32.
    """
    owners: dict[int, str] = {}
    for name, child in module.named_children():
        for parameter in child.parameters():
            first_owner = owners.setdefault(id(parameter), name)
            if (name in fp32_networks) != (first_owner in fp32_networks):
                raise ValueError(
                    f"fp32_networks: expected both of {first_owner} and {name}, which share "
                    f"weights below their LoRA adapters, or neither, got {sorted(fp32_networks)}"
                )


def require_deepspeed() -> None:
    """Refuse DeepSpeed versions that do not let the module decide when to step."""
    from deepspeed import DeepSpeedEngine, __version__

    if not hasattr(DeepSpeedEngine, "managed_gradient_accumulation"):
        raise ImportError(
            f"deepspeed: expected 0.19.8 or newer, got {__version__}: pip install -U deepspeed"
        )


def register_strategies() -> None:
    """Register `fsdp2` and `multi_deepspeed_stage_{1,2,2_offload,3}`; safe to call again."""
    for name, description, arguments in (
        ("stage_1", "ZeRO stage 1", {"stage": 1}),
        ("stage_2", "ZeRO stage 2", {"stage": 2}),
        ("stage_2_offload", "ZeRO stage 2, CPU offload", {"stage": 2, "offload_optimizer": True}),
        ("stage_3", "not supported: says why", {"stage": 3}),  # to be refused with a reason
    ):
        StrategyRegistry.register(
            f"multi_deepspeed_{name}",
            MultiEngineDeepSpeedStrategy,
            description=f"One DeepSpeed engine per optimizer: {description}",
            override=True,
            **arguments,
        )
    StrategyRegistry.register(
        ShardedStrategy.strategy_name,
        ShardedStrategy,
        description="FSDP2: all networks sharded over ranks",
        override=True,
    )
