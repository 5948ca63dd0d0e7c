"""Short runs of the three stages, and their metrics and weights step by step.

How a run is divided (micro-batches, ranks, interruptions) must not change them.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lit_rlhf.data import PromptBatch
from lit_rlhf.modules import PPOModule, RewardModule, SFTModule
from lit_rlhf.ppo import PPO
from lit_rlhf.rollout import RolloutBatch
from tests.support.stages import (
    ADAM_EPS,
    copy_state,
    demonstrations,
    distance,
    fit_module,
    nested,
    ppo_options,
    preferences,
    prompts,
    source,
    trainer,
)
from tests.support.tiny_models import EOS_ID

EPOCHS = 3
SAMPLES = 8


class Trajectory(NamedTuple):
    """What a run logged at each step, and the weights and buffers that it ended with."""

    metrics: list[dict[str, float]]
    state: dict[str, Tensor]


class ScriptedPPO(PPO):
    """Responses of 1 to 6 tokens that depend on the prompt and the iteration alone.

    Sampled ones depend on which prompts are sampled together.
    """

    def rollout(self, batch: PromptBatch, seed: int) -> RolloutBatch:
        n = len(batch.index)
        ids = torch.full((n, 6), self.networks.tokenizer.pad_token_id)
        mask = torch.zeros(n, 6, dtype=torch.bool)
        for row, prompt in enumerate(batch.index.tolist()):
            generator = torch.Generator().manual_seed(100 * int(self.iteration) + prompt)
            length = 1 + (5 * prompt) % 6
            ids[row, :length] = torch.randint(4, 280, (length,), generator=generator)
            mask[row, :length] = True
            if prompt % 2:
                ids[row, length - 1] = EOS_ID
        device = batch.input_ids.device
        return RolloutBatch(
            prompt_ids=batch.input_ids,
            prompt_mask=batch.attention_mask,
            response_ids=ids.to(device),
            response_mask=mask.to(device),
            terminated=(batch.index % 2 == 1).to(device),
        )


class Scripted(PPOModule):
    """PPO on scripted responses."""

    ppo_class = ScriptedPPO


class Logged(Callback):
    """The metrics of each step; times are left out."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        metrics = trainer.callback_metrics.items()
        skipped = ("time/", "throughput/", "memory/", "val/")
        self.steps.append({k: float(v) for k, v in metrics if not k.startswith(skipped)})


def stage_run(stage: str, root: Path, batch_size: int = SAMPLES, **options: Any) -> tuple[Any, Any]:
    """A module and its data; `batch_size` is the size on one rank."""
    limits = {n: options.pop(n, None) for n in ("micro_batch_size", "micro_batch_tokens")}
    usual = {"model_path": str(root / "policy"), **limits}
    usual |= {"optimizer": {"learning_rate": 1e-3, "warmup_ratio": 0.0, "eps": ADAM_EPS}}
    if stage == "sft":
        return SFTModule(**nested(usual, options)), demonstrations(root, batch_size=batch_size)
    if stage == "reward":
        meta = source(root, "preferences") if "meta_rate" in options else None
        data = preferences(root, meta_sources=meta, batch_size=batch_size)
        return RewardModule(**nested(usual, options)), data
    usual = {
        "minibatches": {"minibatch_size": batch_size, **limits},
        "critic_pretraining.iterations": 1,
        "critic_init": "policy",
        "loss": {"ptx_coef": 0.3, "entropy_coef": 0.01},
        "advantages.truncation": "bootstrap",
        "reward_shaping": {"kl_target": 1.0, "kl_horizon": 100},
    }
    ppo = Scripted(**ppo_options(root, **nested(usual, options)))
    return ppo, prompts(root, ptx=True, batch_size=batch_size)


def trajectory(
    stage: str, root: Path, folder: Path, batch_size: int = SAMPLES, **options: Any
) -> Trajectory:
    """Train for `EPOCHS` epochs; `trainer` among the options holds arguments of the Trainer."""
    arguments = options.pop("trainer", {})
    module, data = stage_run(stage, root, batch_size, **options)
    logged = Logged()
    fit_module(module, data, folder, **{"max_epochs": EPOCHS, "callbacks": [logged], **arguments})
    return Trajectory(logged.steps, copy_state(module))


def run_validation(
    stage: str, root: Path, folder: Path, size: int, **arguments: Any
) -> dict[str, Any]:
    """Validate an untrained module; `arguments` are the Trainer's."""
    module, data = stage_run(stage, root, size)
    run = trainer(folder, limit_val_batches=None, **arguments)
    run.validate(module, datamodule=data, verbose=False)
    return {key: float(value) for key, value in run.callback_metrics.items()}


def assert_same_trajectory(actual: Trajectory, expected: Trajectory) -> None:
    """The same metrics at each step and the same weights in the end, up to rounding.

    The tolerances are about ten times what these runs move when their first weights move by one
    unit in the last place: metrics by 1.1e-5 of their size, the KL, a difference of sums of
    log-probs, by 3.8e-6, and weights by 2.3e-6.
    """
    assert len(actual.metrics) == len(expected.metrics) == EPOCHS
    for one, other in zip(actual.metrics, expected.metrics, strict=True):
        assert one.keys() == other.keys()
        unlike = {
            key: (one[key], value)
            for key, value in other.items()
            if one[key] != pytest.approx(value, rel=1e-4, abs=4e-5)
        }
        assert unlike == {}
    assert distance(actual.state, expected.state) < 2e-5
