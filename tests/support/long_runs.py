"""PPO over many iterations with everything switched on, alone and as one of two ranks."""

import os
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lit_rlhf.stats import local_part
from lit_rlhf.strategies.engine_optimizer import EngineOptimizer
from tests.support.rank_runs import RANKS, STRATEGIES, strategy
from tests.support.stages import copy_state, fit_module
from tests.support.trajectories import SAMPLES, Logged, stage_run

PRETRAINING = 2
PASSES = 2
CLIPS = {"policy": 0.2, "critic": 0.5}
OPTIONS = {
    "critic_pretraining.iterations": PRETRAINING,
    "minibatches.ppo_epochs": PASSES,
    "policy_optimizer.learning_rate": 3e-4,
    "critic_optimizer.learning_rate": 1e-3,
    "policy_optimizer.lr_scheduler": "cosine_with_min_lr",
    "critic_optimizer.lr_scheduler": "cosine_with_min_lr",
    "loss.ptx_coef": 0.3,
    **{f"{network}_optimizer.grad_clip": norm for network, norm in CLIPS.items()},
}


class Run(NamedTuple):
    """What one rank recorded.

    Attributes:
        metrics: Metrics of each iteration.
        state: Weights and buffers at the end.
        squares: Sums of squares of this rank's part of each clipped gradient, by network.
        untouched: Whether the policy, its optimizer and its schedule are as at the start, after
            each iteration of critic pre-training and the one after it.
        steps: Steps of each optimizer.
    """

    metrics: list[dict[str, float]]
    state: dict[str, Tensor]
    squares: dict[str, list[float]]
    untouched: list[bool]
    steps: dict[str, int]


class Witness(Callback):
    """Records what the optimizers that really step do, inside engines if there are any."""

    def __init__(self) -> None:
        self.squares: dict[str, list[float]] = {"policy": [], "critic": []}
        self.untouched: list[bool] = []
        self.steps: dict[str, int] = {}
        self.start: list[Any] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start = deepcopy(_policy_and_optimizer(trainer, pl_module))
        for optimizer, squares in zip(trainer.optimizers, self.squares.values(), strict=True):
            stepped, parts = _stepped(optimizer), list[float]()

            def add(
                inner: Optimizer,
                *_: object,
                squares: list[float] = squares,  # bound now
                parts: list[float] = parts,
                n_groups: int = len(stepped.param_groups),
            ) -> None:
                for group in inner.param_groups:
                    gradients = [local_part(p.grad) for p in group["params"] if p.grad is not None]
                    parts.append(sum(float(g.double().square().sum()) for g in gradients))
                if len(parts) == n_groups:  # ZeRO steps group by group
                    squares.append(sum(parts))
                    parts.clear()

            stepped.register_step_pre_hook(add)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        if len(self.untouched) <= PRETRAINING:
            self.untouched.append(_equal(self.start, _policy_and_optimizer(trainer, pl_module)))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer, network in zip(trainer.optimizers, self.squares, strict=True):
            counts = {int(state["step"]) for state in _stepped(optimizer).state.values()}
            (self.steps[network],) = counts


def _stepped(optimizer: Optimizer) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, EngineOptimizer) else optimizer


def _policy_and_optimizer(trainer: Trainer, module: Any) -> list[Any]:
    """Everything that a step of the policy changes."""
    optimizer = _stepped(trainer.optimizers[0])
    parameters = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    schedule = trainer.lr_scheduler_configs[0].scheduler.state_dict()
    state = [dict(optimizer.state.get(p, {})) for p in parameters]
    rates = {key: value for key, value in schedule.items() if key != "lr_lambdas"}
    parts = [dict(module.policy.state_dict()), parameters, state, rates, int(module.ppo.ppo_step)]
    return tree_map(lambda v: local_part(v) if isinstance(v, Tensor) else v, parts)


def _equal(one: Any, other: Any) -> bool:
    """Equal to the bit, however nested."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def ppo_run(root: Path, folder: Path, iterations: int, size: int = SAMPLES, **options: Any) -> Run:
    """Train; `trainer` among the options holds arguments of the Trainer."""
    arguments = options.pop("trainer", {})
    module, data = stage_run("ppo", root, size, **{**OPTIONS, **options})
    logged, witness = Logged(), Witness()
    fit_module(
        module, data, folder, max_epochs=iterations, callbacks=[logged, witness], **arguments
    )
    return Run(logged.steps, copy_state(module), witness.squares, witness.untouched, witness.steps)


def on_a_rank(
    rank: int,
    root: Path,
    folder: Path,
    iterations: int,
    ranks: int = RANKS,
    strategies: tuple[str, ...] = STRATEGIES,
) -> dict[str, Run]:
    """Run this rank's share of the rollouts under each strategy, in micro-batches of one row."""
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    runs, shared = {}, {"devices": ranks, "use_distributed_sampler": False}
    for name in strategies:
        options = {"micro_batch_size": 1, "trainer": {"strategy": strategy(name), **shared}}
        runs[name] = ppo_run(root, folder / name, iterations, SAMPLES // ranks, **options)
    return runs
