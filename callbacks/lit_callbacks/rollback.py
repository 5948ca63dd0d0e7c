"""Actions that keep weights from before a collapse: to leave them, or to train on from there."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from inspect import signature
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy

from lit_callbacks.actions import Action, scale_learning_rates
from lit_callbacks.monitors import Level
from lit_callbacks.verdict import Verdict

OWN_NAME = re.compile(r"(weights_)?step=\d+\.ckpt")
HYPER_PARAMETERS = (
    LightningModule.CHECKPOINT_HYPER_PARAMS_KEY,
    LightningModule.CHECKPOINT_HYPER_PARAMS_NAME,
    LightningModule.CHECKPOINT_HYPER_PARAMS_TYPE,
)


class SavingAction(Action):
    """Base of actions that need weights from before a collapse: it saves healthy checkpoints.

    While the verdict is healthy, one is saved every `every_n_steps` steps to `folder`, by default
    `healthy/` in the run's log folder. A step's metrics are measured before its update and its
    weights are saved after it, and a monitor waits for its patience. So a checkpoint counts once
    patience + 1 further steps were healthy (of the most patient monitor); one that they contradict
    is deleted. Saves are at least that far apart.

    Checkpoints are read as tensors and plain data. Hyper-parameters of other types are left out; a
    module or callback that adds other objects has to allow their classes with
    `torch.serialization.add_safe_globals`.
    """

    KEPT = 3  # checkpoints on disk
    weights_only: ClassVar[bool] = False
    """Whether the checkpoints lack optimizers and counters."""

    def __init__(self, every_n_steps: int, folder: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps: expected at least 1, got {every_n_steps}")
        self.every_n_steps = every_n_steps
        self.folder = folder
        self.saved: list[tuple[int, str]] = []
        """Steps and names of the checkpoints on disk, oldest first."""
        self._since = 0  # step of the last restore
        self._saving = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget checkpoints that no longer exist."""
        folder = self._own_folder(trainer)
        self.saved = [(step, name) for step, name in self.saved if (folder / name).exists()]

    def _own_folder(self, trainer: Trainer) -> Path:
        return Path(self.folder or Path(trainer.log_dir or trainer.default_root_dir) / "healthy")

    def newest(self, trainer: Trainer) -> tuple[int, Path] | None:
        """Step and path of the newest healthy checkpoint; `None` without any."""
        if not self.saved:
            return None
        step, name = self.saved[-1]
        return step, self._own_folder(trainer) / name

    def on_step(self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict) -> None:
        """Save a checkpoint if the verdict is healthy and the last save is long enough ago."""
        folder, confirming = self._own_folder(trainer), self._confirming_steps()
        if verdict.level is Level.DATA_CHANGED:
            return
        if verdict.level is not Level.HEALTHY:
            # As saves are as far apart, this can only be the newest one.
            if self.saved and verdict.step - self.saved[-1][0] <= confirming:
                trainer.strategy.remove_checkpoint(folder / self.saved.pop()[1])
            return
        last = max([self._since, *(step for step, _ in self.saved[-1:])])
        if last and verdict.step - last < max(self.every_n_steps, confirming):
            return
        # Two actions may share the folder, and only one of them can use a file without optimizers.
        kind = "weights_" if self.weights_only else ""
        name = f"{kind}step={verdict.step}.ckpt"
        self._saving = True
        trainer.save_checkpoint(folder / name, weights_only=self.weights_only)
        self._saving = False
        self.saved.append((verdict.step, name))
        while len(self.saved) > self.KEPT:
            trainer.strategy.remove_checkpoint(folder / self.saved.pop(0)[1])

    def _confirming_steps(self) -> int:
        """Number of further healthy steps after which a checkpoint counts."""
        # A median of the latest values crosses a threshold later, by half of their number.
        return 1 + max((m.patience + m.smoothing // 2 for m in self.monitors), default=0)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave hyper-parameters that `weights_only=True` would refuse out of its checkpoints."""
        found = {key: checkpoint[key] for key in HYPER_PARAMETERS if key in checkpoint}
        if self._saving and not _is_plain(found):
            for key in found:
                del checkpoint[key]

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values."""
        saved = [list(item) for item in self.saved]
        return {**super().state_dict(), "saved": saved, "since": self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        # Its checkpoints are read and deleted, so names that the action would not give itself,
        # paths above all, are not taken from a checkpoint.
        super().load_state_dict(state)
        self._since = state["since"]
        self.saved = [(step, name) for step, name in state["saved"] if OWN_NAME.fullmatch(name)]


class StopTraining(SavingAction):
    """End the fit after the current batch, as Lightning's `EarlyStopping` does.

    Until then it saves the weights of healthy steps, so that a run that collapses leaves a model:
    `find_collapse` names the newest. A Trainer without checkpoints (`enable_checkpointing=False`)
    gets none here either.
    """

    weights_only = True

    def __init__(self, every_n_steps: int = 10, **options: Any) -> None:
        super().__init__(every_n_steps, **options)

    def on_step(self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict) -> None:
        """Save the weights if it is time and the Trainer keeps checkpoints at all."""
        # Lightning sets `fast_dev_run` without declaring it.
        if trainer.checkpoint_callbacks and not getattr(trainer, "fast_dev_run", False):
            super().on_step(trainer, pl_module, verdict)

    def act(self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict) -> str:
        """Ask the trainer to stop."""
        trainer.should_stop = True
        return "stopped training"


class RollBack(SavingAction):
    """Restore weights and optimizers of a healthy step, and train on with new data.

    A collapse restores the newest checkpoint that counts; a second collapse before the next one
    counts restores the one before it. The trainer's counters, the data and the learning-rate
    schedules move on, so that the run ends when it would have ended. The learning rates stay what
    they are, unless `lr_factor` lowers them. After `times` restores, it stops training instead.

    Put it before actions that change coefficients, so that it does not restore the old values.

    Args:
        times: Largest number of restores.
        keep: Names in the module's `state_dict` (ends of keys) that are not restored, for example a
            coefficient that another action adjusts, or a counter that is an x axis.
        lr_factor: Factor of all learning rates after a restore, above 0 and at most 1. The rates
            that led to a collapse often lead to the next.
    """

    clears_monitors = True

    def __init__(
        self,
        times: int = 3,
        every_n_steps: int = 5,
        keep: list[str] | None = None,
        lr_factor: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(every_n_steps, **options)
        if times < 1:
            raise ValueError(f"times: expected at least 1, got {times}")
        if not 0 < lr_factor <= 1:
            raise ValueError(f"lr_factor: expected above 0 and at most 1, got {lr_factor}")
        self.times, self.lr_factor = times, lr_factor
        self.keep = list(keep or [])
        self.done = 0
        self._restored = ""  # name of the checkpoint that was restored last

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the names to keep, and forget checkpoints that no longer exist."""
        super().on_train_start(trainer, pl_module)
        names = list(pl_module.state_dict())
        for name in self.keep:
            if not any(_matches(key, name) for key in names):
                raise ValueError(
                    f"keep: expected names in the state of {type(pl_module).__name__}, got {name!r}"
                )

    def act(self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict) -> str:
        """Restore a checkpoint; stop training if there is none, or `times` is used up."""
        if not self.saved or self.done >= self.times:
            trainer.should_stop = True
            why = "there was no checkpoint" if not self.saved else "no roll-back was left"
            return f"stopped training: {why}"
        folder = self._own_folder(trainer)
        # The newest checkpoint has already led to a collapse: it was too near to it.
        if self._restored == self.saved[-1][1] and len(self.saved) > 1:
            trainer.strategy.remove_checkpoint(folder / self.saved.pop()[1])
        step, name = self.saved[-1]
        restore(trainer, pl_module, folder / name, self.keep)
        self._restored, self._since = name, verdict.step
        self.done += 1
        rates = "kept the learning rates"
        if self.lr_factor < 1:
            rates = scale_learning_rates(trainer, self.lr_factor)
        times = f"{self.done} of {self.times} times"
        return f"went back to the weights of {self.unit} {step} ({times}) and {rates}"

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values."""
        return {**super().state_dict(), "done": self.done, "restored": self._restored}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        super().load_state_dict(state)
        self.done, self._restored = state["done"], state["restored"]


def restore(
    trainer: Trainer, pl_module: LightningModule, path: str | Path, keep: list[str]
) -> None:
    """Load weights and optimizers from a checkpoint in the middle of a fit, and drop gradients.

    The trainer's counters and its optimizers' settings (learning rates, which schedules change) are
    not restored, nor the keys of the module's `state_dict` that end in one of `keep`.
    """
    state = pl_module.state_dict()
    kept = {k: v.clone() for k, v in state.items() if any(_matches(k, name) for name in keep)}
    settings = [dict(group) for optimizer in trainer.optimizers for group in optimizer.param_groups]
    strategy = trainer.strategy
    checkpoint = _read_plain(strategy, path)
    pl_module.on_load_checkpoint(checkpoint)
    strategy.load_model_state_dict(checkpoint, strict=pl_module.strict_loading)
    # Strategies with engines restore their optimizers together with the weights.
    if strategy.lightning_restore_optimizer:
        strategy.load_optimizer_state_dict(checkpoint)
    with torch.no_grad():
        for key, value in pl_module.state_dict().items():
            if key in kept:
                value.copy_(kept[key])
    # An optimizer's state holds the learning rates of its time; the schedules have moved on.
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    for group, setting in zip(groups, settings, strict=True):
        group.update({key: value for key, value in setting.items() if key != "params"})
    for optimizer in trainer.optimizers:
        optimizer.zero_grad()


def _read_plain(strategy: Strategy, path: str | Path) -> dict[str, Any]:
    """Read a checkpoint as plain data, since the folder may hold files of another run."""
    if "weights_only" in signature(strategy.load_checkpoint).parameters:
        return strategy.load_checkpoint(path, weights_only=True)
    if Path(path).is_file():
        # Lightning before 2.6 unpickles any object, so torch has to accept the file first
        torch.load(path, map_location="meta", weights_only=True)
    return strategy.load_checkpoint(path)


def _is_plain(value: object) -> bool:
    """Whether `value` can be read with `weights_only=True`."""
    buffer = BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except pickle.UnpicklingError:
        return False
    return True


def _matches(key: str, name: str) -> bool:
    return key == name or key.endswith(f".{name}")
