"""What a `CollapseDetector` does about a verdict, from mild to strong."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lit_callbacks.levels import Level
from lit_callbacks.text import number_text
from lit_callbacks.verdict import Verdict

RATES = {
    "lr",
    "initial_lr",
    "max_lr",
    "min_lr",
}  # of an optimizer's group; the last two: OneCycleLR
SCHEDULE_RATES = {"base_lrs", "max_lrs"}  # of a schedule; the second: CyclicLR


class Action:
    """Does something when the verdict reaches a level, and again while it stays there.

    Subclasses write `act`. An action keeps all that changes in `state_dict`.

    Args:
        level: `suspicious` or `collapsed`: the level from which it acts.
        cooldown: records from one act to the next while the level lasts. Once the level was left,
            the next time counts as new.

    Raises:
        ValueError: for another level, or a cooldown below 1.
    """

    starts_over: ClassVar[bool] = False
    """Whether what the monitors saw last is of no use once it has acted."""

    def __init__(self, level: str = "collapsed", cooldown: int = 10) -> None:
        self.level = Level.named("level", level)
        if self.level is Level.HEALTHY:
            raise ValueError("level: expected suspicious or collapsed, got 'healthy'")
        if cooldown < 1:
            raise ValueError(f"cooldown: expected at least 1 record, got {cooldown}")
        self.cooldown = cooldown
        self._last: int | None = None

    def check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise before training starts if this action cannot work with the module."""

    def on_record(self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict) -> None:
        """Called after every record, on every rank, before any action acts."""

    def due(self, verdict: Verdict) -> bool:
        """Whether to act on `verdict`; takes note of it."""
        if verdict.level < self.level:
            self._last = None
            return False
        if self._last is not None and verdict.record - self._last < self.cooldown:
            return False
        self._last = verdict.record
        return True

    def act(self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict) -> str:
        """Do it, on every rank, and return in words what was done; empty for nothing."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """All that changes, as plain values."""
        return {"last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._last = state["last"]


class LogVerdict(Action):
    """Write the verdict to Lightning's log, at level INFO, by the process of rank 0."""

    def __init__(self, level: str = "suspicious", cooldown: int = 10) -> None:
        super().__init__(level, cooldown)

    def act(self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict) -> str:
        """Log it."""
        rank_zero_info(f"record {verdict.record}, {verdict.level.word}: {verdict.sentence}")
        return ""


class WarnOfVerdict(Action):
    """Give the verdict as a Python warning, by the process of rank 0."""

    def act(self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict) -> str:
        """Warn of it."""
        rank_zero_warn(f"record {verdict.record}, {verdict.level.word}: {verdict.sentence}")
        return ""


