"""Optimizer steps that are skipped where a number is not finite.

One NaN in a loss would reach every weight of a network and every moment of its optimizer. The step
is skipped instead, on all ranks alike, and weights, moments and step counts stay as they were. A
run that skips too many steps in a row ends with an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lit_rlhf.checks import check_count
from lit_rlhf.stats import global_sum, world_size
from lit_rlhf.strategies import OptimizerStep, clipped_step

MAX_NAMES = 4  # of quantities in a message


class TooManySkippedUpdates(RuntimeError):
    """A network could not be updated so often in a row that training stops.

    This is an exception and not a quiet end of training, since the run has not done its work: no
    finished model is saved, and whatever follows the run does not start.
    """


class NotFiniteError(Exception):
    """Numbers that an iteration needs are not finite; only `UpdateGuard.iteration` sees it."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(names)
        self.names = names


class Iteration:
    """An iteration under an `UpdateGuard`.

    Attributes:
        skipped: Whether a number was not finite, so that the iteration ended early.
    """

    def __init__(self) -> None:
        self.skipped = False

    def require_finite(self, quantities: Mapping[str, Tensor]) -> None:
        """End the iteration unless all numbers of all ranks are finite.

        Args:
            quantities: Tensors by their names in the warning.
        """
        if found := find_non_finite(quantities):
            raise NotFiniteError(found)


class UpdateGuard:
    """Skips updates in which a number is not finite, and counts them.

    Every rank has to call its methods at the same points, since ranks agree on what is skipped.

    Args:
        max_in_a_row: Number of skipped updates of a network in a row at which training stops.

    Raises:
        ValueError: If `max_in_a_row` is less than 1.
    """

    def __init__(self, max_in_a_row: int) -> None:
        check_count("max_skipped_in_a_row", max_in_a_row)
        self.max_in_a_row = max_in_a_row
        self.in_a_row: dict[str, int] = {}
        self._count = 0

    def step(
        self,
        trainer: Trainer,
        network: str,
        optimizer: LightningOptimizer,
        max_norm: float | None,
        metrics: Mapping[str, Tensor],
        place: str,
    ) -> OptimizerStep:
        """Clip and step, or skip the step where a loss or the gradient norm is not finite.

        Args:
            trainer: The trainer of the run.
            network: What is updated, for instance `the policy`.
            optimizer: Its optimizer, after the last `backward`.
            max_norm: Largest gradient norm (L2); `None`: no clipping.
            metrics: Metrics of the update; its losses are those whose key ends with `loss`.
            place: Where in the run the update is, for instance `iteration 3, minibatch 1`.

        Returns:
            The gradient norm, NaN where a loss was not finite, and whether a step was made.

        Raises:
            TooManySkippedUpdates: If too many updates of the network in a row were skipped.
        """
        losses = {key: value for key, value in metrics.items() if key.endswith("loss")}
        found = find_non_finite(losses)
        if found:
            # its gradient would be added to that of the next update
            optimizer.zero_grad()
            norm = torch.full((), torch.nan, device=next(iter(losses.values())).device)
            step = OptimizerStep(norm, applied=False)
        else:
            step = clipped_step(optimizer, max_norm)
            found = [] if step.applied else ["its gradient norm"]
        self._count_update(trainer, network, found, place)
        return step

    @contextmanager
    def iteration(self, trainer: Trainer, networks: str, place: str) -> Iterator[Iteration]:
        """Run an iteration, and leave the block where `Iteration.require_finite` finds NaN.

        Args:
            trainer: The trainer of the run.
            networks: Networks that are not updated then, for instance `policy and critic`.
            place: Where in the run the iteration is.

        Raises:
            TooManySkippedUpdates: If too many iterations in a row were skipped.
        """
        iteration, found = Iteration(), []
        try:
            yield iteration
        except NotFiniteError as error:
            iteration.skipped, found = True, error.names
        self._count_update(trainer, networks, found, place)

    def pop_count(self) -> Tensor:
        """Number of skipped updates since the last call, 0-dim float32, as metrics are."""
        count, self._count = self._count, 0
        return torch.tensor(float(count))

    def _count_update(
        self, trainer: Trainer, network: str, not_finite: list[str], place: str
    ) -> None:
        if not not_finite:
            self.in_a_row[network] = 0
            return
        row = self.in_a_row[network] = self.in_a_row.get(network, 0) + 1
        self._count += 1
        skipped = f"update of {network} skipped at {place}: non-finite: {join_names(not_finite)}"
        if row < self.max_in_a_row:
            rank_zero_warn(
                f"{skipped}. Weights and moments are as before; {row} in a row, and training stops "
                f"after {self.max_in_a_row} (max_skipped_in_a_row)",
                category=UserWarning,
            )
            return
        checkpoint = find_last_checkpoint(trainer.checkpoint_callbacks)
        resume = (
            "There is no checkpoint"
            if checkpoint is None
            else f"The last checkpoint is {checkpoint}: resume from it with --ckpt_path"
        )
        raise TooManySkippedUpdates(
            f"{skipped}. It was number {row} in a row (max_skipped_in_a_row). {resume}. What "
            "helps: a lower learning rate or clip norm, float32 weights, or a look at the data."
        )


def weight_sums(network: nn.Module, name: str) -> dict[str, Tensor]:
    """Sum of each weight of a network; it is finite only if all numbers of the weight are."""
    # Unlike `isfinite`, a sum takes no memory.
    return {
        f"weights of {name} ({key})": weight.detach().sum(dtype=torch.float32)
        for key, weight in network.named_parameters()
    }


def find_non_finite(quantities: Mapping[str, Tensor]) -> list[str]:
    """Names of the quantities that hold NaN or infinity on any rank, the same on all ranks."""
    flags = torch.stack([~torch.isfinite(value).all() for value in quantities.values()])
    counts, n_ranks = global_sum(flags.int()).tolist(), world_size()
    return [
        name if n_ranks == 1 else f"{name} (on {count} of {n_ranks} ranks)"
        for name, count in zip(quantities, counts, strict=True)
        if count
    ]


def join_names(names: Sequence[str]) -> str:
    """The first names, and the number of the others: all weights may be NaN at once."""
    others = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {others} more" if others > 0 else "")


def find_last_checkpoint(callbacks: Iterable[Any]) -> str | None:
    """The newest checkpoint that a run's checkpoint callbacks have saved and that still exists."""
    saved = [
        Path(path)
        for callback in callbacks
        for name in ("last_model_path", "best_model_path")
        if (path := getattr(callback, name, ""))
    ]
    existing = [path for path in saved if path.exists()]
    return str(max(existing, key=lambda path: path.stat().st_mtime)) if existing else None
