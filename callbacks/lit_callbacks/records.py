"""One record of a run, read from the trainer: the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lit_callbacks.monitors import Record


class RecordReader:
    """Reads what was logged since the last record, and the step's outputs, merged over ranks.

    Lightning shows a metric until it is logged again. An old value is not a new reading: a monitor
    that waits for several bad readings in a row must not count one of them several times.

    Attributes:
        seen: names of the metrics and of the outputs' tensors that there were so far.
    """

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self._last: dict[str, Tensor] = {}

    def read(self, trainer: Trainer, outputs: object, tensors: Set[str]) -> Record:
        """Read one record. All ranks must call this together.

        Args:
            trainer: its `callback_metrics` are read; a metric is averaged over the ranks that
                logged it.
            outputs: what the training step returned; a mapping's tensors can be asked for by name.
            tensors: names of tensors wanted; one that is missing is left out, and so is one that
                is also a logged metric.
        """
        scalars = self.new_scalars(trainer)
        items = outputs.items() if isinstance(outputs, Mapping) else ()
        returned = {name: value for name, value in items if isinstance(value, Tensor)}
        found = (tensors & returned.keys()) - self._last.keys()
        own = Record(scalars, {name: returned[name].flatten().tolist() for name in found})
        parts: list[Any] = [own]
        if trainer.world_size > 1:
            parts = [None] * trainer.world_size
            torch.distributed.all_gather_object(parts, own)
        record = merged(parts)
        self.seen |= record.scalars.keys() | record.tensors.keys() | returned.keys()
        return record

    def new_scalars(self, trainer: Trainer) -> dict[str, float]:
        """The numbers that this process has logged since the last call, by key."""
        last, self._last = self._last, dict(trainer.callback_metrics)
        # Lightning copies what is logged. As the last copy is kept here, one at the same place in
        # memory is the same copy.
        return {
            key: float(value)
            for key, value in self._last.items()
            if value.numel() == 1 and (key not in last or last[key].data_ptr() != value.data_ptr())
        }


def merged(parts: Sequence[Record]) -> Record:
    """The record of all ranks: means of scalars, tensors one after the other."""
    scalars: dict[str, float] = {}
    tensors: dict[str, list[float]] = {}
    for key in dict.fromkeys(key for part in parts for key in part.scalars):
        values = [part.scalars[key] for part in parts if key in part.scalars]
        scalars[key] = sum(values) / len(values)
    for part in parts:
        for name, numbers in part.tensors.items():
            tensors.setdefault(name, []).extend(numbers)
    broken = tuple(key for key, value in scalars.items() if not math.isfinite(value))
    return Record(scalars, tensors, broken)
