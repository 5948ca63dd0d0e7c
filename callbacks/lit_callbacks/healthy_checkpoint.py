"""The best checkpoint among those of a healthy policy."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lit_callbacks.detector import CollapseDetector
from lit_callbacks.levels import Level


class HealthyCheckpoint(ModelCheckpoint):
    """Keeps the best checkpoint by a metric, but none of a policy that cheats.

    A checkpoint can become one of the `save_top_k` best if

    - the metric and every bounded metric is finite, as logged last;
    - every bounded metric is within its bounds;
    - every `CollapseDetector` of the trainer judges the run as healthy. Lightning calls checkpoint
      callbacks last, so the judgement is the one of the same batch, wherever the detector stands.

    `last.ckpt` of the option `save_last` is no part of this: it may hold a policy that cheats.
    Lightning writes it beside a best one at epochs and validations, and every time with
    `every_n_train_steps`.

    Under manual optimization `every_n_train_steps` counts the steps of all optimizers and saves at
    the end of a batch only if the count can be divided by it there; a PPO iteration of four
    updates of two networks makes eight. Lightning then also warns that the checkpoint holds the
    weights after the step, which is what is wanted. To save within an epoch, validate within it
    (`val_check_interval`): without other options, checkpoints are saved after each validation.

    Args:
        monitor: key of the logged metric that the best is chosen by; see also `mode`.
        bounds: least and greatest value by key of a logged metric, `None` for no bound, for
            example ``{"rollout/kl": [None, 20.0]}``.
        **checkpoint_options: further arguments of Lightning's `ModelCheckpoint`.

    Raises:
        ValueError: without `monitor`, for bounds that are not two numbers in order, for a
            `save_top_k` below 1 (no best) and for `save_on_exception` (which could overwrite the
            best by what came after it); in fit for a bounded metric that nobody logged.
    """

    def __init__(
        self,
        monitor: str,
        bounds: dict[str, list[float | None]] | None = None,
        **checkpoint_options: Any,
    ) -> None:
        if not isinstance(monitor, str) or not monitor:
            raise ValueError(f"monitor: expected the key of a logged metric, got {monitor!r}")
        super().__init__(monitor=monitor, **checkpoint_options)
        if self.save_top_k < 1:
            raise ValueError(
                f"save_top_k: expected a number of best checkpoints of at least 1, got "
                f"{self.save_top_k}"
            )
        if self.save_on_exception:
            raise ValueError(
                "save_on_exception: expected False, as it saves whatever there is, got True"
            )
        self.bounds = {key: _checked_bounds(key, pair) for key, pair in (bounds or {}).items()}

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Whether to save, on which all ranks agree: healthy, and among the best.

        Args:
            trainer: the trainer.
            current: value of the monitored metric; `None` where it was not logged yet.

        Raises:
            ValueError: if a bounded metric was not logged; the error lists those that were.
        """
        if current is None:
            return False
        reason = self._why_not(trainer, current)
        # Without `sync_dist` metrics differ between ranks: one that refuses is enough.
        if not trainer.strategy.reduce_boolean_decision(reason is None):
            if self.verbose:
                rank_zero_info(f"not kept: {reason or 'another rank has a reason not to'}")
            return False
        return super().check_monitor_top_k(trainer, current)

    def _why_not(self, trainer: Trainer, current: Tensor) -> str | None:
        logged = trainer.callback_metrics
        missing = [key for key in self.bounds if key not in logged]
        if missing:
            raise ValueError(
                f"bounds: expected logged metrics, got {', '.join(missing)}; logged are "
                f"{', '.join(sorted(logged)) or 'none'}"
            )
        if not torch.isfinite(torch.as_tensor(current)):
            return f"{self.monitor} is {float(current)}"
        for key, (low, high) in self.bounds.items():
            value = float(logged[key])
            if not (math.isfinite(value) and low <= value <= high):
                return f"{key} is {value:g}, not within [{low:g}, {high:g}]"
        for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set, but not declared
            if isinstance(callback, CollapseDetector):
                level, sentence, _ = callback.verdict
                if level is not Level.HEALTHY:
                    return f"{level.word}: {sentence}"
        return None


def _checked_bounds(key: str, pair: list[float | None]) -> tuple[float, float]:
    if isinstance(pair, list | tuple) and len(pair) == 2 and all(map(_is_bound, pair)):
        low = -math.inf if pair[0] is None else float(pair[0])
        high = math.inf if pair[1] is None else float(pair[1])
        if low <= high:  # nan is in no order
            return low, high
    raise ValueError(f"bounds[{key!r}]: expected [low, high] with low <= high, got {pair!r}")


def _is_bound(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
