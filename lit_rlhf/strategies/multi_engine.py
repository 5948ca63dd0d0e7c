"""A Lightning strategy that gives every optimizer its own DeepSpeed engine."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lit_rlhf.strategies.engine_checkpoints import EngineCheckpoints
from lit_rlhf.strategies.engine_config import (
    PRECISION_DTYPES,
    checked_overrides,
    checked_precision,
    checked_stage,
    engine_config,
)
from lit_rlhf.strategies.engine_optimizer import EngineOptimizer, EnginePrecision
from lit_rlhf.strategies.engine_shards import engine_layout, trained_parameters
from lit_rlhf.strategies.networks import cast_parameters, optimized_networks

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class MultiEngineDeepSpeedStrategy(EngineCheckpoints):
    """DeepSpeed ZeRO for modules with several optimizers, which Lightning's strategy refuses.

    The parameters of each optimizer must belong to one direct child of the LightningModule
    (`self.policy`, `self.critic`); each such network gets an engine, with its own gradient norm and
    state. Other networks (a frozen reference or reward model) stay outside, on the rank's device.
    The module optimizes manually, calls its networks directly, and spells backward and step as in
    `lit_rlhf.strategies.optimization`; schedules act on its optimizers as ever.

    Under bf16 the parameters of all networks are bf16, so that equal weights give equal outputs;
    engines keep fp32 master weights and moments, and buffers keep their type. Under 32-true,
    networks without an engine keep the type they were loaded in.

    A checkpoint is a folder: Lightning's own state, and one folder of shards per engine. It resumes
    with any number of processes; `plain_state_dict` reads it without DeepSpeed.

    On CPU (over gloo, for tests) set `DS_ACCELERATOR=cpu` in the environment.

    Args:
        accelerator: Set by the Trainer.
        stage: ZeRO stage: 1 partitions optimizer state, 2 gradients too.
        offload_optimizer: Keep master weights and moments in CPU memory, and step there.
        config: DeepSpeed keys for all engines, over the strategy's own.
        fp32_networks: Networks that stay float32 under bf16.
        parallel_devices: Set by the Trainer.
        cluster_environment: Where the processes run, if the Trainer is not to find out.
        precision_plugin: Set by the Trainer.
        process_group_backend: `nccl` or `gloo`; by default what the device needs.
        timeout: After which a collective that a rank does not join ends the run; in YAML
            `"0:30:00"`, hours, minutes and seconds.
        logging_level: Of DeepSpeed's logger.

    Raises:
        ValueError: For ZeRO stage 3, or a DeepSpeed key that is not for the user to set.
        MisconfigurationException: If DeepSpeed is not installed.
        ImportError: If it is older than 0.19.8.
    """

    strategy_name = "multi_deepspeed"

    def __init__(
        self,
        accelerator: Accelerator | None = None,
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
        self.stage = checked_stage(stage)
        self.offload_optimizer = offload_optimizer
        self.overrides = checked_overrides(config or {})
        self.fp32_networks = frozenset(fp32_networks)
        self.timeout = timeout
        self.engines: dict[str, DeepSpeedEngine] = {}
        self.layouts: dict[str, dict[str, Any]] = {}
        super().__init__(
            accelerator=accelerator,
            # not the engines' configuration: it keeps Lightning from reading one elsewhere, and
            # answers its zero_stage_3
            config={"zero_optimization": {"stage": stage}},
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            logging_level=logging_level,
        )
        require_deepspeed()

    def setup_environment(self) -> None:
        """Set up the device and the process group, on CUDA or CPU.

        Raises:
            RuntimeError: For other devices, or if DeepSpeed was set up for another one.
        """
        from deepspeed.accelerator import get_accelerator

        if not isinstance(self.accelerator, CUDAAccelerator | CPUAccelerator):
            raise RuntimeError(
                f"accelerator: expected cuda or cpu, got {type(self.accelerator).__name__}"
            )
        if get_accelerator().device_name() != self.root_device.type:
            raise RuntimeError(
                f"DeepSpeed was set up for {get_accelerator().device_name()}, the Trainer for "
                f"{self.root_device.type}: set DS_ACCELERATOR={self.root_device.type} in the "
                "environment before Python starts"
            )
        # past Lightning's DeepSpeedStrategy, which is for CUDA alone
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        """Join the process group, for torch and for DeepSpeed."""
        if self.root_device.type == "cuda":
            super().setup_distributed()
            return
        import deepspeed

        # a shared-memory all-reduce that DeepSpeed would compile here, and gloo does without
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        DDPStrategy.setup_distributed(self)
        os.environ["LOCAL_RANK"] = str(self.local_rank)  # DeepSpeed asks for it
        deepspeed.init_distributed(self.process_group_backend, auto_mpi_discovery=False)

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Nothing to do: weights are never partitioned."""
        yield

    @property
    def precision_plugin(self) -> Precision:
        """Precision of the engines."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if isinstance(plugin, DeepSpeedPrecision):
            plugin = EnginePrecision(checked_precision(plugin.precision))
        # the setter of the class that declares it
        Strategy.precision_plugin.fset(self, plugin)  # type: ignore[attr-defined]

    @property
    def deepspeed_engine(self) -> DeepSpeedEngine:
        """Not defined: there is one engine per network, see `engines`."""
        raise AttributeError("there is one engine per network: use strategy.engines[name]")

    @property
    def handles_gradient_accumulation(self) -> bool:
        """The module accumulates: any number of backwards, then one step."""
        return False

    def setup(self, trainer: Trainer) -> None:
        """Move the module to the device and, when fitting, build the engines."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        for name, network in self.lightning_module.named_children():
            if self.network_dtype(name) == torch.bfloat16:
                cast_parameters(network, torch.bfloat16)  # before the move, which is then smaller
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
        """Build each optimizer's engine and put an optimizer that steps it in its place.

        Raises:
            ValueError: If the module optimizes automatically, or its optimizers do not each train
                one child.
        """
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
        unknown = self.fp32_networks - {name for name, _ in module.named_children()}
        if unknown:
            raise ValueError(f"fp32_networks: no such network: {sorted(unknown)}")
        self.optimizers = [
            self.build_engine(name, optimizer)
            for name, optimizer in zip(names, optimizers, strict=True)
        ]

    def build_engine(self, name: str, optimizer: Optimizer) -> EngineOptimizer:
        """Build the engine of one network.

        Raises:
            ValueError: If ZeRO cannot use the optimizer.
        """
        import deepspeed

        assert self.lightning_module is not None
        network = self.lightning_module.get_submodule(name)
        cast_parameters(network, self.network_dtype(name))
        groups = trained_parameters(optimizer)
        config = engine_config(
            self.stage,
            self.offload_optimizer,
            self.network_dtype(name),
            self.root_device.type,
            sum(p.numel() for group in groups for p in group),
            self.overrides,
        )
        engine, _, _, _ = deepspeed.initialize(
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
        # DeepSpeed's group is a clone of the world's, with torch's own timeout
        engine.data_parallel_group.set_timeout(self.timeout)
        self.engines[name] = engine
        self.layouts[name] = engine_layout(network, groups)
        return EngineOptimizer(name, engine, optimizer)

    def teardown(self) -> None:
        """Take the engines apart; the networks stay usable."""
        for engine in self.engines.values():
            engine.module_forward_pre_hook.remove()
            engine.module_forward_post_hook.remove()
            engine.destroy()
        self.engines.clear()
        super().teardown()


def require_deepspeed() -> None:
    """Check that DeepSpeed lets the module decide when to step.

    Raises:
        ImportError: If it does not: older versions ignore the setting and step wrongly.
    """
    from deepspeed import DeepSpeedEngine, __version__

    if not hasattr(DeepSpeedEngine, "managed_gradient_accumulation"):
        raise ImportError(
            f"deepspeed: expected 0.19.8 or newer, got {__version__}: pip install -U deepspeed"
        )
