"""An optimizer whose step is its DeepSpeed engine's, and the precision plugin that routes to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class EngineOptimizer(Optimizer):
    """A module's optimizer, stepped by the DeepSpeed engine that partitions its state.

    Its parameter groups are those of the module's optimizer, where learning-rate schedules act;
    their `params` are this rank's flat fp32 partitions.

    Lightning wraps optimizers in objects that inherit their class but hold none of their state, so
    methods here may also run on such a wrapper: they read attributes and never set any.

    Args:
        name: The network's attribute name in the LightningModule.
        engine: Its engine, built with `optimizer`.
        optimizer: What `configure_optimizers` returned.
    """

    def __init__(self, name: str, engine: DeepSpeedEngine, optimizer: Optimizer) -> None:
        # no super().__init__(): groups and state stay the wrapped optimizer's, shared here
        self.name = name
        self.engine = engine
        self.optimizer = optimizer
        self.defaults = optimizer.defaults
        self.share_state()

    def share_state(self) -> None:
        """Point at the wrapped optimizer's groups and state (loading a state replaces both)."""
        self.param_groups = self.optimizer.param_groups
        self.state = self.optimizer.state

    def step(self, closure: Callable[[], object] | None = None) -> object:  # type: ignore[override]
        """Run `closure`, then the engine's step: clip, update, gather the weights, clear gradients.

        Raises:
            RuntimeError: If there was no backward since the last step.
        """
        result = None if closure is None else closure()
        if not has_gradients(self.engine):
            raise RuntimeError(
                f"optimizer of {self.name!r}: step without a backward for this optimizer; call "
                "lit_rlhf.strategies.backward(module, loss, optimizer) first"
            )
        self.engine.step()
        self.clip_next_step(None)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all of the engine's gradients, partitioned and accumulated ones included."""
        drop_gradients(self.engine)

    def clip_next_step(self, max_norm: float | None) -> None:
        """Clip the gradient of the next step to an L2 norm of at most `max_norm`."""
        self.engine.optimizer.clip_grad = 0.0 if max_norm is None else float(max_norm)

    @property
    def grad_norm(self) -> Tensor:
        """L2 norm before clipping of the last step's gradient, 0-dim float32; inf if not finite."""
        return torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float32).detach()

    @property
    def step_was_applied(self) -> bool:
        """Whether the last step updated weights: an engine skips non-finite gradients."""
        return bool(self.engine.was_step_applied())

    def state_dict(self) -> dict[str, Any]:
        """Settings of each group and what is not partitioned; partitions go to shards."""
        return {
            "param_groups": [
                {key: value for key, value in group.items() if key != "params"}
                for group in self.param_groups
            ],
            "unpartitioned": [
                {k: v for k, v in state.items() if not is_partitioned(v, master)}
                for master, state in group_states(self)
            ],
        }


def as_engine_optimizer(optimizer: object) -> EngineOptimizer | None:
    """The optimizer, or Lightning's wrapper of it, if an engine steps it; else `None`."""
    return optimizer if isinstance(optimizer, EngineOptimizer) else None


def group_states(optimizer: EngineOptimizer) -> list[tuple[Tensor, dict[str, Any]]]:
    """This rank's flat fp32 partition and its optimizer state, for each parameter group."""
    groups = optimizer.optimizer.param_groups
    state = optimizer.optimizer.state
    # .get: indexing would make an empty entry, which optimizers take for an initialized state
    return [(group["params"][0], state.get(group["params"][0], {})) for group in groups]


def is_partitioned(value: object, master: Tensor) -> bool:
    """Whether an entry of an optimizer's state has one element per element of the partition."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == master.shape


def has_gradients(engine: DeepSpeedEngine) -> bool:
    """Whether an engine was given a gradient since its last step."""
    return bool(engine.optimizer.micro_step_id >= 0)


def drop_gradients(engine: DeepSpeedEngine) -> None:
    """Forget every gradient an engine holds, so that an update can be abandoned half-way.

    ZeRO's own zero_grad leaves what earlier backwards accumulated, and there is no public call for
    it; a test names the attributes used here.
    """
    zero = engine.optimizer
    zero.zero_grad()
    zero.averaged_gradients.clear()
    zero.all_grad_tensors.clear()
    zero.micro_step_id = -1
    zero.ready_for_gradients = False
    if zero.cpu_offload:
        zero.reset_cpu_buffers()
        zero._offload_accumulated_param_ids.clear()


def ignore_gradients(engine: DeepSpeedEngine, ignore: bool) -> None:
    """Have an engine's hooks do nothing while a backward that is not its own runs through.

    They fire even for parameters that receive no gradient. The switch is that of DeepSpeed's
    coalesce_grad_reduction, which itself insists on managing the accumulation; a test names it.
    """
    engine.optimizer._coalesce_grad_reduction = ignore


def engine_of(optimizer: Steppable | None) -> DeepSpeedEngine:
    """The engine behind an optimizer.

    Raises:
        ValueError: If none or a foreign optimizer was given.
    """
    engine_optimizer = as_engine_optimizer(optimizer)
    if engine_optimizer is None:
        raise ValueError(
            "optimizer: expected one of the module's, got "
            f"{type(optimizer).__name__}. With one DeepSpeed engine per optimizer, backward must "
            "know which: call lit_rlhf.strategies.backward(module, loss, optimizer) or "
            "trainer.strategy.backward(loss, optimizer) where you called manual_backward(loss)"
        )
    return engine_optimizer.engine


class EnginePrecision(DeepSpeedPrecision):
    """Lightning's DeepSpeed precision for several engines: each call goes to its optimizer's."""

    def backward(  # type: ignore[override]
        self,
        tensor: Tensor,
        model: LightningModule,
        optimizer: Steppable | None,
        *args: object,
        **kwargs: object,
    ) -> None:
        """Accumulate the gradient of `tensor` in the engine of `optimizer`."""
        engine = engine_of(optimizer)
        # Networks are called directly, not through their engines, whose forward would reset this;
        # left at True, CPU offload loses gradients of networks larger than a bucket.
        engine.optimizer.set_gradient_accumulation_boundary(False)
        engine.backward(tensor, *args, **kwargs)

    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Steppable,
        model: LightningModule,
        closure: Callable[[], object],
        **kwargs: object,
    ) -> object:
        """Run the hooks and step as for any optimizer, here the engine's."""
        return Precision.optimizer_step(self, optimizer, model=model, closure=closure, **kwargs)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Have the next step clip by the network's own norm (`LightningModule.clip_gradients`).

        Raises:
            ValueError: For clipping by value, which partitioned gradients do not offer.
        """
        if gradient_clip_algorithm != GradClipAlgorithmType.NORM:
            raise ValueError(
                f"gradient_clip_algorithm: expected 'norm', got {gradient_clip_algorithm!r}"
            )
        if clip_val > 0:
            engine_of(optimizer).optimizer.clip_grad = float(clip_val)
