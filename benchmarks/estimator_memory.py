"""Peak memory of PPO with a critic, and of RLOO without one, at 135 million parameters.

    python -m benchmarks.estimator_memory run MODEL REWARD_MODEL PROMPTS FOLDER
    python -m benchmarks.estimator_memory report

Each run is a process on the CPU: one iteration of `configs/smollm2/ppo.yaml` in float32, on 16
responses of at most 48 tokens, without critic pre-training, in two updates of each network. The
peak is the resident memory of the process in the iteration, `memory/*` in its log. The rewards are
a rule, or a reward model of the policy's size. The micro-batches of an update are the default's,
about 1 GiB of activations on a CPU, or of at most 256 tokens, without and with gradient
checkpointing, in both arms.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli

from experiments.processes import Job
from experiments.results_file import read_runs, table, write_run
from lit_callbacks import read_logged_steps

RESULTS = Path(__file__).parent / "results" / "estimator_memory.jsonl"
ARMS: dict[str, dict[str, Any]] = {
    "PPO": {"responses_per_prompt": 2},
    "RLOO": {"responses_per_prompt": 2, "advantages.estimator": "rloo"},
}
MICRO_BATCHES: dict[str, dict[str, Any]] = {
    "about 1 GiB": {},
    "256 tokens": {"minibatches.micro_batch_tokens": 256},
    "256 tokens, recomputed": {
        "minibatches.micro_batch_tokens": 256,
        "network.gradient_checkpointing": True,
    },
}
REWARDS = ("a rule", "a reward model")


def run(model: str, reward_model: str, prompts: str, folder: str) -> None:
    """Measure every arm that has no result yet.

    Args:
        model: Folder of SmolLM2-135M-Instruct or an SFT model of it, which policy, critic and
            reference start from.
        reward_model: Folder of a reward model of the same size.
        prompts: File of HH-RLHF.
        folder: Folder for logs.
    """
    cases = itertools.product(REWARDS, MICRO_BATCHES, ARMS)
    for rewards, micro_batches, arm in cases:
        name = f"{arm}, {rewards}, {micro_batches}"
        if name in read_runs(RESULTS):
            continue
        source = (
            {reward_model: 1.0}
            if rewards == REWARDS[1]
            else {"length": {"rule": "length", "longest": 20}}
        )
        options: dict[str, Any] = {
            "model_path": model,
            "rewards": json.dumps(source),
            "critic_init": "policy",
            "critic_pretraining.iterations": 0,
            "output_dir": f"{folder}/model",
            **ARMS[arm],
            **MICRO_BATCHES[micro_batches],
        }
        command = ["lit_rlhf.cli.main", "fit", "--config", "smollm2/ppo", "--overwrite"]
        command += [f"--model.init_args.{key}={value}" for key, value in options.items()]
        command += [f'--data.init_args.train_sources=[{{"path": "{prompts}"}}]']
        command += ["--data.init_args.batch_size=8", "--data.init_args.samples_per_epoch=8"]
        logs = Path(folder, "logs", name.replace(" ", "_"))
        logger = {"save_dir": folder, "name": "logs", "version": logs.name}
        command += [f"--trainer.logger.init_args.{key}={value}" for key, value in logger.items()]
        command += ["--trainer.callbacks=[]", "--trainer.enable_checkpointing=false"]
        command += ["--trainer.limit_val_batches=0"]
        print(name, flush=True)
        Job(command, logs.with_suffix(".txt")).run()
        steps = read_logged_steps(str(logs)).values()
        peak = max(v for step in steps for key, v in step.items() if key.startswith("memory/"))
        write_run(RESULTS, name, {"peak_gib": round(peak, 2)})


def report() -> None:
    """Print the table of docs/estimators.md."""
    print(format_table(read_runs(RESULTS)), end="")


def format_table(results: dict[str, dict[str, Any]]) -> str:
    """Format the peaks of both arms, and RLOO's share of PPO's peak.

    Args:
        results: Results of `run` by arm, rewards and micro-batches. `peak_gib` is in GiB.
    """
    rows = []
    for rewards, micro_batches in itertools.product(REWARDS, MICRO_BATCHES):
        peaks = [results[f"{arm}, {rewards}, {micro_batches}"]["peak_gib"] for arm in ARMS]
        cells = [f"{peak:.2f} GiB" for peak in peaks]
        rows.append([rewards, micro_batches, *cells, f"{peaks[1] / peaks[0]:.2f}"])
    return table(["rewards", "activations of a micro-batch", *ARMS, "share"], rows)


if __name__ == "__main__":
    auto_cli([run, report])
