"""Read prompts and sample responses to them, in batches of prompts of similar length.

Notation: `B` prompts per batch.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from lit_rlhf.checks import check_count
from lit_rlhf.data import (
    DataCounts,
    DataSource,
    DialogueEncoder,
    OnBadRecord,
    PromptBatch,
    PromptExample,
    PromptRecord,
    collate_prompts,
    describe_bad_records,
    encode_each,
    load_records,
)
from lit_rlhf.files import ProgressFile, hash_model
from lit_rlhf.forward import LanguageModel, set_longest_sequence, stop_token_ids
from lit_rlhf.models import ModelOptions
from lit_rlhf.rollout import RolloutBatch, SamplingOptions, generate_responses
from lit_rlhf.tools.evaluation.loading import CPU, load_encoders, load_policy, short_names
from lit_rlhf.tools.evaluation.output import NAME_STYLE, NOTE_STYLE, print_text, progress_bar
from lit_rlhf.tools.evaluation.responses import SampledResponse

_log = logging.getLogger(__name__)


class EncodedPrompts(NamedTuple):
    """Prompts as text and as token ids.

    Attributes:
        records: Prompts as they were read.
        examples: The same prompts as token ids. `index` is the position of a prompt.
    """

    records: list[PromptRecord]
    examples: list[PromptExample]


@dataclass(frozen=True)
class Generation:
    """Responses of one or more models to the same prompts.

    Attributes:
        models: Folder or hub id of each model by its short name.
        responses: Responses in the order of the prompts, by short name.
        shortened: Number of prompts that were cut to fit, by short name.
        seed: Seed of the sampling.
        settings: Everything else that the responses depend on.
    """

    models: dict[str, str]
    responses: dict[str, list[SampledResponse]]
    shortened: dict[str, int]
    seed: int
    settings: Mapping[str, Any]

    def records(self) -> list[dict[str, Any]]:
        """Build one record per response, for a file of responses, prompts or demonstrations."""
        return [
            {
                "model": self.models[name],
                **asdict(response),
                "seed": self.seed,
                "settings": dict(self.settings),
            }
            for name, responses in self.responses.items()
            for response in responses
        ]


def read_prompts(
    source: DataSource, limit: int | None = None, on_bad_record: OnBadRecord = "error"
) -> list[PromptRecord]:
    """Read prompts, or the prompts of preferences and demonstrations.

    Args:
        source: Where they are.
        limit: Number of prompts to read, from the first; `None` reads all.
        on_bad_record: Whether a bad record is an `error` or left out (`skip`).
    """
    if limit is not None:
        check_count("max_prompts", limit)
    return load_records("prompt", [source], on_bad_record, limit)


def encode_prompt_records(
    records: Sequence[PromptRecord], encoder: DialogueEncoder, on_bad_record: OnBadRecord = "error"
) -> EncodedPrompts:
    """Encode prompts. One that is too long loses its oldest turns, or else its beginning.

    Args:
        records: The prompts.
        encoder: Encodes them.
        on_bad_record: Whether a prompt with the text of a control token is an `error` or left out
            (`skip`).
    """

    def encode(record: PromptRecord) -> list[PromptExample]:
        return [encoder.encode_prompt(record.prompt)._replace(fields=record.fields)]

    counts = DataCounts()
    encoded = [*encode_each(records, encode, counts, on_bad_record)]
    if counts.dropped:
        described = describe_bad_records(counts.dropped, counts.dropped_examples)
        _log.warning("left out prompts: %s", described)
    return EncodedPrompts(
        records=[kept.record for kept in encoded],
        examples=[kept.examples[0]._replace(index=index) for index, kept in enumerate(encoded)],
    )


def count_shortened(examples: Sequence[PromptExample]) -> int:
    """Count the prompts that lost their oldest turns or their beginning to fit."""
    return sum(example.dropped_turns > 0 or example.cut_tokens > 0 for example in examples)


def batch_by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Divide sequences into batches of similar length.

    The longest sequences come first: if memory does not suffice, the first batch fails.

    Args:
        lengths: Length of each sequence in tokens.
        batch_size: Number of sequences in each batch but the last; at least 1.

    Returns:
        Positions in `lengths`, by batch.
    """
    check_count("batch_size", batch_size)
    order = sorted(range(len(lengths)), key=lambda position: -lengths[position])
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def sample_batches(
    load_model: Callable[[], LanguageModel],
    encoder: DialogueEncoder,
    examples: Sequence[PromptExample],
    *,
    sampling: SamplingOptions,
    batch_size: int,
    seed: int,
    describe: Callable[[PromptBatch, RolloutBatch], dict[str, Any]],
    responses_per_prompt: int = 1,
    unfinished: ProgressFile | None = None,
    name: str = "",
) -> Iterator[dict[str, Any]]:
    """Sample responses to all prompts, after the batches that an interrupted command has finished.

    Models that are given the same prompts, seed and batch size draw with the same seeds.

    Args:
        load_model: Loads the model; not called if all batches are finished.
        encoder: The encoder of the prompts.
        examples: The prompts.
        sampling: How responses are sampled.
        batch_size: Prompts per batch.
        seed: Seed from which each batch's own seed is derived.
        describe: Converts the prompts of a batch and its responses to JSON types. Responses to one
            prompt are in adjacent rows.
        responses_per_prompt: Number of responses to each prompt.
        unfinished: File of finished batches, which receives each new one.
        name: Name of the model in that file.

    Yields:
        For each batch the positions of its prompts as `"positions"`, and its description. New
        batches come with the longest prompts first.
    """
    unfinished = unfinished or ProgressFile(None, {})
    generator = torch.Generator().manual_seed(seed)
    lengths = [len(example.input_ids) for example in examples]
    seeds = {
        tuple(positions): int(torch.randint(2**31, (), generator=generator))
        for positions in batch_by_length(lengths, batch_size)
    }
    for record in unfinished.batches(name):
        try:
            del seeds[tuple(record["positions"])]
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{unfinished.path}: expected each batch of this command once, got {record!r:.80}; "
                "delete the file to start over"
            ) from error
        yield record
    model = load_model() if seeds else None
    if model is not None:
        set_longest_sequence(model, max(lengths) + sampling.max_new_tokens)
    for positions, batch_seed in seeds.items():
        assert model is not None  # for mypy
        device = next(model.parameters()).device
        prompts = collate_prompts([examples[i] for i in positions], encoder.pad_token_id)
        rollouts = generate_responses(
            model,
            prompts.input_ids.to(device).repeat_interleave(responses_per_prompt, dim=0),
            prompts.attention_mask.to(device).repeat_interleave(responses_per_prompt, dim=0),
            sampling,
            eos_token_ids=stop_token_ids(model, encoder.tokenizer),
            pad_token_id=encoder.pad_token_id,
            seed=batch_seed,
        )
        record = {"positions": list(positions), **describe(prompts, rollouts)}
        unfinished.add(name, record)
        yield record


