"""Steps of lit_rlhf's SFT or reward model, in their own process.

python -m benchmarks.speed.ours_supervised JOB.json RESULT.json
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.data import DataLoader

from benchmarks.speed.job import Job, Laps
from benchmarks.speed.ours import PACKAGES, build_trainer, model_options
from benchmarks.speed.workload import PAD, completions, prompts
from lit_rlhf.data import PreferenceBatch, TokenBatch, TokenExample, collate_tokens
from lit_rlhf.modules import OptimizerOptions, RewardModule, SFTModule

COMMON: dict[str, Any] = {"optimizer": OptimizerOptions(1e-5, lr_scheduler="constant")}
MODULE_ARGUMENTS: dict[str, dict[str, Any]] = {
    "sft": COMMON,
    "reward": {**COMMON, "lm_coef": 0.0},
}
"""Arguments of `SFTModule` and `RewardModule`: TRL's losses (only Eq. 1 for the reward model)."""


def collate_dialogues(rows: Sequence[torch.Tensor], answers: Sequence[torch.Tensor]) -> TokenBatch:
    """Collate prompts with one response each.

    Args:
        rows: Ids of each prompt, `[P]`.
        answers: Ids of each response, `[T]`.
    """
    examples = [
        TokenExample(
            torch.cat([row, answer]),
            torch.cat([torch.zeros(len(row)), torch.ones(len(answer))]).bool(),
        )
        for row, answer in zip(rows, answers, strict=True)
    ]
    return collate_tokens(examples, PAD)


def build_batches(job: Job) -> list[TokenBatch] | list[PreferenceBatch]:
    """Build one batch for every optimizer step."""
    work, steps = job.work, job.steps
    if job.stage == "sft":
        return [
            collate_dialogues(rows, [of_row[0] for of_row in answers])
            for rows, answers in zip(prompts(work, steps), completions(work, steps, 1), strict=True)
        ]
    return [
        PreferenceBatch(
            collate_dialogues(rows, [chosen for chosen, _ in pairs]),
            collate_dialogues(rows, [rejected for _, rejected in pairs]),
            margin=torch.zeros(len(rows)),
            source=torch.zeros(len(rows), dtype=torch.long),
        )
        for rows, pairs in zip(prompts(work, steps), completions(work, steps, 2), strict=True)
    ]


def lengths(batch: TokenBatch | PreferenceBatch) -> tuple[list[int], list[int]]:
    """Count the tokens of each sequence's prompt and response.

    Args:
        batch: A batch. Of pairs, the chosen sequences come first, then the rejected ones.
    """
    if isinstance(batch, PreferenceBatch):
        (prompts_a, a), (prompts_b, b) = lengths(batch.chosen), lengths(batch.rejected)
        return prompts_a + prompts_b, a + b
    responses = batch.completion_mask.sum(1)
    return (batch.attention_mask.sum(1) - responses).tolist(), responses.tolist()


def run(job: Job) -> Laps:
    """Run the job's steps."""
    laps = Laps(job.device)
    stage = SFTModule if job.stage == "sft" else RewardModule
    module = stage(
        str(Path(job.folder) / "policy"),
        # a new folder, because a stage does not replace a folder that another version has saved
        output_dir=str(Path(job.folder) / f"trained_{os.getpid()}"),
        network=model_options(job),
        **MODULE_ARGUMENTS[job.stage],
    )
    data = cast(Any, build_batches(job))
    loader: DataLoader[Any] = DataLoader(data, batch_size=None, collate_fn=lambda batch: batch)
    callback = LambdaCallback(
        on_train_start=lambda *_: laps.start(),
        on_train_batch_end=lambda trainer, module, outputs, batch, *_: laps.lap(
            {}, *lengths(batch)
        ),
    )
    build_trainer(job, callback).fit(module, train_dataloaders=loader)
    return laps


def main(job_file: str, result_file: str) -> None:
    """Run a job and write its result."""
    job = Job.load(Path(job_file))
    run(job).save(Path(result_file), job, PACKAGES)


if __name__ == "__main__":
    main(*sys.argv[1:])
