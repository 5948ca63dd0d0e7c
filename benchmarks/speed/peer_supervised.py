"""Steps of TRL's SFTTrainer or RewardTrainer, in their own process and environment.

    TRL_PYTHON -m benchmarks.speed.peer_supervised JOB.json RESULT.json

TRL has its defaults (SFT computes logits of completions only), except that gradient checkpointing,
printed logs and checkpoints are off, which would cost it time.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from datasets import Dataset
from transformers import (
    AutoTokenizer,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    TrainerCallback,
)
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from benchmarks.speed.job import Job, Laps
from benchmarks.speed.peer_trl import PACKAGES
from benchmarks.speed.workload import DTYPES, completions, prompts


class Lengths(NamedTuple):
    """Tokens of the sequences of a step.

    Attributes:
        prompts: Of each sequence's prompt.
        responses: Of each sequence's response.
    """

    prompts: list[int]
    responses: list[int]


class LapCallback(TrainerCallback):
    """Records every step in `laps`."""

    def __init__(self, laps: Laps, lengths: list[Lengths]) -> None:
        self.laps = laps
        self.lengths = iter(lengths)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clocks at the first step."""
        if not self.laps.started:
            self.laps.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Record a step's lengths."""
        self.laps.lap({}, *next(self.lengths))


def arguments(job: Job) -> dict[str, Any]:
    """Arguments that both of TRL's trainers take."""
    return {
        "output_dir": str(Path(job.folder) / "peer"),
        "use_cpu": job.device == "cpu",
        "bf16": job.precision == "bf16-mixed",
        "seed": job.work.seed,
        "per_device_train_batch_size": job.work.batch,
        "max_steps": job.steps,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "max_length": None,
        "train_sampling_strategy": "sequential",
        "gradient_checkpointing": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def sft(job: Job, laps: Laps) -> SFTTrainer:
    """Build TRL's SFT trainer on prompts with one response each.

    Args:
        job: What to train on.
        laps: Records the steps.
    """
    rows, lengths = [], []
    data = zip(prompts(job.work, job.steps), completions(job.work, job.steps, 1), strict=True)
    for questions, answers in data:
        lengths.append(Lengths([len(q) for q in questions], [len(a[0]) for a in answers]))
        rows += [
            {
                "input_ids": [*question.tolist(), *answer.tolist()],
                "completion_mask": [0] * len(question) + [1] * len(answer),
            }
            for question, [answer] in zip(questions, answers, strict=True)
        ]
    folder = Path(job.folder) / "policy"
    return SFTTrainer(
        LlamaForCausalLM.from_pretrained(folder, dtype=DTYPES[job.precision]),
        SFTConfig(**arguments(job), completion_only_loss=True),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
        callbacks=[LapCallback(laps, lengths)],
    )


def reward(job: Job, laps: Laps) -> RewardTrainer:
    """Build TRL's reward trainer on pairs of responses.

    Args:
        job: What to train on.
        laps: Records the steps.
    """
    rows, lengths = [], []
    data = zip(prompts(job.work, job.steps), completions(job.work, job.steps, 2), strict=True)
    for questions, pairs in data:
        lengths.append(
            Lengths(
                [len(q) for q in questions] * 2,
                [len(pair[side]) for side in (0, 1) for pair in pairs],
            )
        )
        rows += [
            {
                "chosen_ids": [*question.tolist(), *chosen.tolist()],
                "rejected_ids": [*question.tolist(), *rejected.tolist()],
            }
            for question, (chosen, rejected) in zip(questions, pairs, strict=True)
        ]
    folder = Path(job.folder) / "reward"
    return RewardTrainer(
        LlamaForSequenceClassification.from_pretrained(folder, dtype=DTYPES[job.precision]),
        RewardConfig(**arguments(job)),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
        callbacks=[LapCallback(laps, lengths)],
    )


def run(job: Job) -> Laps:
    """Run the job's steps."""
    laps = Laps(job.device)
    trainer = sft(job, laps) if job.stage == "sft" else reward(job, laps)
    trainer.train()
    return laps


def main(job_file: str, result_file: str) -> None:
    """Run a job and write its result."""
    job = Job.load(Path(job_file))
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    run(job).save(Path(result_file), job, PACKAGES)


if __name__ == "__main__":
    main(*sys.argv[1:])