def describe_responses(
    prompts: PromptBatch, rollouts: RolloutBatch, texts: Sequence[str]
) -> list[list[dict[str, Any]]]:
    """Describe the responses to each prompt of a batch by the fields of `SampledResponse`.

    Args:
        prompts: The prompts, `B` of them.
        rollouts: The responses, with the same number of adjacent rows for each prompt.
        texts: The decoded responses, row by row.

    Returns:
        Fields of the responses to each prompt; all but `prompt`.
    """
    ended = rollouts.terminated.tolist()
    lengths = rollouts.lengths.tolist()
    n_samples = len(texts) // len(prompts.texts)
    return [
        [
            {
                "prompt_text": prompt_text,
                "sample": row - first,
                "response": texts[row],
                "ended": ended[row],
                "length": lengths[row],
            }
            for row in range(first, first + n_samples)
        ]
        for first, prompt_text in zip(range(0, len(texts), n_samples), prompts.texts, strict=True)
    ]


def generate_from_models(
    models: Sequence[str],
    prompts: Sequence[PromptRecord],
    sampling: SamplingOptions,
    *,
    model_options: ModelOptions = ModelOptions(),
    device: torch.device = CPU,
    batch_size: int = 32,
    responses_per_prompt: int = 1,
    chat_template: str = "tokenizer",
    max_prompt_length: int | None = None,
    seed: int = 0,
    output: str | Path | None = None,
    on_bad_record: OnBadRecord = "error",
) -> Generation:
    """Sample responses to prompts from one or more models, one model after the other.

    Args:
        models: Folders or hub ids.
        prompts: The prompts, at least one.
        sampling: How responses are sampled.
        model_options: How the models are loaded.
        device: Where they compute.
        batch_size: Prompts per batch. The samples depend on it.
        responses_per_prompt: Number of responses of each model to each prompt.
        chat_template: Template of the dialogues; `tokenizer` for each model's own.
        max_prompt_length: Longest prompt in tokens; see `load_encoder`.
        seed: Seed of the sampling, the same for every model.
        output: JSON lines file for all responses. Until it is complete, `<output>.partial` keeps
            finished batches, from which the same call continues.
        on_bad_record: Whether a prompt that one model's encoder refuses is an `error` or left out
            for all (`skip`).
    """
    if not prompts:
        raise ValueError("prompts: expected at least one, got none")
    check_count("responses_per_prompt", responses_per_prompt)
    names = short_names(models, "models")
    # an error in a prompt, too, comes before the first model's weights are loaded
    encoders = load_encoders(
        models,
        sampling,
        chat_template=chat_template,
        max_prompt_length=max_prompt_length,
        model_options=model_options,
    )
    if on_bad_record == "skip":
        for encoder in encoders:
            prompts = encode_prompt_records(prompts, encoder, on_bad_record).records
    encoded = [encode_prompt_records(prompts, encoder).examples for encoder in encoders]
    settings = {
        **asdict(sampling),
        "responses_per_prompt": responses_per_prompt,
        "batch_size": batch_size,
        "chat_template": chat_template,
        "dtype": model_options.dtype,
        "device": str(device),
    }
    inputs = {
        "seed": seed,
        "models": hash_models(models),
        "prompts": [hash_prompts(of_model) for of_model in encoded],
    }
    responses = {}
    with ProgressFile(output, settings | inputs) as unfinished:
        for name, path, encoder, of_model in zip(names, models, encoders, encoded, strict=True):
            batches = sample_batches(
                partial(load_policy, path, model_options, device, encoder.tokenizer),
                encoder,
                of_model,
                sampling=sampling,
                batch_size=batch_size,
                seed=seed,
                describe=partial(_describe, encoder),
                responses_per_prompt=responses_per_prompt,
                unfinished=unfinished,
                name=name,
            )
            responses[name] = _collect_responses(batches, prompts, name)
        generation = Generation(
            models=dict(zip(names, models, strict=True)),
            responses=responses,
            shortened={
                name: count_shortened(of_model)
                for name, of_model in zip(names, encoded, strict=True)
            },
            seed=seed,
            settings=settings,
        )
        unfinished.finish(generation.records())
    return generation


