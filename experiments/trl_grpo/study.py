"""GRPO runs of TRL on a model of a few thousand parameters, with a rule as truth.

    python -m experiments trl_grpo run   # trains what is missing; needs trl

The policy writes up to sixteen letters. The truth is that a response has many different letters.
The proxy counts one letter, so that it is best to write nothing else; in the matched run the proxy
is the truth. `WatchCallback` watches, and a last run of the proxy is stopped by it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed

from experiments.frame import Documents
from experiments.results_file import read_runs, write_run
from lit_callbacks import WatchCallback

RESULT = Path(__file__).with_name("results.jsonl")
KEYS = (
    *("kl", "entropy", "reward", "reward_std", "completions/mean_length"),
    *("completions/clipped_ratio", "rewards/truth/mean", "rewards/truth/std"),
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def truth(completions: list[str], **_: Any) -> list[float]:  # TRL's columns
    """Number of different letters, in ten."""
    return [len({*text} & {*LETTERS}) / 10 for text in completions]


def proxy(completions: list[str], **_: Any) -> list[float]:  # TRL's columns
    """Number of e's, in ten."""
    return [text.count("e") / 10 for text in completions]


def train(folder: Path, name: str, seed: int, stop: str | None = None) -> dict[str, Any]:
    """Train a policy.

    Args:
        folder: Folder for all files of the run.
        name: `proxy` or `truth`: what the policy learns.
        seed: Seed of the weights and of the sampling.
        stop: Level of the verdict at which the run is stopped; None: never.

    Returns:
        Where the run was flagged, and what TRL logged.
    """
    from trl import GRPOConfig, GRPOTrainer  # no dependency of lit_rlhf

    reward = proxy if name == "proxy" else truth
    set_seed(seed)
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", *LETTERS])}
    base = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    base.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=base, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    config = GPT2Config(
        vocab_size=len(words),
        n_layer=2,
        n_head=2,
        n_embd=32,
        n_positions=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    model = GPT2LMHeadModel(config)
    start = folder / "start"
    model.save_pretrained(start)
    tokenizer.save_pretrained(start)
    prompts = Dataset.from_list([{"prompt": a + b} for a in LETTERS for b in LETTERS])
    callback = WatchCallback(stop=stop)
    trainer = GRPOTrainer(
        model=str(start),
        processing_class=tokenizer,
        reward_funcs=[reward, truth] if reward is proxy else [reward],
        train_dataset=prompts,
        callbacks=[callback],
        args=GRPOConfig(
            output_dir=str(folder),
            max_steps=150,
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=16,
            learning_rate=3e-3 if reward is proxy else 1e-3,
            beta=0.001,
            reward_weights=[1.0, 0.0] if reward is proxy else None,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            seed=seed,
            disable_tqdm=True,
        ),
    )
    trainer.train()
    trainer.save_state()
    return {
        "updates": trainer.state.global_step,
        "stopped_by": callback.stopped_by and callback.stopped_by.sentence,
        "steps": [
            {key: round(record[key], 5) for key in KEYS if key in record}
            for record in trainer.state.log_history
            if "kl" in record
        ],
    }


def run() -> None:
    """Train the runs that have no result."""
    runs = [(name, seed, None) for seed in range(3) for name in ("proxy", "truth")]
    for name, seed, stop in [*runs, ("proxy", 0, "collapsed")]:
        label = f"{name}-seed_{seed}" + ("-stopped" if stop else "")
        if label not in read_runs(RESULT):
            with tempfile.TemporaryDirectory() as folder:
                result = train(Path(folder), name, seed, stop)
            print(label, result["updates"], result["stopped_by"], flush=True)
            write_run(RESULT, label, result)


def documents() -> Documents:
    """None: the page of `detector` tells these runs."""
    return {}


COMMANDS = (run,)
