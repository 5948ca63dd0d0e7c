"""`lit_rlhf generate`: sample responses to prompts, or chat."""

import importlib
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lit_rlhf.checks import check_count, check_fields
from lit_rlhf.command import Command
from lit_rlhf.paths import check_inputs, check_outputs
from lit_rlhf.terminal import print_line, printable_line
from lit_rlhf.tools.commands.sampling import SamplingFlags

if TYPE_CHECKING:  # they import torch, for which --help does not wait
    from lit_rlhf.rollout import SamplingOptions
    from lit_rlhf.tools.evaluation import Generation
    from lit_rlhf.tools.evaluation.chat import Chat


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(SamplingFlags):
    r"""Sample responses of one or more models to prompts from a file or the command line, or chat.

    Attributes:
        models: Folders or hub ids of language models.
        prompt: Prompts, each in quotes: a user's message, or a dialogue of '\n\nHuman: ...' and
            '\n\nAssistant: ...' that ends with the user's turn. Before all flags, --prompt may be
            left out.
        chat: Chat with the models in the terminal. Responses appear as they are sampled. /help in
            the chat lists its commands.
        output: JSON lines file for the responses with model, settings and seed; - is standard
            output. Finished batches are kept beside the file until it is complete, and the same
            command continues with them. Default: print the responses as text.
        responses_per_prompt: Responses of each model to each prompt.
        top_k: Sample from this many most probable tokens; 0 turns it off.
        do_sample: Sample; false always takes the most probable token.
        max_prompt_length: Longest prompt, and longest memory of a chat, in tokens. Longer dialogues
            lose their oldest turns. Default: the model's positions less max_new_tokens, but no more
            than the longest sequence that it was trained on.
        seed: Seed of the sampling, the same for every model.
    """

    models: list[str]
    prompt: list[str] | None = None
    chat: bool = False
    output: str | None = None
    responses_per_prompt: int = 1
    top_k: int = 0
    do_sample: bool = True
    max_prompt_length: int | None = None
    seed: int = 0

    @property
    def sampling(self) -> "SamplingOptions":
        """How responses are sampled."""
        return replace(super().sampling, top_k=self.top_k, do_sample=self.do_sample)


def generate(options: GenerateOptions) -> "Generation | None":
    """Sample responses and print or write them, or chat.

    Args:
        options: What to sample, and how.

    Returns:
        The responses; `None` after a chat.
    """
    _check_options(options)
    if options.chat:
        _run_chat(_prepare_chat(options))
        return None
    generation = _sample(options)
    for name, number in generation.shortened.items():
        if number:
            # standard output may be a file of records
            line = f"{name}: {number} prompts were shortened to fit its length."
            print(printable_line(line), file=sys.stderr)
    _show(generation, options.output)
    return generation


def _check_options(options: GenerateOptions) -> None:
    """Refuse options that do not fit together, before torch is imported."""
    sources = [name for name in ("prompts", "prompt", "chat") if getattr(options, name)]
    if len(sources) != 1:
        raise ValueError(
            "prompts, prompt, chat: expected exactly one of them (--prompts FILE, "
            f"--prompt 'TEXT' or --chat), got {' and '.join(sources) or 'none'}; a prompt "
            "without a flag goes first: lit_rlhf generate 'TEXT' --models FOLDER"
        )
    check_fields(check_count, options, "max_prompts")
    check_outputs({"output": options.output}, [options.prompts, *options.models])
    if options.chat and (options.output is not None or options.responses_per_prompt != 1):
        raise ValueError(
            "output, responses_per_prompt: expected neither with --chat, which shows one "
            "response of each model"
        )
    check_inputs({"models": options.models}, [options.prompts])


def _prepare_chat(options: GenerateOptions) -> "Chat":
    """Load the models of a chat."""
    from rich.console import Console

    from lit_rlhf.tools.evaluation.chat import Chat, load_speakers
    from lit_rlhf.tools.evaluation.loading import choose_device

    speakers = load_speakers(
        options.models,
        sampling=options.sampling,
        model_options=options.model_options,
        device=choose_device(options.device),
        chat_template=options.chat_template,
        max_prompt_length=options.max_prompt_length,
    )
    return Chat(speakers, options.sampling, Console(), options.seed)


def _sample(options: GenerateOptions) -> "Generation":
    """Sample responses to the prompts of a file or of the command line."""
    from lit_rlhf.data import parse_prompts
    from lit_rlhf.tools.evaluation import read_prompts

    if options.source is not None:
        records = read_prompts(options.source, options.max_prompts, options.on_bad_record)
    else:
        records = parse_prompts(options.prompt or [])
    return options.sample_responses(
        options.models,
        records,
        responses_per_prompt=options.responses_per_prompt,
        seed=options.seed,
        output=None if options.output == "-" else options.output,
        max_prompt_length=options.max_prompt_length,
    )


def _show(generation: "Generation", output: str | None) -> None:
    """Print responses, or where they are."""
    from lit_callbacks.words import printable_json
    from lit_rlhf.files import json_lines
    from lit_rlhf.tools.evaluation import print_generation

    if output is None:
        print_generation(generation)
    elif output == "-":
        lines = json_lines(generation.records())
        # a program that reads them gets the same bytes as a file
        print(printable_json(lines) if sys.stdout.isatty() else lines, end="")
    else:
        print_line(f"Responses: {output}")


def _run_chat(chat: "Chat") -> None:
    """Run a chat with the user at the terminal, or with the lines of a file or a pipe."""
    from lit_rlhf.tools.evaluation.output import NOTE_STYLE, print_text

    console = chat.console

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
    greeting = f"A chat with {names}. /help lists the commands, Ctrl-D ends it."
    print_text(console, greeting, style=NOTE_STYLE)
    chat.run(lambda: input("\nyou: "))
    print_text(console, "")


COMMAND = Command(
    GenerateOptions,
    lists=("models", "prompt"),
    flags=("chat",),
    first="prompt",
    then=generate,
    writes=("output",),
    streams=("output",),
)
