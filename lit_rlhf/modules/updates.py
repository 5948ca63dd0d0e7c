"""Updates of a network, in micro-batches, and skipped where a number is not finite.

A NaN in a loss would reach every weight of a network and every moment of its optimizer. The step is
skipped on all ranks instead; a run that skips too many in a row ends with an error.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from lit_rlhf.checks import check_count
from lit_rlhf.errors import UserError
from lit_rlhf.finite import NotFiniteError, find_non_finite, join_names
from lit_rlhf.micro_batches import LossShare, NetworkUpdate, accumulate
from lit_rlhf.ppo import NetworkName
from lit_rlhf.strategies import backward, clipped_step

HELP = "a lower learning rate or clip norm, float32 weights, or a look at data and rewards."


class TooManySkippedUpdates(UserError):
    """A network could not be updated so often in a row that training stops.

    This is an exception and not a quiet end of training, since the run has not done its work: no
    finished model is saved, and whatever follows the run does not start.
    """


class TrainedNetwork(NamedTuple):
    """A trained network with its optimizer and schedule.

    Attributes:
        optimizer: Its optimizer.
        schedule: The schedule of its learning rate.
    """

    optimizer: LightningOptimizer
    schedule: LRScheduler


def trained_networks(module: LightningModule, names: Sequence[str]) -> dict[str, TrainedNetwork]:
    """The optimizer and schedule of each trained network, by its name.

    Args:
        module: A module in a fit.
        names: Names of the networks, in the order of `configure_optimizers`. There may be fewer
            networks: PPO has no critic with some estimators.
    """
    optimizers = module.optimizers()
    schedules = cast(Any, module.lr_schedulers())
    if not isinstance(optimizers, list):
        return {names[0]: TrainedNetwork(optimizers, schedules)}
    trained = [
        TrainedNetwork(optimizer, schedule)
        for optimizer, schedule in zip(optimizers, schedules, strict=True)
    ]
    return dict(zip(names, trained, strict=False))


def step_schedule(schedule: LRScheduler) -> None:
    """Step the learning rate even after a skipped update, so that a batch's stays the same."""
    with warnings.catch_warnings():
        # torch takes a skipped first update for a schedule that steps before its optimizer
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        schedule.step()


class UpdateGuard:
    """Makes updates, skips those in which a number is not finite, and counts these.

    Every rank has to call its methods at the same points, since ranks agree on what is skipped.

    Attributes:
        skipped: Whether the last iteration ended early because a number was not finite.
        in_a_row: Skipped updates in a row up to now, by network.

    Args:
        max_in_a_row: Skipped updates of a network in a row at which training stops.
    """

    def __init__(self, max_in_a_row: int) -> None:
        check_count("max_skipped_in_a_row", max_in_a_row)
        self.max_in_a_row = max_in_a_row
        self.in_a_row: dict[str, int] = {}
        self.skipped = False
        self._count = 0

    def update(
        self,
        module: LightningModule,
        optimizer: LightningOptimizer,
        shares: Iterable[LossShare],
        *,
        max_norm: float | None,
        network: str,
        place: str,
    ) -> NetworkUpdate:
        """Clip and step, or skip the step where a loss or the gradient norm is not finite.

        Args:
            module: The module in whose fit this is.
            optimizer: The network's optimizer.
            shares: The micro-batches' shares in the loss.
            max_norm: Largest norm of the gradient; `None`: no clipping.
            network: What is updated, for messages.
            place: Where in the run, for messages.
        """
        totals = accumulate(shares, lambda loss: backward(module, loss, optimizer))
        losses = {key: value for key, value in totals.items() if key.endswith("loss")}
        not_finite = find_non_finite(losses)
        if not_finite:
            # else its gradient would be added to the next update's
            optimizer.zero_grad()
            norm = torch.full((), torch.nan, device=next(iter(losses.values())).device)
            applied = False
        else:
            norm, applied = clipped_step(optimizer, max_norm)
            not_finite = [] if applied else ["its gradient norm"]
        self._count_update(module.trainer, network, not_finite, place)
        return NetworkUpdate(metrics=totals, grad_norm=norm, applied=applied)

    @contextmanager
    def iteration(self, trainer: Trainer, networks: str, place: str) -> Iterator[None]:
        """Run an iteration, and leave the block where it raises NotFiniteError.

        Args:
            trainer: The trainer of the fit.
            networks: What is not updated then, for messages.
            place: Where in the run, for messages.
        """
        not_finite: list[str] = []
        try:
            yield
        except NotFiniteError as error:
            not_finite = error.names
        self.skipped = bool(not_finite)
        self._count_update(trainer, networks, not_finite, place)

    def check_end(self, trainer: Trainer) -> None:
        """Refuse to end a run well whose last update of a network was skipped."""
        if skipped := [network for network, row in self.in_a_row.items() if row]:
            raise TooManySkippedUpdates(
                f"the run ends with skipped updates of {', '.join(skipped)}, so that no finished "
                f"model is saved: a number was not finite. {_advise(trainer)}"
            )

    def pop_count(self) -> Tensor:
        """Number of skipped updates since the last call, 0-dim float32 like all metrics."""
        count, self._count = self._count, 0
        return torch.tensor(float(count))

    def _count_update(
        self, trainer: Trainer, network: str, not_finite: list[str], place: str
    ) -> None:
        """Count an update, and tell of a skipped one; too many of these in a row end the run."""
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
            )
            return
        raise TooManySkippedUpdates(
            f"{skipped}. It was number {row} in a row (max_skipped_in_a_row). {_advise(trainer)}"
        )


