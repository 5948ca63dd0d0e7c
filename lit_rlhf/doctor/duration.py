"""The check of how long the run takes, from one iteration that was measured."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch.callbacks import Timer

from lit_rlhf.doctor.case import Case
from lit_rlhf.doctor.findings import Finding, failure, ok, warning

ESTIMATE = "An estimate: responses may grow, and validation and saving come on top."


def duration(case: Case) -> Finding:
    """Seconds per iteration, times the iterations that the Trainer will make."""
    assert case.rollouts is not None
    seconds, updates = iteration_seconds(case), updates_per_iteration(case)
    total = sum(seconds.values())
    rate = int(case.rollouts.response_mask.sum()) / max(total, 1e-9)
    pace = (
        f"{shown(total)} per iteration ("
        + ", ".join(f"{phase} {shown(value)}" for phase, value in seconds.items())
        + f"; {rate:,.0f} response tokens per second)"
    )
    count = iterations(case, updates)
    if count < 1:
        return failure(
            f"The run has no iteration: a rank's share of an epoch is less than one batch "
            f"({case.plan.ranks} ranks).",
            "Lower data.batch_size (prompts per rank and iteration), or raise "
            "data.samples_per_epoch.",
        )
    if math.isinf(count):
        return warning(
            f"{pace}; the run has no end.", "Set trainer.max_epochs or trainer.max_steps."
        )
    whole = f"{pace}: {count:,.0f} iterations take about {shown(total * count)}. {ESTIMATE}"
    if case.plan.max_time is not None:
        allowed = Timer(duration=case.plan.max_time).time_remaining()
        if allowed is not None and allowed < total * count:
            return warning(
                f"{whole} trainer.max_time ends it after {shown(allowed)}, "
                f"at iteration {allowed / total:,.0f} or so.",
                "Raise trainer.max_time, or lower trainer.max_epochs or data.samples_per_epoch "
                "so that the learning rates' schedule fits.",
            )
    return ok(whole)


def updates_per_iteration(case: Case) -> int:
    """Optimizer steps of one network in an iteration."""
    assert case.experience is not None
    return case.ppo_epochs * (len(case.experience) // case.module.minibatches.minibatch_size)


def iteration_seconds(case: Case) -> dict[str, float]:
    """Seconds of each phase: rollout and scoring as measured, the update from one of its steps."""
    measured = case.timer.seconds
    return {**measured, "update": measured["update"] * updates_per_iteration(case)}


def iterations(case: Case, updates: int) -> float:
    """Iterations of the whole run, as its limits say."""
    trainer, plan = case.trainer, case.plan
    loader: Any = trainer.train_dataloader
    per_epoch = len(loader) // plan.ranks
    limit = plan.limit_train_batches
    if isinstance(limit, float):
        per_epoch = int(per_epoch * limit)
    elif limit is not None:
        per_epoch = min(per_epoch, limit)
    epochs = trainer.max_epochs
    count = math.inf if epochs is None or epochs < 0 else float(epochs * per_epoch)
    if trainer.max_steps >= 0:  # optimizer steps of both networks
        count = min(count, math.ceil(trainer.max_steps / (2 * updates)))
    return count if per_epoch else 0.0


def shown(seconds: float) -> str:
    """A time for people."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
