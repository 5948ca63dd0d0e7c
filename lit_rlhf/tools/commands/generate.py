"""`lit_rlhf generate`: sample responses to prompts, or chat."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from rich.console import Console

from lit_rlhf.cli.command import Command
from lit_rlhf.data import DataSource, OnBadRecord, parse_prompts
from lit_rlhf.files import json_lines
from lit_rlhf.models import DType, ModelOptions
from lit_rlhf.rollout import SamplingOptions
from lit_rlhf.tools.evaluation import (
    NOTE_STYLE,
    Generation,
    choose_device,
    generate_from_models,
    print_generation,
    print_text,
    read_prompts,
)
from lit_rlhf.tools.evaluation.chat import Chat, load_speakers

LISTS = {
    "models": "Folders or hub ids of language models.",
    "prompt": "Prompts, each in quotes: a user's message, or a dialogue of '\\n\\nHuman: ...' and "
    "'\\n\\nAssistant: ...' that ends with the user's turn. Before all flags, --prompt may be left "
    "out.",
}
_FLAGS = {
    "chat": "Chat with the models in the terminal. Responses appear as they are sampled. /help in "
    "the chat lists its commands."
}


def generate(
    models: list[str],
    prompts: str | None = None,
    prompt: list[str] | None = None,
    chat: bool = False,
    output: str | None = None,
    responses_per_prompt: int = 1,
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_p: float = 0.9,
    top_k: int = 0,
    repetition_penalty: float = 1.1,
    do_sample: bool = True,
    split: str = "test",
    max_prompts: int | None = None,
    on_bad_record: OnBadRecord = "error",
    max_prompt_length: int | None = None,
    chat_template: str = "tokenizer",
    batch_size: int = 32,
    seed: int = 0,
    device: str = "auto",
    dtype: DType = "float32",
    trust_remote_code: bool = False,
) -> Generation | None:
    """Sample responses of one or more models to prompts from a file or the command line, or chat.

    Args:
        models: Folders or hub ids of language models.
        prompts: File of prompts (.jsonl, .json, .parquet, .jsonl.gz) or id of a dataset on the hub.
            Of preferences and demonstrations the prompts are taken.
        prompt: Prompts on the command line.
        chat: Chat with the models in the terminal.
        output: JSON lines file for the responses with model, settings and seed; - is standard
            output. Finished batches are kept beside the file until it is complete, and the same
            command continues with them. Default: print the responses as text.
        responses_per_prompt: Responses of each model to each prompt.
        max_new_tokens: Longest response in tokens, including EOS.
        temperature: Sampling temperature. Default: the paper's.
        top_p: Sample from the smallest set of tokens with this probability; 1 turns it off.
            Default: the paper's.
        top_k: Sample from this many most probable tokens; 0 turns it off.
        repetition_penalty: Penalty on tokens that occurred before, in the prompt too; 1 turns it
            off. Default: the paper's.
        do_sample: Sample; false always takes the most probable token.
        split: Split of a dataset on the hub, for example test or test[:200]; not used for files.
        max_prompts: Use only this many prompts of the file, from the first. Default: all.
        on_bad_record: What to do about a record without a usable prompt: error names its file and
            line and ends the command, skip leaves it out and logs how many there are.
        max_prompt_length: Longest prompt, and longest memory of a chat, in tokens. Longer dialogues
            lose their oldest turns. Default: the model's positions less max_new_tokens, but no more
            than the longest sequence that it was trained on.
        chat_template: tokenizer for the template in each model's folder, or hh, paper-en, paper-zh.
        batch_size: Prompts per batch. The samples depend on it.
        seed: Seed of the sampling, the same for every model.
        device: auto, cpu, cuda, cuda:1 and so on.
        dtype: Type of all weights: float32, bfloat16 or float16.
        trust_remote_code: Run code that comes with a model. Leave off unless you have read it.
    """
    sampling = SamplingOptions(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        repetition_penalty=repetition_penalty,
        do_sample=do_sample,
    )
    model_options = ModelOptions(dtype=dtype, trust_remote_code=trust_remote_code)
    _check_one_source(prompts, prompt, chat)
    if chat:
        if output is not None or responses_per_prompt != 1:
            raise ValueError(
                "output, responses_per_prompt: expected neither with --chat, which shows one "
                "response of each model"
            )
        speakers = load_speakers(
            models, sampling, model_options, choose_device(device), chat_template, max_prompt_length
        )
        _run_chat(Chat(speakers, sampling, Console(), seed))
        return None
    if prompts is not None:
        records = read_prompts(DataSource(prompts, split=split), max_prompts, on_bad_record)
    else:
        records = parse_prompts(prompt or [])
    generation = generate_from_models(
        models,
        records,
        sampling,
        model_options,
        choose_device(device),
        batch_size=batch_size,
        responses_per_prompt=responses_per_prompt,
        chat_template=chat_template,
        max_prompt_length=max_prompt_length,
        seed=seed,
        output=None if output == "-" else output,
        on_bad_record=on_bad_record,
    )
    for name, number in generation.shortened.items():
        if number:
            # standard output may be a file of records
            print(f"{name}: {number} prompts were shortened to fit its length.", file=sys.stderr)
    if output is None:
        print_generation(generation)
    elif output == "-":
        print(json_lines(generation.records()), end="")
    else:
        print(f"Responses: {output}")
    return generation


def _run_chat(chat: Chat) -> None:
    """Run a chat with the user at the terminal, or with the lines of a file or a pipe."""
    console = chat.console

    def read_typed() -> str:
        return input("\nyou: ")

    def read_piped() -> str:
        line = input()
        print_text(console, f"\nyou: {line}")
        return line

    if not sys.stdin.isatty():
        chat.run(read_piped)
        return
    if sys.stdout.isatty():
        importlib.import_module("readline")  # input() then edits lines and keeps a history
    names = ", ".join(speaker.name for speaker in chat.speakers)
    print_text(
        console, f"A chat with {names}. /help lists the commands, Ctrl-D ends it.", NOTE_STYLE
    )
    chat.run(read_typed)
    print_text(console, "")


def _check_one_source(prompts: str | None, prompt: list[str] | None, chat: bool) -> None:
    given = [
        name for name, value in (("prompts", prompts), ("prompt", prompt), ("chat", chat)) if value
    ]
    if len(given) != 1:
        raise ValueError(
            "prompts, prompt, chat: expected exactly one of them (--prompts FILE, "
            f"--prompt 'TEXT' or --chat), got {' and '.join(given) or 'none'}; a prompt "
            "without a flag goes first: lit_rlhf generate 'TEXT' --models FOLDER"
        )


COMMAND = Command(generate, lists=LISTS, flags=_FLAGS, first="prompt")


def main(argv: Sequence[str]) -> Generation | None:
    """Entry point of `lit_rlhf generate`; words before the first flag are prompts."""
    generation: Generation | None = COMMAND.run(argv, "lit_rlhf generate")
    return generation
