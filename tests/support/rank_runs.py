"""What each of two ranks runs: all stages under DDP and with one DeepSpeed engine per network.

One spawn does everything, since importing takes longer than the runs.
"""

import os
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lit_callbacks import CollapseDetector, Monitor, RollBack
from lit_rlhf.modules import PPOModule, RewardModule, SFTModule
from lit_rlhf.strategies import MultiEngineDeepSpeedStrategy, ShardedStrategy, optimization
from tests.support import stages
from tests.support.host_tensors import host_tensors_in_collectives
from tests.support.reference_estimators import run_step
from tests.support.reference_iteration import run_iteration
from tests.support.rollout_metrics import compute_metrics
from tests.support.trajectories import (
    SAMPLES,
    Logged,
    Scripted,
    ScriptedPPO,
    Trajectory,
    run_validation,
    trajectory,
)

STAGES = ("sft", "reward", "ppo")
STRATEGIES = ("ddp", "deepspeed", "fsdp2")
RANKS = 2
MICRO_BATCH_TOKENS = 60
LORA: dict[str, Any] = {"network": {"lora_rank": 2}}
VARIANTS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "shared": {"critic_init": "shared", "policy_optimizer.learning_rate": 3e-4},
}
"""Options of PPO by variant."""
TRUNCATION = "mask"
"""What an iteration on ranks does with responses that were cut off: the ranks then learn from
different numbers of tokens. One process tries all ways, see `test_reference_iteration`."""
ESTIMATORS = {
    "ddp": ("grpo", "dr_grpo", "reinforce_plus_plus"),
    "deepspeed": ("grpo", "reinforce_plus_plus"),
}
"""Estimators by strategy: each way to average a loss over ranks. One process tries all."""
BATCH_SIZE = 3  # in validation: the eight rows make batches of three and one on each rank


def strategy(name: str) -> DDPStrategy:
    if name != "deepspeed":
        return DDPStrategy() if name == "ddp" else ShardedStrategy()
    return MultiEngineDeepSpeedStrategy(stage=2)


class UnlikeLosses(ScriptedPPO):
    """Reports a value loss of 0 on rank 0 and of 8 on rank 1."""

    def train_critic(self, *arguments: Any) -> dict[str, Tensor]:
        totals = super().train_critic(*arguments)
        return totals | {"ppo/value_loss": torch.tensor(8.0 * torch.distributed.get_rank())}


class Batches(Callback):
    """Records this rank's batches, each a list of (ids, completion mask) of its rows."""

    def __init__(self) -> None:
        self.rows: list[list[tuple[Tensor, Tensor]]] = []

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, index: int) -> None:
        side = getattr(batch, "chosen", batch)
        self.rows.append([(ids[r].clone(), w[r].clone()) for ids, r, w in zip(*side, strict=True)])


