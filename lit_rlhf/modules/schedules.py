"""Learning rates over the updates of a run.

A schedule is stepped once per update of its network, even after one that was skipped. Update `k`
(from 0) of a warm-up over `W` updates has `(k + 1) / W` of the peak, so that no update is made at
a rate of 0. What follows the warm-up is a schedule of transformers. After the last planned
update its rate is held: it neither rises again nor falls to 0.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from lightning.pytorch import Trainer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from lit_rlhf.modules.options import OptimizerOptions

NO_BATCHES = (
    "trainer: expected at least one batch to train on, got none, so that no model would be saved: "
    "max_epochs, max_steps, limit_train_batches or the number of batches in the data is 0"
)
"""Message of the error that ends a run without training."""


def learning_rate_factor(
    options: OptimizerOptions, *, update: int, total: int, warmup: int
) -> float:
    """Learning rate of an update, as a share of the peak.

    Args:
        options: The schedule.
        update: Number of the update, from 0; one after the last has the rate of the last.
        total: Number of updates of the run.
        warmup: Number of updates of the warm-up.
    """
    update = min(update, total - 1)  # later ones have the rate of the last
    if update < warmup:
        return (update + 1) / warmup
    return _transformers_factor(options, total=total, warmup=warmup)(update)


def build_schedule(
    optimizer: Optimizer,
    options: OptimizerOptions,
    count_updates: Callable[[], float],
    *,
    warmup_ratio: float | None = None,
) -> LambdaLR:
    """The learning-rate schedule of an optimizer.

    Args:
        optimizer: The optimizer.
        options: The schedule.
        count_updates: Returns the number of planned updates. The length of the warm-up follows
            from its first result, and the rest of the schedule follows later results, too.
        warmup_ratio: Share of the updates in the warm-up; `None`: as in the options.
    """
    name = options.lr_scheduler
    if name == "constant":
        return LambdaLR(optimizer, lambda update: 1.0)
    planned = count_updates()
    if math.isinf(planned):
        raise ValueError(
            f"lr_scheduler: {name!r} needs the length of the run; set trainer.max_epochs, or "
            "trainer.max_steps for SFT and reward modelling, or model.max_iterations for PPO, or "
            "use lr_scheduler: constant"
        )
    if planned <= 0:
        raise ValueError(NO_BATCHES)
    ratio = options.warmup_ratio if warmup_ratio is None else warmup_ratio
    warmup = math.ceil(ratio * planned)
    # A plain function: LambdaLR saves the attributes of other callables in checkpoints.
    return LambdaLR(
        optimizer,
        lambda update: learning_rate_factor(
            options, update=update, total=int(count_updates()), warmup=warmup
        ),
    )


def training_batch_size(trainer: Trainer) -> int:
    """Batch size of the training loader."""
    if trainer.train_dataloader is None:
        # `estimated_stepping_batches` does so only where it needs the loader's length
        trainer.fit_loop.setup_data()
    sampler = getattr(trainer.train_dataloader, "batch_sampler", None)
    size = getattr(sampler, "batch_size", None)
    if size is None:
        raise ValueError(
            "lr_scheduler: the number of updates follows from the batch size of the training "
            "loader, expected it as loader.batch_sampler.batch_size, got none; use "
            "lr_scheduler: constant for both networks"
        )
    return int(size)


@lru_cache
def _transformers_factor(
    options: OptimizerOptions, *, total: int, warmup: int
) -> Callable[[int], float]:
    """The function of a transformers schedule, which get_scheduler hides in a LambdaLR."""
    optimizer = torch.optim.SGD([torch.zeros(())], lr=options.learning_rate)
    schedule = get_scheduler(
        options.lr_scheduler,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=total,
        scheduler_specific_kwargs=(
            {"min_lr_rate": options.min_lr_ratio} if "min_lr" in options.lr_scheduler else None
        ),
    )
    assert isinstance(schedule, LambdaLR)
    factor: Callable[[int], float] = schedule.lr_lambdas[0]
    return factor
