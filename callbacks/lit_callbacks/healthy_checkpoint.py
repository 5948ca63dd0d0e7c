"""A checkpoint callback that keeps the best checkpoint of a healthy policy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lit_callbacks.detector import CollapseDetector
from lit_callbacks.monitors import Level, Range
from lit_callbacks.trainer_attributes import find_callbacks


class HealthyCheckpoint(ModelCheckpoint):
    """Keeps the best checkpoint by a metric, but none of a policy that exploits its reward model.

    A checkpoint can become one of the `save_top_k` best if

    - the last logged values of the metric and of every bounded metric are finite;
    - every bounded metric is within its bounds;
    - the verdict of every `CollapseDetector` of the trainer is healthy. Lightning calls checkpoint
      callbacks last, so the verdict is about the same batch, wherever the detector stands.

    `save_last: link` names the newest of them `last.ckpt`. With `save_last: true` and
    `every_n_train_steps` it is written every time, and may hold a policy that exploits its reward.

    Under manual optimization `every_n_train_steps` counts the steps of all optimizers. To save
    within an epoch, validate within it (`val_check_interval`): without other options, checkpoints
    are saved after each validation.

    Args:
        monitor: Key of the logged metric that the best is chosen by; see also `mode`.
        bounds: Lower and upper bound by key of a logged metric, `None` for no bound, for example
            `{"rollout/kl": [None, 20.0]}`.
        **checkpoint_options: Options of Lightning's `ModelCheckpoint`.
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
            raise ValueError(f"save_top_k: expected at least 1, got {self.save_top_k}")
        if getattr(self, "save_on_exception", False):  # Lightning 2.4 has no such option
            raise ValueError(
                "save_on_exception: expected False, since it saves the model in any state, got True"
            )
        self.bounds = {key: _parse_bounds(key, pair) for key, pair in (bounds or {}).items()}

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Whether to save: the run is healthy and the metric among the best. All ranks agree.

        Args:
            trainer: The Trainer.
            current: Last logged value of the metric, 0-dim; `None` if it was not logged.
        """
        if current is None:
            return False
        reason = self._reason_to_skip(trainer, current)
        # without `sync_dist` metrics differ between ranks: a single refusal is enough
        if not trainer.strategy.reduce_boolean_decision(reason is None):
            if self.verbose:
                rank_zero_info(f"not kept: {reason or 'another rank has a reason not to'}")
            return False
        return super().check_monitor_top_k(trainer, current)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state, without paths outside of its folder."""
        # `ModelCheckpoint` will delete files that the state names, and it follows `..` in a path
        folder = Path(str(self.dirpath)).resolve()
        paths = [
            *state_dict.get("best_k_models", {}),
            state_dict.get("kth_best_model_path", ""),
            state_dict.get("last_model_path", ""),
        ]
        if any(path and folder not in Path(path).resolve().parents for path in paths):
            # `ModelCheckpoint` warns and takes no path from the state of another folder
            state_dict = {**state_dict, "dirpath": None}
        super().load_state_dict(state_dict)

    def _reason_to_skip(self, trainer: Trainer, current: Tensor) -> str | None:
        logged = trainer.callback_metrics
        missing = [key for key in self.bounds if key not in logged]
        if missing:
            raise ValueError(
                f"bounds: expected logged metrics, got {', '.join(missing)}; logged are "
                f"{', '.join(sorted(logged)) or 'none'}"
            )
        if not torch.isfinite(torch.as_tensor(current)):
            return f"{self.monitor} is {float(current)}"
        for key, bounds in self.bounds.items():
            value = float(logged[key])
            if not (math.isfinite(value) and bounds.low <= value <= bounds.high):
                return f"{key} is {value:g}, not within [{bounds.low:g}, {bounds.high:g}]"
        for detector in find_callbacks(trainer, CollapseDetector):
            if detector.verdict.level > Level.HEALTHY:
                return f"{detector.verdict.level.word}: {detector.verdict.sentence}"
        return None


def _parse_bounds(key: str, pair: list[float | None]) -> Range:
    if isinstance(pair, list | tuple) and len(pair) == 2 and all(map(_is_bound, pair)):
        low = -math.inf if pair[0] is None else float(pair[0])
        high = math.inf if pair[1] is None else float(pair[1])
        if low <= high:  # false if either is NaN
            return Range(low, high)
    raise ValueError(f"bounds[{key!r}]: expected [low, high] with low <= high, got {pair!r}")


def _is_bound(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
