"""Actions that keep weights from before a collapse, to end with them or to train on from them."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from inspect import signature
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy

from lit_callbacks.actions import Action, scale_learning_rates
from lit_callbacks.monitors import Level
from lit_callbacks.trainer_attributes import is_dry_run
from lit_callbacks.verdict import GRAVE, Trouble, Verdict

OWN_NAME = re.compile(r"(weights_)?step=\d+\.ckpt")
HYPER_PARAMETERS = (
    LightningModule.CHECKPOINT_HYPER_PARAMS_KEY,
    LightningModule.CHECKPOINT_HYPER_PARAMS_NAME,
    LightningModule.CHECKPOINT_HYPER_PARAMS_TYPE,
)


class SavedWeights(NamedTuple):
    """A checkpoint that an action has saved.

    Attributes:
        step: Step of the verdict at which it was saved.
        name: Name of the file in the action's folder.
    """

    step: int
    name: str


class HealthyWeights(NamedTuple):
    """The newest checkpoint of a healthy step.

    Attributes:
        step: Step of the verdict at which it was saved.
        path: Path of the checkpoint.
    """

    step: int
    path: Path


class SavingAction(Action):
    """Base of actions that need weights from before a collapse: it saves healthy checkpoints.

    A step's metrics are measured before its update and its weights are saved after it, and a
    monitor waits for its patience. So a checkpoint counts once patience + 1 further steps (of the
    most patient monitor) were healthy. If one of them is not, it is deleted. Saves are at least
    that far apart.

    Checkpoints are read as tensors and plain data. Hyper-parameters of other types are left out; a
    module or callback that adds other objects has to allow their classes with
    `torch.serialization.add_safe_globals`.

    Args:
        every_n_steps: Number of steps between two saves while the verdict is healthy, at least 1.
        folder: Folder of the checkpoints; by default `healthy/` in the run's log folder.
        **options: Options of `Action`.
    """

    default_kinds: ClassVar[tuple[Trouble, ...]] = GRAVE
    N_KEPT = 3
    """Number of checkpoints on disk."""
    weights_only: ClassVar[bool] = False
    """Whether the checkpoints lack optimizers and counters."""

    def __init__(self, every_n_steps: int, folder: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps: expected at least 1, got {every_n_steps}")
        self.every_n_steps = every_n_steps
        self.folder = folder
        self.saved: list[SavedWeights] = []
        """The checkpoints on disk, oldest first."""
        self._since = 0  # step of the last restore
        self._saving = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget checkpoints that no longer exist."""
        folder = self._own_folder(trainer)
        self.saved = [saved for saved in self.saved if (folder / saved.name).exists()]

    def _own_folder(self, trainer: Trainer) -> Path:
        return Path(self.folder or Path(trainer.log_dir or trainer.default_root_dir) / "healthy")

    def newest(self, trainer: Trainer) -> HealthyWeights | None:
        """The newest healthy checkpoint; `None` without any."""
        if not self.saved:
            return None
        return HealthyWeights(self.saved[-1].step, self._own_folder(trainer) / self.saved[-1].name)

    def on_step(self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict) -> None:
        """Save a checkpoint if the verdict is healthy and the last save is long enough ago.

        Args:
            trainer: The Trainer.
            pl_module: Its module.
            verdict: The verdict on the step.
        """
        folder = self._own_folder(trainer)
        confirming = self._confirming_steps()
        if verdict.level is Level.DATA_CHANGED:
            return
        if verdict.level is not Level.HEALTHY:
            # saves are that far apart, so only the newest one can be unconfirmed
            if self.saved and verdict.step - self.saved[-1].step <= confirming:
                trainer.strategy.remove_checkpoint(folder / self.saved.pop().name)
            return
        last = max([self._since, *(saved.step for saved in self.saved[-1:])])
        if last and verdict.step - last < max(self.every_n_steps, confirming):
            return
        # Two actions may share the folder, and only one of them can use a file without optimizers.
        kind = "weights_" if self.weights_only else ""
        name = f"{kind}step={verdict.step}.ckpt"
        self._saving = True
        trainer.save_checkpoint(folder / name, weights_only=self.weights_only)
        self._saving = False
        self.saved.append(SavedWeights(verdict.step, name))
        while len(self.saved) > self.N_KEPT:
            trainer.strategy.remove_checkpoint(folder / self.saved.pop(0).name)

    def _confirming_steps(self) -> int:
        """Number of further healthy steps after which a checkpoint counts."""
        # A median of the latest values crosses a threshold later, by half of their number.
        return 1 + max((m.patience + m.smoothing // 2 for m in self.monitors), default=0)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remove hyper-parameters that `weights_only=True` would refuse from its checkpoints."""
        hparams = {key: checkpoint[key] for key in HYPER_PARAMETERS if key in checkpoint}
        if self._saving and not _is_plain(hparams):
            for key in hparams:
                del checkpoint[key]

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values."""
        saved = [list(weights) for weights in self.saved]
        return {**super().state_dict(), "saved": saved, "since": self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        super().load_state_dict(state)
        self._since = state["since"]
        # The action reads and deletes these files. A forged checkpoint could name any path, so take
        # only names that the action gives itself.
        self.saved = [
            SavedWeights(step, name) for step, name in state["saved"] if OWN_NAME.fullmatch(name)
        ]


class StopTraining(SavingAction):
    """End the fit after the current batch, as Lightning's `EarlyStopping` does.

    Until then it saves the weights of healthy steps, so that a run that collapses leaves a model:
    `find_collapse` names the newest. A Trainer without checkpoints (`enable_checkpointing=False`)
    gets none here either.

    Args:
        every_n_steps: Number of steps between two saves while the verdict is healthy, at least 1.
        **options: Options of `SavingAction`.
    """

    weights_only = True

    def __init__(self, every_n_steps: int = 10, **options: Any) -> None:
        super().__init__(every_n_steps, **options)

    def on_step(self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict) -> None:
        """Save the weights if it is time and the Trainer keeps checkpoints at all.

        Args:
            trainer: The Trainer.
            pl_module: Its module.
            verdict: The verdict on the step.
        """
        if trainer.checkpoint_callbacks and not is_dry_run(trainer):
            super().on_step(trainer, pl_module, verdict)

    def act(self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict) -> str:
        """Ask the Trainer to stop, see `Action.act`.

        Args:
            trainer: The Trainer.
            pl_module: Its module.
            verdict: The verdict on the step.
        """
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
        times: Largest number of restores, at least 1.
        every_n_steps: Number of steps between two saves while the verdict is healthy, at least 1.
        keep: Names in the module's `state_dict` (ends of keys) that are not restored, for example a
            coefficient that another action adjusts, or a counter that is an x axis.
        lr_factor: Factor of all learning rates after a restore, above 0 and at most 1. The rates
            that led to a collapse often lead to the next.
        **options: Options of `SavingAction`.
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
        self.times = times
        self.lr_factor = lr_factor
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
        """Restore a checkpoint; stop training if there is none, or `times` is used up.

        Args:
            trainer: The Trainer.
            pl_module: Its module.
            verdict: The verdict on the step.

        Returns:
            What was done, in words.
        """
        if not self.saved or self.done >= self.times:
            trainer.should_stop = True
            why = "there was no checkpoint" if not self.saved else "no roll-back was left"
            return f"stopped training: {why}"
        folder = self._own_folder(trainer)
        # a run from the newest checkpoint has collapsed again: it was too near to the collapse
        if self._restored == self.saved[-1].name and len(self.saved) > 1:
            trainer.strategy.remove_checkpoint(folder / self.saved.pop().name)
        saved = self.saved[-1]
        restore(trainer, pl_module, folder / saved.name, keep=self.keep)
        self._restored = saved.name
        self._since = verdict.step
        self.done += 1
        rates = "kept the learning rates"
        if self.lr_factor < 1:
            rates = scale_learning_rates(trainer, self.lr_factor)
        times = f"{self.done} of {self.times} times"
        return f"went back to the weights of {self.unit} {saved.step} ({times}) and {rates}"

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values."""
        return {**super().state_dict(), "done": self.done, "restored": self._restored}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        super().load_state_dict(state)
        self.done = state["done"]
        self._restored = state["restored"]


def restore(
    trainer: Trainer, pl_module: LightningModule, path: str | Path, *, keep: list[str]
) -> None:
    """Load weights and optimizers from a checkpoint in the middle of a fit, and drop gradients.

    The Trainer's counters and its optimizers' settings are not restored: schedules have changed the
    learning rates since.

    Args:
        trainer: The Trainer, in the middle of a fit.
        pl_module: Its module.
        path: Path of the checkpoint.
        keep: Names that are not restored: keys of the module's `state_dict`, or ends of keys after
            a dot.
    """
    state = pl_module.state_dict()
    current_values = {
        key: tensor.clone()
        for key, tensor in state.items()
        if any(_matches(key, name) for name in keep)
    }
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
            if key in current_values:
                value.copy_(current_values[key])
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
