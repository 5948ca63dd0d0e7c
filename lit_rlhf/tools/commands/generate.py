"""`lit_rlhf generate`: sample responses to prompts, or chat."""

import importlib
import sys
from dataclasses import dataclass, replace

from rich.console import Console

from lit_rlhf.command import Command
from lit_rlhf.data import parse_prompts
from lit_rlhf.files import check_outputs, json_lines
from lit_rlhf.rollout import SamplingOptions
from lit_rlhf.tools.commands.sampling import SamplingFlags
from lit_rlhf.tools.evaluation import (
    Generation,
    generate_from_models,
    print_generation,
    read_prompts,
)
from lit_rlhf.tools.evaluation.chat import Chat, load_speakers
from lit_rlhf.tools.evaluation.loading import choose_device
from lit_rlhf.tools.evaluation.output import NOTE_STYLE, print_text


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
    def sampling(self) -> SamplingOptions:
        """How responses are sampled."""
        return replace(super().sampling, top_k=self.top_k, do_sample=self.do_sample)


def generate(options: GenerateOptions) -> Generation | None:
    """Sample responses and print or write them, or chat."""
    models, output, device = options.models, options.output, choose_device(options.device)
    given = [name for name in ("prompts", "prompt", "chat") if getattr(options, name)]
    if len(given) != 1:
        raise ValueError(
            "prompts, prompt, chat: expected exactly one of them (--prompts FILE, "
            f"--prompt 'TEXT' or --chat), got {' and '.join(given) or 'none'}; a prompt "
            "without a flag goes first: lit_rlhf generate 'TEXT' --models FOLDER"
        )
    check_outputs({"output": output}, [options.prompts])
    if options.chat:
        if output is not None or options.responses_per_prompt != 1:
            raise ValueError(
                "output, responses_per_prompt: expected neither with --chat, which shows one "
                "response of each model"
            )
        speakers = load_speakers(
            models,
            options.sampling,
            model_options=options.model_options,
            device=device,
            chat_template=options.chat_template,
            max_prompt_length=options.max_prompt_length,
        )
        _run_chat(Chat(speakers, options.sampling, Console(), options.seed))
        return None
    if options.source is not None:
        records = read_prompts(options.source, options.max_prompts, options.on_bad_record)
    else:
        records = parse_prompts(options.prompt or [])
    generation = generate_from_models(
        models,
        records,
        options.sampling,
        model_options=options.model_options,
        device=device,
        batch_size=options.batch_size,
        responses_per_prompt=options.responses_per_prompt,
        chat_template=options.chat_template,
        max_prompt_length=options.max_prompt_length,
        seed=options.seed,
        output=None if output == "-" else output,
        on_bad_record=options.on_bad_record,
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
    GenerateOptions, lists=("models", "prompt"), flags=("chat",), first="prompt", then=generate
)
