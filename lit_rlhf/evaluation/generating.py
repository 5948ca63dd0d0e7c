"""Responses of language models to prompts, as records for a file or as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lit_rlhf.data import DialogueEncoder, Message, PromptRecord
from lit_rlhf.data.contract import CONTRACT_FILE
from lit_rlhf.evaluation.compare import DEFAULT_PROMPT_LENGTH, shared_encoder, short_names
from lit_rlhf.evaluation.progress import progress_line
from lit_rlhf.evaluation.sampling import (
    SampledBatch,
    encoded_records,
    loaded_policy,
    sampled_batches,
)
from lit_rlhf.evaluation.transcripts import NAME, REMARK, say
from lit_rlhf.models import ModelOptions, max_positions
from lit_rlhf.rollout import SamplingOptions


@dataclass(frozen=True)
class GeneratedResponse:
    """One response.

    Attributes:
        model: Folder or hub id, as it was given.
        prompt: The turns of the prompt, before anything was left out.
        prompt_text: What the model was shown: the rendered prompt, shortened where it had to be.
        sample: Number of the response among those of this model to this prompt, from 0.
        response: Text without special tokens and outer whitespace.
        ended: Whether the model ended it; otherwise it was cut off at `max_new_tokens`.
        length: Tokens of the response, EOS included.
    """

    model: str
    prompt: tuple[Message, ...]
    prompt_text: str
    sample: int
    response: str
    ended: bool
    length: int


@dataclass(frozen=True)
class Generation:
    """Responses of one or more models to the same prompts.

    Attributes:
        models: Folders or hub ids by short name.
        responses: Model by model, in the order of the prompts.
        shortened: Prompts that lost their oldest turns or their beginning, by short name.
        seed: Of sampling.
        settings: Everything else that the draws depend on.
    """

    models: dict[str, str]
    responses: list[GeneratedResponse]
    shortened: dict[str, int]
    seed: int
    settings: Mapping[str, Any]

    def records(self) -> list[dict[str, Any]]:
        """One record for each response, for a JSON lines file.

        `DataSource` reads them as demonstrations, and as prompts.
        """
        return [
            {**asdict(response), "seed": self.seed, "settings": dict(self.settings)}
            for response in self.responses
        ]


def generated_responses(
    models: Sequence[str],
    prompts: Sequence[PromptRecord],
    sampling: SamplingOptions,
    options: ModelOptions | None = None,
    device: torch.device | None = None,
    batch_size: int = 32,
    responses_per_prompt: int = 1,
    chat_template: str = "tokenizer",
    max_prompt_length: int | None = None,
    seed: int = 0,
) -> Generation:
    """Sample responses to prompts from one or more models, one model after the other.

    Args:
        models: Folders or hub ids of causal language models, each with a tokenizer and a chat
            template of its own.
        prompts: The prompts.
        sampling: How responses are sampled.
        options: How models are loaded; `None` takes the defaults.
        device: Where to run; `None` is the CPU.
        batch_size: Prompts per batch.
        responses_per_prompt: Responses of each model to each prompt.
        chat_template: `tokenizer` for the models' own, or the name of a built-in one.
        max_prompt_length: Longest prompt in tokens; `None` takes what `model_encoder` finds.
        seed: Of sampling; the same for every model.

    Raises:
        RecordError: If a prompt cannot be encoded.
        ValueError: If there is no prompt, a model is named twice or cannot be used, or an argument
            is out of range.
    """
    options, device = options or ModelOptions(), device or torch.device("cpu")
    if not prompts:
        raise ValueError("prompts: expected at least one, got none")
    if responses_per_prompt < 1:
        raise ValueError(f"responses_per_prompt: expected >= 1, got {responses_per_prompt}")
    names = short_names(models, "models")
    # all of them before the first weights are loaded: what is wrong is told at once
    encoders = [
        model_encoder(path, sampling, chat_template, max_prompt_length, options) for path in models
    ]
    encoded = [encoded_records(prompts, encoder) for encoder in encoders]
    responses: list[GeneratedResponse] = []
    shortened = {}
    for name, path, encoder, (examples, counts, _) in zip(
        names, models, encoders, encoded, strict=True
    ):
        model = loaded_policy(path, options, device)
        with progress_line(f"responses of {name}", len(examples)) as progress:
            batches = sampled_batches(
                model, encoder, examples, sampling, batch_size, seed, responses_per_prompt, progress
            )
            of_prompt = {
                position: _of_prompt(path, prompts[position], batch, place, encoder)
                for batch in batches
                for place, position in enumerate(batch.positions)
            }
        del model  # before the next one is loaded
        responses += [
            response for position in sorted(of_prompt) for response in of_prompt[position]
        ]
        shortened[name] = counts.shortened + counts.cut_prompts
    settings = {
        **asdict(sampling),
        "responses_per_prompt": responses_per_prompt,
        "batch_size": batch_size,
        "chat_template": chat_template,
        "dtype": options.dtype,
        "device": str(device),
    }
    return Generation(dict(zip(names, models, strict=True)), responses, shortened, seed, settings)


def model_encoder(
    path: str,
    sampling: SamplingOptions,
    chat_template: str = "tokenizer",
    max_prompt_length: int | None = None,
    options: ModelOptions | None = None,
) -> DialogueEncoder:
    """The encoder of a model, whose prompts leave room for a response.

    Args:
        path: Folder or hub id.
        sampling: Says how long a response may become.
        chat_template: `tokenizer` for the model's own, or the name of a built-in one.
        max_prompt_length: Longest prompt in tokens; `None` takes what the model's positions leave
            beside a response, but no more than the longest sequence that it was trained on if its
            folder says so. Where neither is known, 512.
        options: How the model is loaded; `None` takes the defaults.

    Raises:
        ValueError: If there is no causal language model at `path`, it has no chat template, it
            would be shown text otherwise than its folder says it was trained, or prompt and
            response do not fit into its positions.
    """
    positions = max_positions(path, options)
    room = None if positions is None else positions - sampling.max_new_tokens
    if room is not None and room < (max_prompt_length or 2):
        raise ValueError(
            f"model {path!r}: expected prompt and response within its {positions} positions, got "
            f"max_new_tokens={sampling.max_new_tokens} beside prompts of "
            f"{max_prompt_length or 'at least 2'} tokens; give a smaller max_new_tokens"
        )
    limit = max_prompt_length
    if limit is None and not (Path(path) / CONTRACT_FILE).is_file():
        limit = DEFAULT_PROMPT_LENGTH if room is None else room
    encoder = shared_encoder([path], chat_template, limit, options)
    encoder.max_prompt_length = min(encoder.max_length, room or encoder.max_length)
    return encoder


def _of_prompt(
    path: str, prompt: PromptRecord, batch: SampledBatch, place: int, encoder: DialogueEncoder
) -> list[GeneratedResponse]:
    """The responses to the prompt at `place` in a batch, which lie in consecutive rows."""
    ids, mask = batch.rollouts.response_ids.cpu(), batch.rollouts.response_mask.cpu()
    ended = batch.rollouts.terminated.tolist()
    n_samples = len(ids) // len(batch.positions)
    return [
        GeneratedResponse(
            model=path,
            prompt=prompt.prompt,
            prompt_text=batch.prompts.texts[place],
            sample=sample,
            response=encoder.decode_response(ids[row][mask[row]].tolist()),
            ended=ended[row],
            length=int(mask[row].sum()),
        )
        for sample, row in enumerate(range(place * n_samples, (place + 1) * n_samples))
    ]


def print_generation(generation: Generation) -> None:
    """Print prompts and responses on standard output, for people."""
    console = Console()
    names = {path: name for name, path in generation.models.items()}
    per_model = len(generation.responses) // len(names)
    n_samples = generation.settings["responses_per_prompt"]
    for first in range(0, per_model, n_samples):
        for message in generation.responses[first].prompt:
            say(console, f"{message.role}: ", NAME, end="")
            say(console, message.content)
        for model in range(len(names)):
            start = model * per_model + first
            for response in generation.responses[start : start + n_samples]:
                number = f" {response.sample + 1}" if n_samples > 1 else ""
                say(console, f"{names[response.model]}{number}: ", NAME, end="")
                say(console, response.response)
                if not response.ended:
                    say(console, f"(cut off at {response.length} tokens)", REMARK)
        say(console, "")
