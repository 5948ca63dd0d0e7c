"""Updates that are skipped because a number is not finite, and the end of a run that skips all."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor


class TooManySkippedUpdates(RuntimeError):
    """A network could not be updated for so long that going on is a waste.

    An exception and no quiet end: the run did not do its work, so it must not save a finished
    model, and what was to follow it must not start.
    """


class SkippedUpdates:
    """How many updates of each network were skipped in a row, and in this step.

    Args:
        limit: Skipped updates of a network in a row after which training stops.

    Raises:
        ValueError: If `limit` is less than 1.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"max_skipped_in_a_row: expected an integer >= 1, got {limit}")
        self.limit = limit
        self.in_a_row: dict[str, int] = {}
        self.in_this_step = 0

    def applied(self, network: str) -> None:
        """An update of `network` went through: its row ends."""
        self.in_a_row[network] = 0

    def skipped(self, network: str, why: str, place: str, checkpoint: str | None) -> None:
        """Count a skipped update and warn of it on rank 0; every rank has to call this.

        Args:
            network: What was not updated, for instance `the policy`.
            why: What was not finite.
            place: Where in the run.
            checkpoint: The newest checkpoint there is.

        Raises:
            TooManySkippedUpdates: If it is the last that the limit allows.
        """
        row = self.in_a_row[network] = self.in_a_row.get(network, 0) + 1
        self.in_this_step += 1
        what = f"update of {network} skipped at {place}: not finite were {why}"
        if row < self.limit:
            rank_zero_warn(
                f"{what}. Weights and moments are as before; {row} in a row, and training stops "
                f"after {self.limit} (max_skipped_in_a_row)",
                category=UserWarning,
            )
            return
        resume = (
            "There is no checkpoint"
            if checkpoint is None
            else f"The last checkpoint is {checkpoint}: resume from it with --ckpt_path"
        )
        raise TooManySkippedUpdates(
            f"{what}. It was number {row} in a row (max_skipped_in_a_row). {resume}. What helps: a "
            "lower learning rate, a lower clip norm, float32 weights, or a look at the data there"
        )

    def pop_count(self) -> Tensor:
        """Skipped updates since the last call, 0-dim float32, as metrics are."""
        count, self.in_this_step = self.in_this_step, 0
        return torch.tensor(float(count))


def last_known_checkpoint(callbacks: Iterable[Any]) -> str | None:
    """The newest checkpoint that a run's checkpoint callbacks know of and that is still there."""
    known = [
        Path(path)
        for callback in callbacks
        for name in ("last_model_path", "best_model_path")
        if (path := getattr(callback, name, ""))
    ]
    there = [path for path in known if path.exists()]
    return str(max(there, key=lambda path: path.stat().st_mtime)) if there else None
