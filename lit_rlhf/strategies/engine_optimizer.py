"""The optimizer that steps through its DeepSpeed engine, and the precision plugin that calls it.

Some calls below reach into DeepSpeed's `DeepSpeedZeroOptimizer`, because it has no public calls
for this. `tests/distributed/test_multi_engine.py` checks that each attribute used here exists. All
remarks on DeepSpeed are about version 0.19.8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

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

    It shares its parameter groups with the wrapped optimizer, so learning-rate schedules act on it;
    their `params` are this rank's flat float32 partitions.

    Lightning wraps each optimizer in a `LightningOptimizer` that inherits this class but has none
    of its state, so a method may run on such a wrapper: methods that Lightning or users call read
    attributes of `self` and set none.

    Args:
        name: Name of the network, an attribute of the module.
        engine: The network's engine.
        optimizer: The optimizer that the engine was built with.
    """

    def __init__(self, name: str, engine: DeepSpeedEngine, optimizer: Optimizer) -> None:
        # `super().__init__()` would make its own groups and state
        self.name = name
        self.engine = engine
        self.optimizer = optimizer
        self.defaults = optimizer.defaults
        self.share_state()

    def share_state(self) -> None:
        """Refer to the wrapped optimizer's groups and state, which loading a state replaces."""
        self.param_groups = self.optimizer.param_groups
        self.state = self.optimizer.state

    def step(self, closure: Callable[[], object] | None = None) -> object:  # type: ignore[override]
        """Run `closure`, then the engine's step: clip, update, gather weights, clear gradients."""
        loss = None if closure is None else closure()
        # ZeRO counts a step's backwards from 0, and sets -1 in `step`
        if self.engine.optimizer.micro_step_id < 0:
            raise RuntimeError(
                f"optimizer of {self.name!r}: step without a backward for this optimizer; call "
                "lit_rlhf.strategies.backward(module, loss, optimizer) first"
            )
        self.engine.step()
        self.clip_next_step(None)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all of the engine's gradients, so that an update can be abandoned half-way.

        ZeRO's own `zero_grad` leaves sums over the backwards since the last step.
        """
        zero = self.engine.optimizer
        zero.zero_grad()  # stage 1 has its sums here
        zero.all_grad_tensors.clear()  # stage 2 in float32
        zero.averaged_gradients.clear()  # stage 2 in bfloat16
        # the number of the last backward since the step, from 0; at 0 or below, offloading
        # overwrites its sums
        zero.micro_step_id = -1
        zero.ready_for_gradients = False  # else stage 1 does not count the next backward
        if zero.cpu_offload:
            zero.reset_cpu_buffers()  # waits for copies that are under way
            # these parameters have sums in CPU memory: one that the next backward does not reach
            # would step with its old sum
            zero._offload_accumulated_param_ids.clear()

    def clip_next_step(self, max_norm: float | None) -> None:
        """Clip the gradient of the next step to an L2 norm; `None` for no clipping."""
        self.engine.optimizer.clip_grad = 0.0 if max_norm is None else float(max_norm)

    @property
    def grad_norm(self) -> Tensor:
        """L2 norm of the last step's gradient before clipping, 0-dim; inf if it was not finite."""
        # DeepSpeed 0.19.8 stores a number of Python instead of a tensor when it skips a step
        norm = self.engine.get_global_grad_norm()
        return torch.as_tensor(norm, dtype=torch.float32, device=self.engine.device).detach()

    def state_dict(self) -> dict[str, Any]:
        """The settings of each group and the step counts. Partitions are saved in shards."""
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


class GroupState(NamedTuple):
    """A rank's share of a parameter group.

    Attributes:
        master: The rank's flat partition of the master weights, float32.
        state: Its optimizer state by name.
    """

    master: Tensor
    state: dict[str, Any]


def group_states(optimizer: EngineOptimizer) -> list[GroupState]:
    """This rank's share of each parameter group."""
    groups = optimizer.optimizer.param_groups
    state = optimizer.optimizer.state
    # Do not index `state`: that would make an empty entry, which optimizers take for an initialized
    # state.
    return [GroupState(group["params"][0], state.get(group["params"][0], {})) for group in groups]


def is_partitioned(value: object, master: Tensor) -> bool:
    """Whether an entry `value` of an optimizer's state has the shape of the partition `master`."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == master.shape


def ignore_gradients(engine: DeepSpeedEngine, ignore: bool) -> None:
    """Switch an engine's gradient hooks off or on, around another engine's backward.

    ZeRO hooks the gradient accumulation of each parameter. The hook runs whenever a graph goes
    through the parameter, even if the parameter does not require a gradient. Then it finds none and
    fails. `DeepSpeedEngine.coalesce_grad_reduction` sets the same switch, but it needs
    `managed_gradient_accumulation`.

    Args:
        engine: The engine.
        ignore: Whether to switch its hooks off.
    """
    engine.optimizer._coalesce_grad_reduction = ignore


def _engine_of(optimizer: object) -> DeepSpeedEngine:
    """The engine that steps an optimizer of the module."""
    if not isinstance(optimizer, EngineOptimizer):
        raise ValueError(
            f"optimizer: expected one of the module's, got {type(optimizer).__name__}. With one "
            "DeepSpeed engine per optimizer a backward must say which: call "
            "lit_rlhf.strategies.backward(module, loss, optimizer) instead of manual_backward(loss)"
        )
    return optimizer.engine


class EnginePrecision(DeepSpeedPrecision):
    """Lightning's DeepSpeed precision for several engines: calls go to the optimizer's engine."""

    def backward(  # type: ignore[override]
        self,
        tensor: Tensor,
        model: LightningModule,
        optimizer: Steppable | None,
        *args: object,
        **kwargs: object,
    ) -> None:
        """Accumulate a gradient in the engine of an optimizer.

        Args:
            tensor: The loss, 0-dim.
            model: The module.
            optimizer: The optimizer whose engine accumulates.
            *args: Positional arguments of the engine's `backward`.
            **kwargs: Keyword arguments of the engine's `backward`.
        """
        engine = _engine_of(optimizer)
        # `step` leaves this switch at True. An engine's own forward would set it back, but networks
        # are called directly here. At True, CPU offload takes each backward for the last one before
        # a step, and loses gradients of networks that are larger than a bucket.
        engine.optimizer.set_gradient_accumulation_boundary(False)
        engine.backward(tensor, *args, **kwargs)

    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Steppable,
        model: LightningModule,
        closure: Callable[[], object],
        **kwargs: object,
    ) -> object:
        """Run Lightning's hooks and `optimizer.step(closure)`, not a step of `model`.

        Args:
            optimizer: The optimizer.
            model: The module.
            closure: Run before the step.
            **kwargs: Options of the step.

        Returns:
            What the closure returned.
        """
        return Precision.optimizer_step(self, optimizer, model=model, closure=closure, **kwargs)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Let the next step clip by the network's norm, for `LightningModule.clip_gradients`.

        Args:
            optimizer: The optimizer of an engine.
            clip_val: Largest L2 norm; 0 for no clipping.
            gradient_clip_algorithm: Only `norm` is supported.
        """
        if gradient_clip_algorithm != GradClipAlgorithmType.NORM:
            raise ValueError(
                f"gradient_clip_algorithm: expected 'norm', got {gradient_clip_algorithm!r}"
            )
        if clip_val > 0:
            _engine_of(optimizer).optimizer.clip_grad = float(clip_val)
