"""One PPO iteration of a run that is thrown away: rollouts, scores, and two optimizer steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import starmap

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor

from lit_rlhf.data import TokenBatch
from lit_rlhf.doctor.case import Case, NetworkStep, OneUpdate
from lit_rlhf.doctor.findings import Finding, failure, ok
from lit_rlhf.modules import OptimizerOptions, PPOModule
from lit_rlhf.modules.ppo import ROLLOUT_MEMORY, SCORING_MEMORY, UPDATE_MEMORY
from lit_rlhf.modules.timing import PhaseTimer
from lit_rlhf.rollout import Experience, iterate_minibatches

NETWORKS = ("policy", "critic")  # in the order of the optimizers


def one_iteration(case: Case) -> Finding:
    """Sample, score, estimate, shape and update as a training step does; fills the case."""
    module, batch, timer = case.module, case.batch, case.timer
    assert batch is not None
    draws = module.generator()
    seed = int(torch.randint(2**31, (), generator=draws))
    with timer("rollout"), module.memory_for("rollout", batch.input_ids, *ROLLOUT_MEMORY):
        case.rollouts = rollouts = module.rollout(batch, seed)
    ids = rollouts.sequence_ids
    if rollouts.statistics is not None:
        case.scored = module.estimate(rollouts._replace(statistics=None))
    with timer("score"):
        with module.memory_for("estimate", ids, *SCORING_MEMORY):
            case.estimates = estimates = module.estimate(rollouts)
        with module.memory_for("score", ids, *SCORING_MEMORY):
            case.scores = scores = module.score(rollouts, batch.texts)
    parts = {"rewards": scores, **estimates._asdict()}
    strange = [name for name, value in parts.items() if not bool(torch.isfinite(value).all())]
    if strange:
        return failure(
            f"Not finite in {len(scores)} rollouts: {', '.join(strange)}.",
            "Look at the model or reward function that they come from; float32 "
            "(model.network.dtype) helps where numbers overflow.",
        )
    rewards = module.shape_rewards(rollouts, scores, estimates)
    case.experience = experience = module.experience(rollouts, rewards, estimates)
    with module.memory_for("update", ids, *UPDATE_MEMORY):
        updates = two_updates(module, experience, batch.ptx, draws, timer)
    strange = sorted({k for u in updates for k, v in u.metrics.items() if v != v})
    if strange:
        return failure(
            f"An optimizer step was skipped as a number was not finite: {', '.join(strange)}.",
            "Lower learning_rate of model.policy_optimizer or model.critic_optimizer, or set "
            "model.network.dtype: float32.",
        )
    case.updates = updates
    return ok(
        f"{len(scores)} responses of {float(rollouts.lengths.float().mean()):.1f} tokens, score "
        f"{float(scores.mean()):.2f} (deviation {float(scores.std(correction=0)):.2f}), and "
        "optimizer steps of both networks."
    )


def two_updates(
    module: PPOModule,
    experience: Experience,
    ptx: TokenBatch | None,
    draws: torch.Generator,
    timer: PhaseTimer,
) -> list[OneUpdate]:
    """Two steps of each network on the first minibatch; the second is timed.

    Each gradient norm is above its bound in one of them at least: where it is not in the first,
    the second has half the norm for a bound.
    """
    size = module.minibatches.minibatch_size
    index = next(iterate_minibatches(len(experience), size, draws))
    minibatch = experience.select(index)
    rows = None if ptx is None else TokenBatch(*(field[index] for field in ptx))
    module.pretraining_done.fill_(True)  # both networks learn
    module.minibatches = replace(module.minibatches, ppo_epochs=1)
    first = one_update(module, minibatch, rows, draws)
    for network, step in first.steps.items():
        if step.bound is not None and not step.before > step.bound:
            lowered = step.before / 2 or step.bound
            options = replace(optimizer_options(module, network), grad_clip=lowered)
            setattr(module, f"{network}_optimizer", options)
    with timer("update"):
        second = one_update(module, minibatch, rows, draws)
    return [first, second]


def one_update(
    module: PPOModule, minibatch: Experience, ptx: TokenBatch | None, draws: torch.Generator
) -> OneUpdate:
    """One step of each network on all of `minibatch`."""
    bounds = {network: optimizer_options(module, network).grad_clip for network in NETWORKS}
    optimizers = [optimizer for optimizer, _ in module.networks_in_training()]
    for optimizer in optimizers:
        for moment, _ in first_moments(optimizer):
            moment.zero_()  # so that after the step it is the step's gradient, scaled
    metrics = {key: float(v) for key, v in module.update(minibatch, ptx, draws).items()}
    steps = {
        network: NetworkStep(
            bounds[network], metrics[f"ppo/{network}_grad_norm"], applied_norm(optimizer)
        )
        for network, optimizer in zip(NETWORKS, optimizers, strict=True)
    }
    return OneUpdate(metrics, steps)


def optimizer_options(module: PPOModule, network: str) -> OptimizerOptions:
    """Options of the optimizer of `policy` or `critic`."""
    return module.policy_optimizer if network == "policy" else module.critic_optimizer


def first_moments(optimizer: LightningOptimizer) -> list[tuple[Tensor, float]]:
    """Adam's running means of the gradient, each with its beta_1; empty for other optimizers.

    They hold what the step has really used, under every strategy: an engine's are those of its
    partitions, which in one process are whole.
    """
    return [
        (optimizer.state[parameter]["exp_avg"], group["betas"][0])
        for group in optimizer.param_groups
        for parameter in group["params"]
        # .get: indexing would make an empty entry, which optimizers take for an initialized state
        if "exp_avg" in optimizer.state.get(parameter, {})
    ]


def applied_norm(optimizer: LightningOptimizer) -> float | None:
    """L2 norm of the gradient of the last step, if the moments were 0 before it."""
    norms = list(starmap(_gradient_norm, first_moments(optimizer)))
    return float(torch.stack(norms).norm()) if norms else None


def _gradient_norm(moment: Tensor, beta: float) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(moment, dtype=torch.float32)
    return norm.cpu() / (1 - beta)
