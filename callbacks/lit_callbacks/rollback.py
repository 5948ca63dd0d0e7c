"""Going back to the last healthy weights, and on from there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lit_callbacks.actions import Action
from lit_callbacks.levels import Level
from lit_callbacks.verdict import Verdict


class RollBack(Action):
    """Put weights and optimizers back to where all was healthy, and train on with new data.

    Every few records, while the verdict is healthy, it saves a checkpoint. On a collapse it
    restores the last one; a second collapse before the next saving goes to the one before that, and
    the next saving is as many records after a way back as it is after another saving.
    The trainer's counters, the data and the schedules of the learning rates move on, so that the
    run ends when it would have ended. After `times` it stops training instead.

    Put it before actions that change coefficients, so that what they set is not put back.

    Args:
        times: how often to go back at most.
        every_n_records: records between two checkpoints.
        keep: names in the module's `state_dict` (the ends of keys) that are not put back, for
            instance a coefficient that another action adjusts, or a counter that is an x axis.
        folder: where the checkpoints go; by default `healthy/` in the run's log folder.
        level: `suspicious` or `collapsed`: the level from which it acts.
        cooldown: records from one act to the next while the level lasts.

    Raises:
        ValueError: for an argument out of range.
    """

    KEPT = 3  # checkpoints on disk
    starts_over = True

    def __init__(
        self,
        times: int = 3,
        every_n_records: int = 5,
        keep: list[str] | None = None,
        folder: str | None = None,
        level: str = "collapsed",
        cooldown: int = 10,
    ) -> None:
        super().__init__(level, cooldown)
        for argument, value in (("times", times), ("every_n_records", every_n_records)):
            if value < 1:
                raise ValueError(f"{argument}: expected at least 1, got {value}")
        self.times, self.every_n_records = times, every_n_records
        self.keep = list(keep or [])
        self.folder = folder
        self.done = 0
        self.saved: list[tuple[int, str]] = []
        """Records and paths of the checkpoints there are, oldest first."""
        self._restored = ""  # path of the checkpoint of the last way back
        self._since = 0  # record of the last saving or way back

    def check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise if a name to keep is not in the module's state."""
        names = list(pl_module.state_dict())
        for name in self.keep:
            if not any(_is_named(key, name) for key in names):
                raise ValueError(
                    f"keep: expected names in the state of {type(pl_module).__name__}, got {name!r}"
                )

    def on_record(self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict) -> None:
        """Save a checkpoint if it is time to and all is healthy."""
        if verdict.level is not Level.HEALTHY:
            return
        if self.saved and verdict.record - self._since < self.every_n_records:
            return
        folder = Path(self.folder or Path(trainer.log_dir or trainer.default_root_dir) / "healthy")
        path = folder / f"record={verdict.record}.ckpt"
        trainer.save_checkpoint(path, weights_only=False)
        self.saved.append((verdict.record, str(path)))
        self._since = verdict.record
        while len(self.saved) > self.KEPT:
            trainer.strategy.remove_checkpoint(self.saved.pop(0)[1])

    def act(self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict) -> str:
        """Go back, or stop if there is nothing to go back to or no more time for it."""
        if not self.saved or self.done >= self.times:
            trainer.should_stop = True
            why = "was nothing to go back to" if not self.saved else "were no more ways back"
            return f"stopped training: there {why}"
        if self._restored == self.saved[-1][1] and len(self.saved) > 1:
            trainer.strategy.remove_checkpoint(self.saved.pop()[1])  # it led to a collapse again
        record, path = self.saved[-1]
        restore(trainer, pl_module, path, self.keep)
        self._restored, self._since = path, verdict.record
        self.done += 1
        return f"went back to the weights of record {record} ({self.done} of {self.times} times)"

    def state_dict(self) -> dict[str, Any]:
        """All that changes, as plain values."""
        saved = [list(item) for item in self.saved]
        own = {"done": self.done, "saved": saved, "restored": self._restored}
        return {**super().state_dict(), **own, "since": self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; checkpoints that are no longer there are forgotten."""
        super().load_state_dict(state)
        self.done, self._restored, self._since = state["done"], state["restored"], state["since"]
        self.saved = [(record, path) for record, path in state["saved"] if Path(path).exists()]


def restore(trainer: Trainer, pl_module: LightningModule, path: str, keep: list[str]) -> None:
    """Load weights and optimizers from a checkpoint in the middle of a fit.

    Gradients that were not stepped on yet are dropped: they are of the weights that go.

    Args:
        trainer: its counters and what its optimizers are set to (learning rates, which schedules
            change) stay as they are.
        pl_module: the module under training.
        path: of a checkpoint that `trainer.save_checkpoint` wrote.
        keep: ends of keys of the module's `state_dict` that stay as they are.
    """
    state = pl_module.state_dict()
    kept = {k: v.clone() for k, v in state.items() if any(_is_named(k, name) for name in keep)}
    settings = [dict(group) for optimizer in trainer.optimizers for group in optimizer.param_groups]
    strategy = trainer.strategy
    # The run's own file; hyper-parameters in it may be objects of any class.
    checkpoint = strategy.load_checkpoint(path, weights_only=False)
    pl_module.on_load_checkpoint(checkpoint)
    strategy.load_model_state_dict(checkpoint, strict=pl_module.strict_loading)
    if strategy.lightning_restore_optimizer:
        strategy.load_optimizer_state_dict(checkpoint)
    with torch.no_grad():
        for key, value in pl_module.state_dict().items():
            if key in kept:
                value.copy_(kept[key])
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    for group, setting in zip(groups, settings, strict=True):
        group.update({key: value for key, value in setting.items() if key != "params"})
    for optimizer in trainer.optimizers:
        optimizer.zero_grad()


def _is_named(key: str, name: str) -> bool:
    return key == name or key.endswith(f".{name}")
