"""`lit_rlhf generate`: responses to prompts, or a chat."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from rich.console import Console

from lit_rlhf.cli.command import run_command
from lit_rlhf.data import DataSource, PromptRecord, parse_prompts
from lit_rlhf.evaluation import (
    REMARK,
    Generation,
    choose_device,
    generate_from_models,
    json_lines,
    print_generation,
    print_text,
    read_prompts,
    write_json_lines,
)
from lit_rlhf.evaluation.chat import Chat, load_speakers
from lit_rlhf.models import ModelOptions
from lit_rlhf.rollout import SamplingOptions

LISTS = {
    "models": "Folders or hub ids of language models.",
    "prompt": "Prompts, each in quotes: what the human says, or a dialogue of '\\n\\nHuman: ...' "
    "and '\\n\\nAssistant: ...' that the human ends.",
}
FLAGS = {
    "chat": "Talk with the models in the terminal. Responses appear as they are sampled, several "
    "models stand side by side. /help there lists the commands."
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
    max_prompt_length: int | None = None,
    chat_template: str = "tokenizer",
    batch_size: int = 32,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "float32",
    trust_remote_code: bool = False,
) -> Generation | None:
    """Responses of one or more models to prompts from a file or an argument, or in a chat.

    Args:
        models: Folders or hub ids of language models.
        prompts: A file with prompts (.jsonl, .json, .parquet, .jsonl.gz) or the id of a dataset on
            the hub. Files of preferences and demonstrations do too: their prompts are taken.
        prompt: Prompts themselves.
        chat: Talk with the models in the terminal.
        output: JSON lines file for the responses, with model, settings and seed; - is standard
            output. Without it they are printed for reading.
        responses_per_prompt: Responses of each model to each prompt.
        max_new_tokens: Longest response in tokens, EOS counted.
        temperature: Logits are divided by it. Default: the paper's.
        top_p: Sample from the smallest set of tokens with this probability; 1 is off. Default: the
            paper's.
        top_k: Sample from this many most probable tokens; 0 is off.
        repetition_penalty: Penalty on tokens that occurred, prompt included; 1 is off. Default: the
            paper's.
        do_sample: Sample; false always takes the most probable token.
        split: Of a dataset on the hub, for instance test or test[:200]; not used for files.
        max_prompts: Use only this many of the first prompts of the file. Default: all.
        max_prompt_length: Longest prompt in tokens, so also how much of a chat is remembered; what
            is longer loses its oldest turns. Default: what the model's positions leave beside a
            response, but no more than the longest sequence that it was trained on.
        chat_template: tokenizer for the template in the models' folders, or hh, paper-en, paper-zh.
        batch_size: Prompts that generate together. The draws depend on it.
        seed: Of sampling, the same for every model.
        device: auto, cpu, cuda, cuda:1 and so on.
        dtype: Of all weights: float32, bfloat16 or float16.
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
    options = ModelOptions(dtype=dtype, trust_remote_code=trust_remote_code)
    _check_source(prompts, prompt, chat)
    if chat:
        if output is not None or responses_per_prompt != 1:
            raise ValueError("output, responses_per_prompt: expected none of them with --chat")
        spoken = load_speakers(
            models, sampling, options, choose_device(device), chat_template, max_prompt_length
        )
        talk(Chat(spoken, sampling, Console(), seed))
        return None
    generation = generate_from_models(
        models,
        _records(prompts, prompt, split, max_prompts),
        sampling,
        options,
        choose_device(device),
        batch_size=batch_size,
        responses_per_prompt=responses_per_prompt,
        chat_template=chat_template,
        max_prompt_length=max_prompt_length,
        seed=seed,
    )
    for name, number in generation.shortened.items():
        if number:
            told = f"{name}: {number} prompts were shortened to fit its length."
            print(told, file=sys.stderr)
    if output is None:
        print_generation(generation)
    elif output == "-":
        print(json_lines(generation.records()), end="")
    else:
        print(f"Responses: {write_json_lines(output, generation.records())}")
    return generation


def talk(chat: Chat) -> None:
    """Chat with whoever sits at the terminal, or with the lines of a file or a pipe."""
    console = chat.console

    def typed() -> str:
        return input("\nyou: ")

    def piped() -> str:
        line = input()
        print_text(console, f"\nyou: {line}")
        return line

    if not sys.stdin.isatty():
        chat.run(piped)
        return
    if sys.stdout.isatty():
        importlib.import_module("readline")  # makes input() edit lines and remember them
    names = ", ".join(speaker.name for speaker in chat.speakers)
    print_text(console, f"A chat with {names}. /help lists the commands, Ctrl-D ends it.", REMARK)
    chat.run(typed)
    print_text(console, "")


def _check_source(prompts: str | None, prompt: list[str] | None, chat: bool) -> None:
    given = [
        name
        for name, is_given in (("prompts", prompts), ("prompt", prompt), ("chat", chat))
        if is_given
    ]
    if len(given) != 1:
        raise ValueError(
            "prompts, prompt, chat: expected exactly one of them (--prompts FILE, "
            f"--prompt 'TEXT' or --chat), got {' and '.join(given) or 'none'}"
        )


def _records(
    prompts: str | None, prompt: list[str] | None, split: str, max_prompts: int | None
) -> list[PromptRecord]:
    if prompts is None:
        return parse_prompts(prompt or [])
    return read_prompts(DataSource(prompts, split=split), max_prompts)


def main(argv: Sequence[str]) -> Generation | None:
    """Entry point of `lit_rlhf generate`."""
    return run_command(generate, argv, "lit_rlhf generate", lists=LISTS, flags=FLAGS)
