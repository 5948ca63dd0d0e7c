"""Tiny policies, a reward model and prompts on disk, and rewards as functions."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lit_rlhf.data import DialogueEncoder
from lit_rlhf.models import load_scalar_model, save_model_folder
from lit_rlhf.rollout import RolloutBatch, generate_responses
from tests.support.tiny_models import tiny_causal_lm, tiny_tokenizer

QUESTIONS = ["hi", "name three metals, please, now", "a", "make tea", "name two", "why?", "ok"]
CHOICE_RECORDS: list[dict[str, Any]] = [
    {"question": "One and one?", "choices": ["one", "two"], "answer": "B", "subject": "sums"},
    {"question": "What is {{ 1 }}?", "choices": ["a", "b", "c"], "answer": 0, "subject": "sums"},
    {"question": "说出金属", "choices": [*"铁水木火"], "answer": "a", "subject": "metals"},
    {"question": "Zinc?", "choices": ["no", "yes", "so"], "answer": 1, "subject": "metals"},
    {"question": "Why?", "choices": ["so", "no", "yes", "ok"], "answer": "D", "subject": "sums"},
    {"question": "Tea?", "choices": ["yes", "no"], "answer": "A", "subject": "sums"},
]
"""Records of a benchmark's file of multiple-choice questions."""


class Folders(NamedTuple):
    """Paths of models and prompts that tests of the evaluation share; read only.

    Attributes:
        sft: A policy.
        ppo: A policy with other weights.
        copy: The policy `sft` under another name.
        reward: A reward model.
        prompts: A file of prompts.
    """

    sft: str
    ppo: str
    copy: str
    reward: str
    prompts: str


def write_policy(
    folder: Path, seed: int = 0, template: str = "hh", tokenizer: Any = None, max_length: int = 64
) -> str:
    """A Llama with random weights and the text contract of a policy."""
    tokenizer = tiny_tokenizer() if tokenizer is None else tokenizer
    encoder = DialogueEncoder(tokenizer, template, max_length)
    save_model_folder(tiny_causal_lm(seed=seed), tokenizer, folder, contract=encoder.contract)
    return str(folder)


def write_reward(folder: Path, trunk: str, template: str = "hh") -> str:
    """A scalar model on the trunk of a policy."""
    tokenizer = tiny_tokenizer()
    encoder = DialogueEncoder(tokenizer, template, max_length=64)
    model = load_scalar_model(trunk, head_seed=1)
    save_model_folder(model, tokenizer, folder, contract=encoder.contract)
    return str(folder)


def write_prompts(path: Path, questions: Sequence[str] = QUESTIONS) -> str:
    """One prompt of a single turn per line."""
    return write_lines(path, [{"prompt": [{"role": "user", "content": q}]} for q in questions])


def write_lines(path: Path, records: Sequence[Any]) -> str:
    """A JSON lines file."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return str(path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON lines file."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def refusal(main: Callable[[list[str]], Any], argv: list[str]) -> str:
    """Run a command that must fail, and return its message."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    return str(ended.value.code)


def assert_continued(folder: Path) -> None:
    """Assert that a command continued after an interruption wrote the same as one whole run."""
    assert (folder / "out.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()
    made = {"out.jsonl", "whole.jsonl", *(f".{n}.jsonl.lit_rlhf.json" for n in ("out", "whole"))}
    assert {path.name for path in folder.iterdir()} == made


class Sampling:
    """Samples and counts batches, and can raise KeyboardInterrupt in one of them."""

    def __init__(self, last: int | None = None) -> None:
        self.last = last
        self.n_batches = 0

    def __call__(self, *arguments: Any, **options: Any) -> RolloutBatch:
        if self.n_batches == self.last:
            raise KeyboardInterrupt
        self.n_batches += 1
        return generate_responses(*arguments, **options)


def characters(prompts: list[str], responses: list[str]) -> list[float]:
    """Reward: number of characters."""
    return [float(len(response)) for response in responses]


def question_marks(prompts: list[str], responses: list[str], terminated: list[bool]) -> list[float]:
    """Reward: question marks in the prompt, less one for a response that did not end."""
    return [text.count("?") - float(not e) for text, e in zip(prompts, terminated, strict=True)]


CHARACTERS = "tests.support.evaluation_folders:characters"
QUESTION_MARKS = "tests.support.evaluation_folders:question_marks"
