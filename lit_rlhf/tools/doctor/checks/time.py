"""The check of how long the run takes, from the time of one iteration, and an estimate for a GPU.

The estimate counts operations and bytes. A forward takes two operations per weight and token, and a
backward twice as many. Sampling reads all weights, and the keys and values so far, for every token
of its longest response. What attention computes, communication, and what the host takes are left
out: at 7B and 2,048 tokens attention adds 4 %. Default speeds are for an A100 with 80 GB
(NVIDIA's data sheet: 312 TFLOP/s in bfloat16 and 2.0 TB/s), of which 40 and 70 % are assumed.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from lightning.pytorch.callbacks import Timer

from lit_rlhf.tools.doctor.case import Case
from lit_rlhf.tools.doctor.memory import (
    WEIGHT_BYTES,
    NetworkShape,
    PPOSizes,
    network_shape,
    ppo_sizes,
)
from lit_rlhf.tools.doctor.report import Finding, failure, ok, warning

OPERATIONS = 0.4 * 312e12
"""Operations that a GPU makes in a second of scoring or of an update."""
BANDWIDTH = 0.7 * 2.0e12
"""Bytes that a GPU reads in a second of sampling."""
_ESTIMATE = "This is an estimate: responses may grow, and validation and saving come on top."


class PhaseSeconds(NamedTuple):
    """Estimated seconds of a phase of an iteration.

    Attributes:
        products: Seconds that the operations of matrix products take.
        memory: Seconds that reading weights, keys and values for each sampled token takes.
    """

    products: float
    memory: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the phase: its matrix products and its reading, one after the other."""
        return self.products + self.memory

    @property
    def bound(self) -> str:
        """What takes more time in the phase: `products` or `memory`."""
        return "memory" if self.memory > self.products else "products"


def check_time(case: Case) -> Finding:
    """Check that the run has iterations and an end, before its time limit, and logs some."""
    seconds = iteration_seconds(case)
    total = sum(seconds.values())
    rate = int(case.rollouts.response_mask.sum()) / max(total, 1e-9)
    pace = (
        f"{format_seconds(total)} per iteration ({format_phases(seconds)}; {rate:,.0f} response "
        "tokens per second)"
    )
    count = count_iterations(case)
    if count < 1:
        return failure(
            "The run has no iteration: a rank's share of an epoch is smaller than a batch "
            f"({case.plan.ranks} ranks).",
            "Lower data.batch_size (prompts per rank and iteration), or raise "
            "data.samples_per_epoch.",
        )
    if math.isinf(count):
        return warning(
            f"{pace}. The run has no end.", "Set model.max_iterations or trainer.max_epochs."
        )
    summary = (
        f"{pace}: {count:,.0f} iterations take about {format_seconds(total * count)}. {_ESTIMATE}"
    )
    if case.plan.on_gpu and not torch.cuda.is_available():
        summary += f" {_describe_on_a100(case)}"
    if case.plan.max_time is not None:
        allowed = Timer(duration=case.plan.max_time).time_remaining()
        if allowed is not None and allowed < total * count:
            return warning(
                f"{summary} trainer.max_time ends the run after {format_seconds(allowed)}, "
                f"around iteration {allowed / total:,.0f}.",
                "Raise trainer.max_time, or lower model.max_iterations or trainer.max_epochs so "
                "that the learning-rate schedules fit.",
            )
    interval = case.plan.log_every_n_steps
    if not case.plan.logs:
        return warning(
            f"{summary} Without a logger, its course cannot be seen afterwards.",
            "Set trainer.logger to true or to a logger.",
        )
    if interval > count:
        return warning(
            f"{summary} None is logged: trainer.log_every_n_steps is {interval}.",
            "Set trainer.log_every_n_steps: 1, so that each iteration is logged.",
        )
    return ok(summary)


