"""PPO updates of lit_rlhf, in their own process.

python -m benchmarks.speed.ours JOB.json RESULT.json
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.speed.job import Job, Laps
from benchmarks.speed.workload import PAD, Precision, Workload, bias_lm_head, prompts
from lit_rlhf.data import PromptBatch, PromptExample, collate_prompts
from lit_rlhf.models import ModelOptions
from lit_rlhf.modules import (
    AdvantageOptions,
    CriticPretrainingOptions,
    MinibatchOptions,
    OptimizerOptions,
    PPOModule,
    RewardShapingOptions,
)
from lit_rlhf.rollout import SamplingOptions

PACKAGES = ("lit-rlhf", "torch", "lightning", "transformers")
MODULE_ARGUMENTS: dict[str, Any] = {
    # what TRL computes: whitened advantages, no reward normalization, no clipping of rewards
    # or gradients, and no critic pre-training
    "critic_init": "random",
    "reward_shaping": RewardShapingOptions(kl_coef=0.05, normalization=False, clip=None),
    "advantages": AdvantageOptions(lam=0.95, normalization=True),
    "critic_pretraining": CriticPretrainingOptions(iterations=0),
    "policy_optimizer": OptimizerOptions(3e-6, lr_scheduler="constant", grad_clip=None),
    "critic_optimizer": OptimizerOptions(3e-6, lr_scheduler="constant", grad_clip=None),
}
"""Arguments of `PPOModule` that do not depend on the workload."""
PRECISIONS: dict[Precision, dict[str, Any]] = {
    "fp32": {"precision": "32-true"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
}
"""Arguments of `Trainer` by precision."""


def build_loader(work: Workload, iterations: int) -> DataLoader[PromptBatch]:
    """Build a loader that gives a batch of prompts for each iteration.

    Args:
        work: Number and length of the prompts.
        iterations: Number of batches.
    """
    batches = [
        collate_prompts(
            [PromptExample(row, text="", index=index) for index, row in enumerate(rows)], PAD
        )
        for rows in prompts(work, iterations)
    ]
    return DataLoader(cast(Any, batches), batch_size=None, collate_fn=lambda batch: batch)


def model_options(job: Job) -> ModelOptions:
    """Options of the job's networks."""
    return ModelOptions(
        dtype="bfloat16" if job.precision == "bf16-true" else "float32",
        lora_rank=job.lora_rank,
        fused_kernels=job.kernels in ("fused", "both"),
        torch_compile="inductor" if job.kernels in ("compiled", "both") else None,
    )


class UnsavedPPO(PPOModule):
    """Writes no finished model, which takes longer than an update of a billion weights."""

    def write_finished(self, folder: Path) -> None:
        """Write nothing."""


def build_module(job: Job) -> PPOModule:
    """Build the module, with output layers that end responses as the workload says."""
    folder, work = Path(job.folder), job.work
    module = UnsavedPPO(
        str(folder / "policy"),
        {str(folder / "reward"): 1.0},
        # a new folder, because a stage does not replace a folder that another version has saved
        output_dir=str(folder / f"trained_{os.getpid()}"),
        network=model_options(job),
        sampling=SamplingOptions(max_new_tokens=work.response),
        # on a CPU no accumulation, because TRL has none; on CUDA what the module does by default
        minibatches=MinibatchOptions(
            minibatch_size=work.minibatch,
            micro_batch_size=work.minibatch if job.device == "cpu" else None,
        ),
        seed=work.seed,
        **MODULE_ARGUMENTS,
    )
    bias_lm_head(module.policy, work)
    if module.reference is not None:  # with LoRA the reference is the policy without its adapters
        bias_lm_head(cast(nn.Module, module.reference), work)
    return module


class LapCallback(Callback):
    """Records every iteration in `laps`, from the end of one batch to the end of the next.

    The module itself times the phases.
    """

    def __init__(self, laps: Laps) -> None:
        self.laps = laps

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clocks."""
        self.laps.start()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,  # noqa: ANN401  # Lightning's signature
        batch: PromptBatch,
        batch_idx: int,
    ) -> None:
        """Record an iteration's phases and lengths."""
        seconds = {
            name: float(trainer.callback_metrics[f"time/{name}"])
            for name in ("rollout", "score", "estimate", "update")
        }
        # TRL runs reward model, reference and critic in one phase
        phases = {**seconds, "score": seconds["score"] + seconds["estimate"]}
        del phases["estimate"]
        prompts = batch.attention_mask.sum(1).tolist()
        self.laps.lap(phases, prompts, outputs["response_lengths"].tolist())


class LeftOnDevice(SingleDeviceStrategy):
    """Does not move networks and optimizers to the host at the end.

    At a billion weights that takes longer than an update, and nobody needs them there.
    """

    def teardown(self) -> None:
        """Move nothing."""


def build_trainer(job: Job, callback: Callback) -> Trainer:
    """Build a Trainer for one pass over the data that logs, shows and saves nothing.

    Args:
        job: Its device, strategy and precision.
        callback: Records the updates.
    """
    one_device = LeftOnDevice("cuda:0" if job.device == "cuda" else "cpu")
    return Trainer(
        max_epochs=1,
        accelerator="gpu" if job.device == "cuda" else "cpu",
        strategy=job.strategy or one_device,
        devices=1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **PRECISIONS[job.precision],
    )


def run(job: Job) -> Laps:
    """Run the job's updates with the stage's own training step."""
    laps = Laps(job.device)
    batches = build_loader(job.work, job.steps)
    build_trainer(job, LapCallback(laps)).fit(build_module(job), train_dataloaders=batches)
    return laps


def main(job_file: str, result_file: str) -> None:
    """Run a job and write its result."""
    job = Job.load(Path(job_file))
    run(job).save(Path(result_file), job, PACKAGES)


if __name__ == "__main__":
    main(*sys.argv[1:])