def on_a_rank(rank: int, root: Path, folder: Path) -> dict[str, Any]:
    """Run all scenarios on this rank, and return its results by scenario."""
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    optimization.BUCKET_SIZE = 2000  # so that gradients take several buckets
    shared = {"devices": RANKS, "use_distributed_sampler": False}
    results: dict[str, Any] = {}
    with host_tensors_in_collectives() as results["host tensors"]:
        for stage in STAGES:
            options: dict[str, Any] = {"strategy": strategy("ddp"), **shared}
            own, place = SAMPLES // RANKS, folder / "ddp" / stage
            results[f"ddp {stage}"] = trajectory(stage, root, place, own, trainer=options)
            options = {"strategy": strategy("ddp"), **shared}
            place = folder / "validated"
            results[f"validated {stage}"] = run_validation(
                stage, root, place, BATCH_SIZE, **options
            )
    options = {"trainer": {"strategy": strategy("ddp"), **shared}, "meta_rate": 0.3}
    results["meta"] = trajectory("reward", root, folder / "meta", SAMPLES // RANKS, **options)
    for stage in STAGES:
        # the ranks have different numbers of micro-batches
        for name in ("deepspeed", "fsdp2"):
            arguments = {"strategy": strategy(name), **shared}
            options = {"micro_batch_tokens": MICRO_BATCH_TOKENS, "trainer": arguments}
            place = folder / name / stage
            results[f"{name} {stage}"] = trajectory(stage, root, place, SAMPLES // RANKS, **options)
    iterations = results["iterations"] = {}
    for name in STRATEGIES:
        options = {"strategy": strategy(name), **shared}
        place = folder / f"{name} iteration"
        iterations[name] = run_iteration(root, place, TRUNCATION, RANKS, **options)
    steps = results["estimators"] = {}
    for name, estimators in ESTIMATORS.items():
        for estimator in estimators:
            key, options = f"{name} {estimator}", {"strategy": strategy(name), **shared}
            steps[key] = run_step(root, folder / key, estimator, TRUNCATION, RANKS, **options)
    results["variants"] = {
        f"{name} {variant}": run_variant(name, variant, root, folder, **shared)
        for name, variant in product(("ddp", "fsdp2"), VARIANTS)
    }
    results["bf16"] = run_variant("fsdp2", "lora", root, folder, precision="bf16-mixed", **shared)
    results["dynamic"] = dynamic_batches(root, folder, shared)
    results["pretraining"] = pretraining(root, folder, shared)
    results["traffic"] = traffic(root, folder, shared)
    results["metrics"] = compute_metrics((slice(0, 1), slice(1, 3))[rank])
    return results


class Variant(NamedTuple):
    """A run of PPO in a variant.

    Attributes:
        trajectory: Its metrics and weights.
        n_roll_backs: How often it went back to the weights of an earlier iteration.
    """

    trajectory: Trajectory
    n_roll_backs: int


def run_variant(name: str, variant: str, root: Path, folder: Path, **trainer: Any) -> Variant:
    """Run five iterations in a variant, with responses of the policy.

    The fourth one, the first that is judged, sends the run back to the end of the first.
    """
    logged = Logged()
    module = PPOModule(**stages.ppo_options(root, **VARIANTS[variant]))
    monitor = Monitor("rollout/kl", high=-100.0, warmup=3, patience=1, horizon=0)
    back = RollBack(times=1, every_n_steps=1, keep=["iteration"])
    stages.fit_module(
        module,
        stages.prompts(root, batch_size=4),
        folder / f"{name} {variant} {trainer.get('precision', '')}",
        callbacks=[logged, CollapseDetector(monitors=[monitor], actions=[back])],
        strategy=strategy(name),
        max_epochs=5,
        enable_checkpointing=True,
        **trainer,
    )
    return Variant(Trajectory(logged.steps, stages.copy_state(module)), back.done)


def dynamic_batches(root: Path, folder: Path, shared: dict[str, Any]) -> dict[str, Any]:
    """Gradients of the first step on batches of unequal size, in micro-batches of one row."""
    sizes, seen = {"batch_size": 1, "tokens_per_batch": 90}, {}
    for name, module, data in (
        ("sft", SFTModule, stages.demonstrations(root, **sizes)),
        ("reward", RewardModule, stages.preferences(root, **sizes)),
    ):
        recorder, batches = stages.StepRecorder(), Batches()
        made = module(str(root / "policy"), micro_batch_size=1, optimizer={"grad_clip": None})
        options = {"callbacks": [recorder, batches], "strategy": strategy("ddp"), **shared}
        stages.fit_module(made, data, folder / f"dynamic {name}", **options)
        (steps,) = recorder.steps.values()
        seen[name] = {"gradients": steps[0], "rows": batches.rows}
    return seen


class ReducedByDDP(Callback):
    """Counts the gradients that DDP itself reduces."""

    def __init__(self) -> None:
        self.numbers = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model: Any = trainer.strategy.model
        model.register_comm_hook(None, lambda _, bucket: self.reduce(bucket))

    def reduce(self, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
        self.numbers += bucket.buffer().numel()
        return default_hooks.allreduce_hook(distributed.group.WORLD, bucket)


def traffic(root: Path, folder: Path, shared: dict[str, Any]) -> dict[str, Any]:
    """Count the numbers reduced in an iteration: one update of each network, two micro-batches."""
    counted, reduced = ReducedByDDP(), []
    all_reduce = distributed.all_reduce

    def spy(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        reduced.append(tensor.numel())
        return all_reduce(tensor, *arguments, **named)

    sizes = {"minibatch_size": 4, "micro_batch_size": 2, "ppo_epochs": 1}
    options = stages.ppo_options(root, minibatches=sizes, critic_pretraining={"iterations": 0})
    module = Scripted(**options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "all_reduce", spy)
        patch.setattr(optimization, "BUCKET_SIZE", 2**25)  # one bucket
        options = {"callbacks": [counted], "limit_train_batches": 1, "strategy": strategy("ddp")}
        data = stages.prompts(root, batch_size=4)
        stages.fit_module(module, data, folder / "traffic", **options, **shared)
    networks = (module.critic, module.policy)
    return {
        "by DDP": counted.numbers,
        "large": [n for n in reduced if n > 1000],
        "networks": [sum(p.numel() for p in network.parameters()) for network in networks],
    }


def pretraining(root: Path, folder: Path, shared: dict[str, Any]) -> list[bool]:
    """Whether the critic is still in pre-training after each of three iterations."""
    phase, states = {"iterations": 3, "target_value_loss": 1.0}, list[bool]()
    options = stages.ppo_options(root, critic_pretraining=phase)
    module = stages.with_algorithm(UnlikeLosses)(**options)
    ends = {"on_train_batch_end": lambda *_: states.append(module.ppo.in_critic_pretraining())}
    options = {"max_epochs": 3, "callbacks": [LambdaCallback(**ends)], **shared}
    options["strategy"] = strategy("ddp")
    stages.fit_module(module, stages.prompts(root, batch_size=4), folder / "pretraining", **options)
    return states
