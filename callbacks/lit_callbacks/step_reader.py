"""Reads what a training step logged and returned; the result is the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lit_callbacks.monitors import StepMetrics

OWN_KEYS = "monitor/"
"""Prefix of what detectors log. These are no metrics of the module."""


class StepReader:
    """Reads the metrics logged since the last read and the step's outputs, merged over ranks.

    Lightning keeps a metric in `callback_metrics` until it is logged again. The reader passes over
    such old values, so that a monitor's patience does not count one several times.
    """

    def __init__(self) -> None:
        self.seen: set[str] = set()  # names of all metrics and output tensors read so far
        self._last: dict[str, Tensor] = {}

    def read(self, trainer: Trainer, outputs: object, tensors: Set[str]) -> StepMetrics:
        """Read one step, on all ranks together.

        Args:
            trainer: The Trainer.
            outputs: What the training step returned. Tensors are read if it is a mapping.
            tensors: Names of output tensors to read. A name that is logged as a metric is read as a
                metric only.

        Returns:
            The metrics logged since the last call, averaged over the ranks that logged them, and
            the numbers of the tensors.
        """
        scalars = self.read_new_scalars(trainer)
        items = outputs.items() if isinstance(outputs, Mapping) else ()
        returned = {name: value for name, value in items if isinstance(value, Tensor)}
        names = (tensors & returned.keys()) - self._last.keys()
        rank_metrics = StepMetrics(
            scalars, {name: returned[name].flatten().tolist() for name in names}
        )
        parts: list[Any] = [rank_metrics]
        if trainer.world_size > 1:
            parts = [None] * trainer.world_size
            torch.distributed.all_gather_object(parts, rank_metrics)
        metrics = merge_ranks(parts)
        self.seen |= metrics.scalars.keys() | metrics.tensors.keys() | returned.keys()
        return metrics

    def read_new_scalars(self, trainer: Trainer) -> dict[str, float]:
        """Read the numbers that this process has logged since the last call, by key."""
        last, self._last = self._last, dict(trainer.callback_metrics)
        # Lightning stores a copy of each logged value. The last copy is kept alive in `_last`, so
        # a tensor at the same address is the same copy, and the metric was not logged again.
        return {
            key: float(value)
            for key, value in self._last.items()
            if value.numel() == 1
            and not key.startswith(OWN_KEYS)
            and (key not in last or last[key].data_ptr() != value.data_ptr())
        }


def merge_ranks(parts: Sequence[StepMetrics]) -> StepMetrics:
    """Merge the metrics of all ranks: means of scalars, tensors one after the other."""
    scalars: dict[str, float] = {}
    tensors: dict[str, list[float]] = {}
    for key in dict.fromkeys(key for part in parts for key in part.scalars):
        values = [part.scalars[key] for part in parts if key in part.scalars]
        scalars[key] = sum(values) / len(values)
    for part in parts:
        for name, numbers in part.tensors.items():
            tensors.setdefault(name, []).extend(numbers)
    # A value that is not finite on one rank makes the mean not finite.
    non_finite = tuple(key for key, value in scalars.items() if not math.isfinite(value))
    return StepMetrics(scalars, tensors, non_finite)
