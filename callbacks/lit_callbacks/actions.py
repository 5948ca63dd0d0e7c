"""Actions that a `CollapseDetector` takes on a verdict, from mild to strong."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass, replace
from inspect import isdatadescriptor
from typing import Any, ClassVar, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer

from lit_callbacks.monitors import Level, Monitor
from lit_callbacks.verdict import Trouble, Verdict
from lit_callbacks.words import format_number

GROUP_RATES = {"lr", "initial_lr", "max_lr", "min_lr"}
"""Learning rates in an optimizer's parameter group; OneCycleLR keeps the last two there."""
SCHEDULE_RATES = {"base_lrs", "max_lrs"}
"""Learning rates in a schedule's state; CyclicLR has the second."""


class Action:
    """Base class: acts when the verdict reaches a level, and again while it stays there.

    Subclasses implement `act` and keep everything that changes in `state_dict`.

    Args:
        level: Level from which the action acts, `suspicious` or `collapsed`.
        cooldown: Number of steps from one act to the next while the level lasts, at least 1.
        kinds: Kinds of trouble at which the action acts, among `broken`, `exploiting` and
            `monotonous`; see `Trouble`. By default all, but only the first two for an action that
            stops or rolls back. A verdict of no known kind, for instance of a metric of your own,
            counts as each.
    """

    default_kinds: ClassVar[tuple[Trouble, ...]] = tuple(Trouble)
    """Kinds of trouble at which the action acts by default."""

    clears_monitors: ClassVar[bool] = False
    """Whether the monitors' latest readings are void after the action."""

    monitors: Sequence[Monitor] = ()
    """The monitors behind the verdicts; the detector that takes the action sets them."""
    unit: str = "step"
    """Unit of a verdict's step (`step`, `epoch` or `validation`); the detector sets it too."""

    def __init__(
        self, level: str = "collapsed", cooldown: int = 10, kinds: list[str] | None = None
    ) -> None:
        self.level = Level.parse("level", level)
        if self.level is Level.HEALTHY:
            raise ValueError("level: expected suspicious or collapsed, got 'healthy'")
        if cooldown < 1:
            raise ValueError(f"cooldown: expected at least 1 step, got {cooldown}")
        self.cooldown = cooldown
        self.kinds = self.default_kinds if kinds is None else Trouble.parse("kinds", kinds)
        self._last: int | None = None  # step of the last act while the level has lasted

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before training starts; raises if the action cannot work with the module."""

    def on_step(self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict) -> None:
        """Called after every step, on every rank, before any action acts.

        Args:
            trainer: The Trainer.
            pl_module: Its module.
            verdict: The verdict on the step.
        """

    def respond(self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict) -> str | None:
        """Act if it is time.

        Args:
            trainer: The Trainer.
            pl_module: Its module.
            verdict: The verdict on the step.

        Returns:
            What `act` returned; `None` if it was not called.
        """
        if verdict.level < self.level or not verdict.is_one_of(self.kinds):
            self._last = None
            return None
        if self._last is not None and verdict.step - self._last < self.cooldown:
            return None
        self._last = verdict.step
        return self.act(trainer, pl_module, verdict)

    def act(self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict) -> str:
        """Act, on every rank.

        Args:
            trainer: The Trainer.
            pl_module: Its module.
            verdict: The verdict on the step.

        Returns:
            What was done, in words that are written beside the verdict; empty if nothing was.
        """
        raise NotImplementedError

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is written, with its content by key."""

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values."""
        return {"last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self._last = state["last"]


class AdjustCoefficient(Action):
    """Multiply a coefficient of the module, within bounds.

    The coefficient only ever moves in the direction of `factor`: a value that is already above
    `upper` is not raised, and not lowered either. A resumed run keeps the adjusted value: a buffer
    is part of the checkpoint, and any other number is set again when training starts.

    Args:
        name: Attribute of the module (a number, or a tensor with one element such as a buffer), one
            of its hyper-parameters, or, with a dot, a field of a dataclass of options that is an
            attribute of the module, for instance `loss.entropy_coef`.
        factor: Factor that it is multiplied by, positive and not 1; above 1 raises it.
        lower: Lower bound of the result, at most `upper`. With a factor above 1, this is how a
            coefficient of 0 is raised at all.
        upper: Upper bound of the result.
        level: Level from which the action acts, `suspicious` or `collapsed`.
        **options: Options of `Action`.
    """

    def __init__(
        self,
        name: str,
        factor: float,
        lower: float = 0.0,
        upper: float = math.inf,
        level: str = "suspicious",
        **options: Any,
    ) -> None:
        super().__init__(level, **options)
        if not (math.isfinite(factor) and factor > 0 and factor != 1):
            raise ValueError(f"factor: expected a positive number other than 1, got {factor}")
        if not lower <= upper:
            raise ValueError(f"lower, upper: expected lower <= upper, got {lower} and {upper}")
        self.name = name
        self.factor = factor
        self.lower = lower
        self.upper = upper
        self._value: float | None = None  # the last value that the action set
        self._resumed = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that the module has such a coefficient, and set it again in a resumed run."""
        read_coefficient(pl_module, self.name)
        declared = getattr(type(pl_module), self.name, None)
        if isinstance(declared, property) and declared.fset is None:
            raise ValueError(f"name: expected a coefficient to set, got property {self.name!r}")
        # Lightning restored a coefficient in the module's state, and it may have changed since.
        if self._resumed and self._value is not None and self.name not in pl_module.state_dict():
            write_coefficient(pl_module, self.name, self._value)
        self._resumed = False

    def act(self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict) -> str:
        """Multiply the coefficient, see `Action.act`.

        Args:
            trainer: The Trainer.
            pl_module: The module with the coefficient.
            verdict: The verdict on the step.
        """
        old = read_coefficient(pl_module, self.name)
        new = min(max(old * self.factor, self.lower), self.upper)
        if (new - old) * (self.factor - 1) <= 0:
            return ""
        write_coefficient(pl_module, self.name, new)
        new = read_coefficient(pl_module, self.name)  # a buffer rounds: it may be unchanged
        if new == old:
            return ""
        self._value = new
        verb = "raised" if new > old else "lowered"
        return f"{verb} {self.name} from {format_number(old)} to {format_number(new)}"

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values."""
        return {**super().state_dict(), "value": self._value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        super().load_state_dict(state)
        self._value = state["value"]
        self._resumed = True


class AdjustLearningRate(Action):
    """Multiply the learning rates of all optimizers and schedules.

    Args:
        factor: Factor of the rates, between 0 and 1.
        times: How often the action acts at most in a run, at least 1.
        level: Level from which the action acts, `suspicious` or `collapsed`.
        **options: Options of `Action`.
    """

    def __init__(
        self, factor: float = 0.5, times: int = 3, level: str = "suspicious", **options: Any
    ) -> None:
        super().__init__(level, **options)
        if not 0 < factor < 1:
            raise ValueError(f"factor: expected a number between 0 and 1, got {factor}")
        if times < 1:
            raise ValueError(f"times: expected at least 1, got {times}")
        self.factor = factor
        self.times = times
        self.done = 0

    def act(self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict) -> str:
        """Multiply the learning rates, see `Action.act`.

        Args:
            trainer: The Trainer whose optimizers and schedules change.
            pl_module: Its module.
            verdict: The verdict on the step.
        """
        if self.done >= self.times:
            return ""
        self.done += 1
        return scale_learning_rates(trainer, self.factor)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values."""
        return {**super().state_dict(), "done": self.done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        super().load_state_dict(state)
        self.done = state["done"]


def scale_learning_rates(trainer: Trainer, factor: float) -> str:
    """Multiply the learning rates of all optimizers and schedules by a positive factor.

    Returns:
        What was done, in words.
    """
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            for key in GROUP_RATES & group.keys():
                group[key] = group[key] * factor
    for config in trainer.lr_scheduler_configs:
        # A schedule computes each rate from the base rates that it saved at its start. It would
        # undo a change of the groups alone.
        state = config.scheduler.state_dict()
        scale_rates(state, factor)
        config.scheduler.load_state_dict(state)
    return f"multiplied the learning rates by {format_number(factor)}"


def scale_rates(state: object, factor: float) -> None:
    """Multiply the base rates in a schedule's `state_dict()` by `factor`, in place.

    Nested schedules are included.
    """
    if isinstance(state, dict):
        for key, value in state.items():
            if key in SCHEDULE_RATES:
                state[key] = [lr * factor for lr in value]
            else:
                scale_rates(value, factor)
    elif isinstance(state, list):
        for part in state:
            scale_rates(part, factor)


def read_coefficient(module: LightningModule, name: str) -> float:
    """The value of a coefficient of `module`, see `AdjustCoefficient`."""
    place = _find_coefficient(module, name)
    if isinstance(place.owner, MutableMapping):
        value = place.owner[place.name]
    else:
        value = getattr(place.owner, place.name)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise ValueError(f"name: expected {name!r} to be a number, got {type(value).__name__}")


def write_coefficient(module: LightningModule, name: str, value: float) -> None:
    """Set a coefficient of a module.

    Args:
        module: The module.
        name: Name of the coefficient, see `AdjustCoefficient`.
        value: Its new value.
    """
    place = _find_coefficient(module, name)
    owner = place.owner
    if isinstance(owner, MutableMapping):
        owner[place.name] = value
    elif is_dataclass(owner) and not isinstance(owner, type):
        # options are frozen: the module gets a new group
        setattr(module, name.partition(".")[0], replace(owner, **{place.name: value}))
    elif isinstance(current := getattr(owner, place.name), torch.Tensor):
        with torch.no_grad():
            current.fill_(value)
    else:
        setattr(owner, place.name, value)


class _Place(NamedTuple):
    """Location of a coefficient.

    Attributes:
        owner: The module, its hyper-parameters, or a group of options.
        name: Name of the coefficient there.
    """

    owner: Any
    name: str


def _find_coefficient(module: LightningModule, name: str) -> _Place:
    group, _, field = name.rpartition(".")
    attributes = {**_handed_on(module), **vars(module)}
    options = {key: value for key, value in attributes.items() if is_dataclass(value)}
    if group in options and field in {f.name for f in fields(options[group])}:
        return _Place(options[group], field)
    if hasattr(module, name):
        return _Place(module, name)
    hparams: MutableMapping[str, Any] = module.hparams
    if name in hparams:
        return _Place(hparams, name)
    values = {key: v for key, v in attributes.items() if not key.startswith("_")} | dict(hparams)
    values |= {f"{k}.{f.name}": getattr(v, f.name) for k, v in options.items() for f in fields(v)}
    numbers = {key for key, value in values.items() if isinstance(value, float)}
    tensors = {**attributes, **dict(module.named_buffers(recurse=False))}.items()
    numbers |= {k for k, v in tensors if isinstance(v, torch.Tensor) and v.numel() == 1}
    raise ValueError(
        f"name: expected a coefficient of {type(module).__name__}, got {name!r}; "
        f"it has {', '.join(sorted(numbers)) or 'none'}"
    )


def _handed_on(module: LightningModule) -> dict[str, Any]:
    """Attributes that a module's class hands on to a part of the module, by descriptors."""
    names = {
        name
        for cls in type(module).__mro__
        for name, value in vars(cls).items()
        if isdatadescriptor(value) and not isinstance(value, property) and name[0] != "_"
    }
    return {name: getattr(module, name) for name in sorted(names)}