class AdjustCoefficient(Action):
    """Multiply a coefficient of the module, within bounds.

    It only ever moves the coefficient the way that `factor` says: one that is above `upper` is not
    raised, and not lowered either. A resumed run goes on with what was set: a buffer is in the
    checkpoint, another number is set again when training starts.

    Args:
        name: attribute of the module (a number, or a tensor with one element such as a buffer), or
            one of its hyper-parameters.
        factor: what it is multiplied by, above 1 to raise it.
        lower: the result is at least this; with a factor above 1 this is how a coefficient of 0
            is raised at all.
        upper: the result is at most this.
        level: `suspicious` or `collapsed`: the level from which it acts.
        cooldown: records from one act to the next while the level lasts.

    Raises:
        ValueError: for a factor that is not positive or is 1, or bounds in the wrong order.
    """

    def __init__(
        self,
        name: str,
        factor: float,
        lower: float = 0.0,
        upper: float = math.inf,
        level: str = "suspicious",
        cooldown: int = 10,
    ) -> None:
        super().__init__(level, cooldown)
        if not (math.isfinite(factor) and factor > 0 and factor != 1):
            raise ValueError(f"factor: expected a positive number other than 1, got {factor}")
        if not lower <= upper:
            raise ValueError(f"lower, upper: expected lower <= upper, got {lower} and {upper}")
        self.name, self.factor, self.lower, self.upper = name, factor, lower, upper
        self._value: float | None = None  # what was set last
        self._resumed = False

    def check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise if the module has no such coefficient; set it again after a resume."""
        read_coefficient(pl_module, self.name)
        declared = getattr(type(pl_module), self.name, None)
        if isinstance(declared, property) and declared.fset is None:
            raise ValueError(f"name: expected a coefficient to set, got property {self.name!r}")
        if self._resumed and self._value is not None and self.name not in pl_module.state_dict():
            write_coefficient(pl_module, self.name, self._value)
        self._resumed = False

    def act(self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict) -> str:
        """Change it."""
        old = read_coefficient(pl_module, self.name)
        new = min(max(old * self.factor, self.lower), self.upper)
        if (new - old) * (self.factor - 1) <= 0:
            return ""
        write_coefficient(pl_module, self.name, new)
        new = read_coefficient(pl_module, self.name)  # a buffer rounds: it may be as it was
        if new == old:
            return ""
        self._value = new
        verb = "raised" if new > old else "lowered"
        return f"{verb} {self.name} from {number_text(old)} to {number_text(new)}"

    def state_dict(self) -> dict[str, Any]:
        """All that changes, as plain values."""
        return {**super().state_dict(), "value": self._value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        super().load_state_dict(state)
        self._value, self._resumed = state["value"], True


class AdjustLearningRate(Action):
    """Multiply the learning rate of every optimizer, its schedule included.

    Args:
        factor: what it is multiplied by, from 0 to below 1.
        times: how often at most.
        level: `suspicious` or `collapsed`: the level from which it acts.
        cooldown: records from one act to the next while the level lasts.

    Raises:
        ValueError: for an argument out of range.
    """

    def __init__(
        self,
        factor: float = 0.5,
        times: int = 3,
        level: str = "suspicious",
        cooldown: int = 10,
    ) -> None:
        super().__init__(level, cooldown)
        if not 0 < factor < 1:
            raise ValueError(f"factor: expected a number between 0 and 1, got {factor}")
        if times < 1:
            raise ValueError(f"times: expected at least 1, got {times}")
        self.factor, self.times, self.done = factor, times, 0

    def act(self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict) -> str:
        """Change it."""
        if self.done >= self.times:
            return ""
        self.done += 1
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                for key in RATES & group.keys():
                    group[key] = group[key] * self.factor
        for config in trainer.lr_scheduler_configs:
            # Schedules compute from what they noted at their start.
            state = config.scheduler.state_dict()
            scale_rates(state, self.factor)
            config.scheduler.load_state_dict(state)
        return f"multiplied the learning rates by {number_text(self.factor)}"

    def state_dict(self) -> dict[str, Any]:
        """All that changes, as plain values."""
        return {**super().state_dict(), "done": self.done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        super().load_state_dict(state)
        self.done = state["done"]


class StopTraining(Action):
    """End the fit after the current batch, as `EarlyStopping` does."""

    def act(self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict) -> str:
        """Ask the trainer to stop."""
        trainer.should_stop = True
        return "stopped training"


def scale_rates(state: object, factor: float) -> None:
    """Scale the learning rates that a schedule starts from, and the schedules in it.

    Args:
        state: `state_dict()` of a schedule, changed in place.
        factor: what the learning rates are multiplied by.
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


def _holder(module: LightningModule, name: str) -> MutableMapping[str, Any] | None:
    """The hyper-parameters if they hold `name`; None where the module itself does.

    Raises:
        ValueError: where neither does.
    """
    if hasattr(module, name):
        return None
    hparams: MutableMapping[str, Any] = module.hparams
    if name in hparams:
        return hparams
    own = {k: v for k, v in vars(module).items() if not k.startswith("_")}
    numbers = {k for k, v in {**hparams, **own}.items() if isinstance(v, float)}
    numbers |= {k for k, v in module.named_buffers(recurse=False) if v.numel() == 1}
    raise ValueError(
        f"name: expected a coefficient of {type(module).__name__}, got {name!r}; "
        f"it has {', '.join(sorted(numbers)) or 'none'}"
    )


def read_coefficient(module: LightningModule, name: str) -> float:
    """The value of a coefficient of `module`, an attribute or a hyper-parameter.

    Raises:
        ValueError: if there is none of that name (it lists those there are), or it is no number.
    """
    holder = _holder(module, name)
    value = getattr(module, name) if holder is None else holder[name]
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise ValueError(f"name: expected {name!r} to be a number, got {type(value).__name__}")


def write_coefficient(module: LightningModule, name: str, value: float) -> None:
    """Set a coefficient of `module`; the arguments are those of `read_coefficient`."""
    holder = _holder(module, name)
    if holder is not None:
        holder[name] = value
        return
    current = getattr(module, name)
    if isinstance(current, torch.Tensor):
        with torch.no_grad():
            current.fill_(value)
    else:
        setattr(module, name, value)
