"""PPO updates of TRL 1.12, in their own process and environment.

    TRL_PYTHON -m benchmarks.speed.peer_trl JOB.json RESULT.json

TRL has its defaults, except that gradient checkpointing, sample generations, printed logs and
checkpoints are off, which would cost it time. All rollouts are one batch per device, cut into
minibatches with an optimizer step each; in several accumulated batches, accelerate would step once.
"""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
import transformers
import trl.experimental.ppo.ppo_trainer as ppo
from datasets import Dataset
from transformers import (
    AutoTokenizer,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

from benchmarks.speed.job import Job, Laps
from benchmarks.speed.machine import synchronize
from benchmarks.speed.workload import (
    DTYPES,
    PAD,
    Workload,
    bias_lm_head,
    left_padded,
    prompts,
    response_lengths,
    scalar_network,
)

PACKAGES = ("trl", "torch", "transformers", "accelerate", "datasets")
ROLLOUTS_AT_ONCE = 32


class LapCallback(TrainerCallback):
    """Records every update in `laps`, cut into phases.

    Generation is TRL's `batch_generation`, the update begins with the first forward pass of policy
    and critic together, and the time between them is scoring.
    """

    def __init__(self, laps: Laps, work: Workload) -> None:
        self.laps = laps
        self.work = work
        self.moments: dict[str, float] = {}
        self.lengths: tuple[list[int], list[int]] = ([], [])
        self.generate = ppo.batch_generation

    def batch_generation(self, model: Any, queries: torch.Tensor, *rest: Any) -> Any:  # noqa: ANN401
        """Time TRL's function of this name, and count the tokens of its prompts and responses.

        Args:
            model: The policy.
            queries: Ids of the prompts, `[B, P]`, padded on the left.
            *rest: Its other arguments.
        """
        self.moments = {"generation": synchronize()}
        sequences, scores = self.generate(model, queries, *rest)
        self.moments["scoring"] = synchronize()
        responses = sequences[:, queries.shape[1] :]
        self.lengths = (
            queries.ne(PAD).sum(1).tolist(),
            response_lengths(responses, self.work.mode == "ragged"),
        )
        return sequences, scores

    def before_forward(self, *_: object) -> None:
        """Record when the update begins."""
        if "update" not in self.moments:
            self.moments["update"] = synchronize()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clocks."""
        self.laps.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Record an update's phases and lengths."""
        at, end = self.moments, synchronize()
        phases = {
            "rollout": at["scoring"] - at["generation"],
            "score": at["update"] - at["scoring"],
            "update": end - at["update"],
        }
        self.laps.lap(phases, *self.lengths)


def config(job: Job) -> PPOConfig:
    """TRL's arguments for the job."""
    work = job.work
    return PPOConfig(
        output_dir=str(Path(job.folder) / "peer"),
        use_cpu=job.device == "cpu",
        bf16=job.precision == "bf16-mixed",
        seed=work.seed,
        per_device_train_batch_size=work.batch,
        gradient_accumulation_steps=1,
        num_mini_batches=work.batch // work.minibatch,
        num_ppo_epochs=1,
        total_episodes=work.batch * job.steps,
        local_rollout_forward_batch_size=min(ROLLOUTS_AT_ONCE, work.batch),
        response_length=work.response,
        temperature=1.0,
        kl_coef=0.05,
        learning_rate=3e-6,
        stop_token="eos" if work.mode == "ragged" else None,
        gradient_checkpointing=False,
        num_sample_generations=0,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def run(job: Job) -> Laps:
    """Run the job's updates."""
    folder, work = Path(job.folder), job.work
    dtype = DTYPES[job.precision]
    policy = LlamaForCausalLM.from_pretrained(folder / "policy", dtype=dtype)
    bias_lm_head(policy, work)
    policy.generation_config.pad_token_id = PAD
    reward = LlamaForSequenceClassification.from_pretrained(folder / "reward", dtype=dtype)
    value = scalar_network(work, dtype)
    batches = prompts(work, job.steps)
    laps = Laps(job.device)
    callback = LapCallback(laps, work)
    ppo.batch_generation = callback.batch_generation
    if job.precision == "bf16-mixed":
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"  # its Accelerator is not told of `bf16`
    trainer = PPOTrainer(
        args=config(job),
        processing_class=AutoTokenizer.from_pretrained(folder / "policy"),
        model=policy,
        ref_model=copy.deepcopy(policy),
        reward_model=reward,
        value_model=value,
        train_dataset=Dataset.from_dict({"input_ids": [r.tolist() for b in batches for r in b]}),
        callbacks=[callback],
    )
    # the same prompts in the same order as on the other sides: TRL would shuffle them
    trainer.dataloader = [{"input_ids": left_padded(rows)} for rows in batches]
    trainer.log = lambda *_, **__: None
    trainer.model.register_forward_pre_hook(callback.before_forward)
    trainer.train()
    return laps


def main(job_file: str, result_file: str) -> None:
    """Run a job and write its result."""
    job = Job.load(Path(job_file))
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    run(job).save(Path(result_file), job, PACKAGES)


if __name__ == "__main__":
    main(*sys.argv[1:])