def _describe_on_a100(case: Case) -> str:
    """Say how long an iteration of a run for GPUs takes, for a machine without one."""
    phases = ppo_seconds(
        network_shape(case.module.policy),
        ppo_sizes(case),
        rollouts=case.n_rollouts,
        ppo_epochs=case.module.minibatches.ppo_epochs,
    )
    return (
        "Counted for an A100 and the longest responses, an iteration takes "
        f"{format_seconds(sum(phase.total for phase in phases.values()))} "
        f"({format_estimates(phases)})."
    )


def iteration_seconds(case: Case) -> dict[str, float]:
    """Seconds of each phase of an iteration; an update's from one of its steps."""
    measured = case.module.timer.seconds
    updates = case.module.minibatches.updates_per_iteration(len(case.experience))
    return {**measured, "update": measured["update"] * updates}


def format_phases(seconds: Mapping[str, float]) -> str:
    """Format seconds and shares of phases as text."""
    total = max(sum(seconds.values()), 1e-9)
    return ", ".join(f"{n} {format_seconds(s)} = {s / total:.0%}" for n, s in seconds.items())


def format_estimates(phases: Mapping[str, PhaseSeconds]) -> str:
    """Format the estimated seconds and shares of phases as text, with what bounds each of them."""
    seconds = format_phases({name: phase.total for name, phase in phases.items()})
    bounds = ", ".join(f"{name} by {phase.bound}" for name, phase in phases.items())
    return f"{seconds}; bound: {bounds}"


def count_iterations(case: Case) -> float:
    """Count the iterations of the run by its limits; infinite without one."""
    trainer = case.trainer
    plan = case.plan
    loader: Any = trainer.train_dataloader
    per_epoch = len(loader) // plan.ranks
    limit = plan.limit_train_batches
    if isinstance(limit, float):
        per_epoch = int(per_epoch * limit)
    elif limit is not None:
        per_epoch = min(per_epoch, limit)
    epochs = trainer.max_epochs
    count = math.inf if epochs is None or epochs < 0 else float(epochs * per_epoch)
    count = min(count, case.module.max_iterations or math.inf)
    return count if per_epoch else 0.0


def format_seconds(seconds: float) -> str:
    """Format seconds as a short text in a fitting unit."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def ppo_seconds(
    shape: NetworkShape,
    sizes: PPOSizes,
    *,
    rollouts: int,
    ppo_epochs: int = 1,
    operations: float = OPERATIONS,
    bandwidth: float = BANDWIDTH,
) -> dict[str, PhaseSeconds]:
    """Estimate the seconds of each phase of an iteration with the longest prompts and responses.

    Args:
        shape: Shape of all four networks.
        sizes: Sizes of the run; its `rollouts` are sampled side by side.
        rollouts: Rollouts of each GPU in an iteration.
        ppo_epochs: How often each of them is learned from.
        operations: Floating-point operations per second.
        bandwidth: Bytes per second.

    Returns:
        Seconds by the name of the phase, in the order of an iteration.
    """
    prompt = sizes.prompt_tokens
    response = sizes.response_tokens
    forward = 2 * shape.parameters * rollouts * (prompt + response) / operations
    rounds = math.ceil(rollouts / sizes.rollouts)
    weights = WEIGHT_BYTES * shape.parameters * response * rounds
    seen = rollouts * (response * prompt + response * (response - 1) / 2)
    cache = 2 * WEIGHT_BYTES * shape.layers * shape.kv_width * seen
    # reference and critic, and the policy unless the rollout's own log-probs are exact
    estimated = 2 if sizes.itemsize > WEIGHT_BYTES else 3
    passes = 4 if sizes.gradient_checkpointing else 3
    return {
        "rollout": PhaseSeconds(products=forward, memory=(weights + cache) / bandwidth),
        "score": PhaseSeconds(products=forward),
        "estimate": PhaseSeconds(products=estimated * forward),
        "update": PhaseSeconds(products=2 * passes * ppo_epochs * forward),
    }