def _collect_responses(
    batches: Iterator[dict[str, Any]], prompts: Sequence[PromptRecord], name: str
) -> list[SampledResponse]:
    """Collect the responses of batches, which are sorted by length, in the order of the prompts.

    Args:
        batches: The batches, see `sample_batches`.
        prompts: All prompts.
        name: Name of the model, for the progress bar.
    """
    by_position: dict[int, list[dict[str, Any]]] = {}
    with progress_bar(f"responses of {name}", len(prompts)) as progress:
        for batch in batches:
            by_position |= dict(zip(batch["positions"], batch["responses"], strict=True))
            progress(len(batch["positions"]))
    return [
        SampledResponse(record.prompt, **fields)
        for position, record in enumerate(prompts)
        for fields in by_position[position]
    ]


def _describe(
    encoder: DialogueEncoder, prompts: PromptBatch, rollouts: RolloutBatch
) -> dict[str, Any]:
    ids = rollouts.response_ids.cpu()
    mask = rollouts.response_mask.cpu()
    rows = [row[real].tolist() for row, real in zip(ids, mask, strict=True)]
    texts = [encoder.decode_response(row) for row in rows]
    return {"responses": describe_responses(prompts, rollouts, texts)}


def hash_models(models: Sequence[str]) -> dict[str, str | None]:
    """Compute the SHA-256 of local models, by folder; `None` for a hub id."""
    return {path: hash_model(path) for path in models}


def hash_prompts(examples: Sequence[PromptExample]) -> str:
    """Compute the SHA-256 of prompts as a model reads them, in hexadecimal digits."""
    texts = json.dumps([example.text for example in examples])
    return hashlib.sha256(texts.encode()).hexdigest()


def print_generation(generation: Generation) -> None:
    """Print every prompt, followed by the responses of all models, on standard output."""
    console = Console()
    n_samples = generation.settings["responses_per_prompt"]
    first_model = next(iter(generation.responses.values()))
    for start in range(0, len(first_model), n_samples):
        for message in first_model[start].prompt:
            print_text(console, f"{message.role}: ", style=NAME_STYLE, end="")
            print_text(console, message.content)
        for name, responses in generation.responses.items():
            for response in responses[start : start + n_samples]:
                number = f" {response.sample + 1}" if n_samples > 1 else ""
                print_text(console, f"{name}{number}: ", style=NAME_STYLE, end="")
                print_text(console, response.response)
                if not response.ended:
                    print_text(console, f"(cut off at {response.length} tokens)", style=NOTE_STYLE)
        print_text(console, "")
