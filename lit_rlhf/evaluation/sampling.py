"""Prompts, and responses that policies sample to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from rich.console import Console

from lit_rlhf.data import (
    DataSource,
    DialogueEncoder,
    EncodingCounts,
    Message,
    PromptBatch,
    PromptExample,
    PromptRecord,
    collate_prompts,
    encode_records,
    load_records,
)
from lit_rlhf.evaluation.loading import load_encoder, load_policy, short_names
from lit_rlhf.evaluation.output import NAME, REMARK, print_text, progress_bar
from lit_rlhf.evaluation.responses import Turns
from lit_rlhf.forward import LanguageModel
from lit_rlhf.models import ModelOptions
from lit_rlhf.rollout import RolloutBatch, SamplingOptions, generate_responses


class SampledBatch(NamedTuple):
    """`B` prompts, with one or more responses to each.

    Attributes:
        positions: Of the prompts in the sequence that was given, `B` numbers.
        prompts: The prompts as they were fed.
        rollouts: The responses, on the model's device.
    """

    positions: list[int]
    prompts: PromptBatch
    rollouts: RolloutBatch


class EncodedPrompts(NamedTuple):
    """Prompts ready for generation.

    Attributes:
        examples: The prompts; each one's index is its position.
        counts: What was cut so that they fit.
        dialogues: The prompts as they were read.
    """

    examples: list[PromptExample]
    counts: EncodingCounts
    dialogues: list[Turns]


def load_prompts(
    source: DataSource, encoder: DialogueEncoder, limit: int | None = None
) -> EncodedPrompts:
    """Read and encode prompts; files of preferences and demonstrations have some too.

    Args:
        source: Where from.
        encoder: The policies' encoder.
        limit: Use only this many of the first prompts; `None` takes all.

    Raises:
        RecordError: If the file is missing or empty, or a record has no usable prompt.
        ValueError: If `limit` is not positive.
    """
    return encode_prompt_records(read_prompts(source, limit), encoder)


def read_prompts(source: DataSource, limit: int | None = None) -> list[PromptRecord]:
    """Read prompts; arguments and errors are those of `load_prompts`."""
    if limit is not None and limit < 1:
        raise ValueError(f"max_prompts: expected an integer >= 1, got {limit}")
    return load_records("prompt", [source]).records[:limit]


def encode_prompt_records(
    records: Sequence[PromptRecord], encoder: DialogueEncoder
) -> EncodedPrompts:
    """Encode prompts that have been read.

    Raises:
        RecordError: If a turn contains the text of the EOS token.
    """
    counts = EncodingCounts()
    examples = encode_records(
        records,
        lambda record: [encoder.encode_prompt(record.prompt)],
        counts,
        on_bad_record="error",
    )
    numbered = [example._replace(index=index) for index, example in enumerate(examples)]
    return EncodedPrompts(numbered, counts, [record.prompt for record in records])


def batch_by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Positions in batches of about equal length.

    The longest come first, so that memory runs out early or never.

    Raises:
        ValueError: If `batch_size` is not positive.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size: expected an integer >= 1, got {batch_size}")
    order = sorted(range(len(lengths)), key=lambda position: -lengths[position])
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def sample_batches(
    model: LanguageModel,
    encoder: DialogueEncoder,
    examples: Sequence[PromptExample],
    options: SamplingOptions,
    batch_size: int,
    seed: int,
    responses_per_prompt: int = 1,
    progress: Callable[[int], None] | None = None,
) -> Iterator[SampledBatch]:
    """Sample responses to all prompts, batch by batch.

    Args:
        model: The policy.
        encoder: Its encoder.
        examples: The prompts.
        options: How to sample.
        batch_size: Prompts per batch. The draws depend on it.
        seed: The same seed and prompts give every policy the same seeds, batch by batch.
        responses_per_prompt: Responses to a prompt lie in consecutive rows.
        progress: Called with the number of prompts of each batch when it is done.

    Yields:
        The batches, prompts with the most tokens first.

    Raises:
        ValueError: If prompts and responses do not fit into the model's positions, or a number is
            out of range.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    lengths = [len(example.input_ids) for example in examples]
    for positions in batch_by_length(lengths, batch_size):
        prompts = collate_prompts([examples[i] for i in positions], encoder.pad_token_id)
        rollouts = generate_responses(
            model,
            prompts.input_ids.to(device).repeat_interleave(responses_per_prompt, dim=0),
            prompts.attention_mask.to(device).repeat_interleave(responses_per_prompt, dim=0),
            options,
            eos_token_ids=[encoder.eos_token_id],
            pad_token_id=encoder.pad_token_id,
            seed=int(torch.randint(2**31, (), generator=generator)),
        )
        yield SampledBatch(positions, prompts, rollouts)
        if progress is not None:
            progress(len(positions))


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


def generate_from_models(
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
        max_prompt_length: Longest prompt in tokens; `None` takes what `load_encoder` finds.
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
        load_encoder(path, sampling, chat_template, max_prompt_length, options) for path in models
    ]
    encoded = [encode_prompt_records(prompts, encoder) for encoder in encoders]
    responses: list[GeneratedResponse] = []
    shortened = {}
    for name, path, encoder, (examples, counts, _) in zip(
        names, models, encoders, encoded, strict=True
    ):
        model = load_policy(path, options, device)
        with progress_bar(f"responses of {name}", len(examples)) as progress:
            batches = sample_batches(
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
            print_text(console, f"{message.role}: ", NAME, end="")
            print_text(console, message.content)
        for model in range(len(names)):
            start = model * per_model + first
            for response in generation.responses[start : start + n_samples]:
                number = f" {response.sample + 1}" if n_samples > 1 else ""
                print_text(console, f"{names[response.model]}{number}: ", NAME, end="")
                print_text(console, response.response)
                if not response.ended:
                    print_text(console, f"(cut off at {response.length} tokens)", REMARK)
        print_text(console, "")