class GuardedStepper:
    """Steps the networks of a module for `lit_rlhf.ppo.PPO`, with their learning rates.

    Args:
        networks: Each network with its optimizer and schedule.
        module: The module in whose fit this is.
        guard: Makes the updates.
        grad_clips: Largest gradient norm by network; `None`: no clipping.
        place: Where in the run, for messages.
    """

    def __init__(
        self,
        networks: Mapping[str, TrainedNetwork],
        *,
        module: LightningModule,
        guard: UpdateGuard,
        grad_clips: Mapping[NetworkName, float | None],
        place: str,
    ) -> None:
        self.networks = networks
        self.module = module
        self.guard = guard
        self.grad_clips = grad_clips
        self.place = place
        self.n_minibatches = 0

    def update(self, network: NetworkName, shares: Iterable[LossShare]) -> NetworkUpdate:
        """Clip and step, or skip the step where a number is not finite, see `UpdateGuard.update`.

        Args:
            network: Which network.
            shares: The micro-batches' shares in its loss.
        """
        return self.guard.update(
            self.module,
            self.networks[network].optimizer,
            shares,
            max_norm=self.grad_clips[network],
            network=f"the {network}",
            place=f"{self.place}, minibatch {self.n_minibatches + 1}",
        )

    def end_minibatch(self, trains_policy: bool) -> None:
        """Step the learning rates, the policy's only where it is trained.

        Args:
            trains_policy: Whether the policy was trained on the minibatch.
        """
        self.n_minibatches += 1
        for name, network in self.networks.items():
            if name != "policy" or trains_policy:
                step_schedule(network.schedule)


def _advise(trainer: Trainer) -> str:
    checkpoint = find_last_saved(trainer.checkpoint_callbacks)
    last = f"The last checkpoint is {checkpoint}: resume from it with --ckpt_path"
    return f"{last if checkpoint else 'There is no checkpoint'}. What helps: {HELP}"


def find_last_saved(callbacks: Iterable[Any]) -> str | None:
    """The newest checkpoint that a run's checkpoint callbacks have saved and that still exists."""
    saved = [
        Path(path)
        for callback in callbacks
        for name in ("last_model_path", "best_model_path")
        if (path := getattr(callback, name, ""))
    ]
    existing = [path for path in saved if path.exists()]
    return str(max(existing, key=lambda path: path.stat().st_mtime)) if existing else None
