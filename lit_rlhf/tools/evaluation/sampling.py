"""Read prompts and sample responses to them, in batches of prompts of similar length.

Notation: `B` prompts per batch.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from lit_rlhf.data import (
    DataSource,
    DialogueEncoder,
    EncodingCounts,
    OnBadRecord,
    PromptBatch,
    PromptExample,
    PromptRecord,
    collate_prompts,
    describe_bad_records,
    encode_records,
    load_records,
)
from lit_rlhf.files import ProgressFile, write_json_lines
from lit_rlhf.forward import LanguageModel
from lit_rlhf.models import ModelOptions, stop_token_ids
from lit_rlhf.rollout import RolloutBatch, SamplingOptions, generate_responses
from lit_rlhf.tools.evaluation.loading import load_encoder, load_policy, short_names
from lit_rlhf.tools.evaluation.output import NAME_STYLE, NOTE_STYLE, print_text, progress_bar
from lit_rlhf.tools.evaluation.responses import SampledResponse

_log = logging.getLogger(__name__)


class EncodedPrompts(NamedTuple):
    """Prompts, ready for generation.

    Attributes:
        records: The prompts as they were read.
        examples: The same prompts as token ids; the `index` of each is its position.
    """

    records: Sequence[PromptRecord]
    examples: list[PromptExample]

    @property
    def shortened(self) -> int:
        """Number of prompts that lost their oldest turns or their beginning to fit."""
        return sum(example.dropped_turns > 0 or example.cut_tokens > 0 for example in self.examples)


class SampledBatch(NamedTuple):
    """`B` prompts with one or more responses each.

    Attributes:
        positions: Positions of the `B` prompts in the sequence that was sampled from.
        prompts: The prompts as the model read them.
        rollouts: The responses on the model's device; those to one prompt are adjacent rows.
    """

    positions: list[int]
    prompts: PromptBatch
    rollouts: RolloutBatch


@dataclass(frozen=True)
class Generation:
    """Responses of one or more models to the same prompts.

    Attributes:
        models: Folder or hub id of each model, by short name.
        responses: Responses by short name, in the order of the prompts.
        shortened: Number of prompts that were shortened for each model, by short name.
        seed: Seed of the sampling.
        settings: Everything else that the responses depend on.
    """

    models: dict[str, str]
    responses: dict[str, list[SampledResponse]]
    shortened: dict[str, int]
    seed: int
    settings: Mapping[str, Any]

    def records(self) -> list[dict[str, Any]]:
        """Build one record per response, for a JSON lines file.

        The file can be read by `read_responses`, and by a `DataSource` as prompts or as
        demonstrations.
        """
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
    """Read prompts; records of preferences and demonstrations have some too.

    Args:
        source: Where the prompts come from.
        limit: Number of prompts to read, from the first; `None` reads all.
        on_bad_record: What to do about a record without a usable prompt: `"skip"` logs how many.

    Raises:
        RecordError: If the file is missing or empty, or a record has no usable prompt and
            `on_bad_record` is `"error"`.
        ValueError: If `limit` is not positive.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"max_prompts: expected an integer >= 1, got {limit}")
    return load_records("prompt", [source], on_bad_record, limit).records


def encode_prompt_records(
    records: Sequence[PromptRecord],
    encoder: DialogueEncoder,
    on_bad_record: OnBadRecord = "error",
) -> EncodedPrompts:
    """Encode prompts; those that are too long lose their oldest turns, or else their beginning.

    Args:
        records: The prompts.
        encoder: The encoder.
        on_bad_record: What to do about a prompt with the text of a control token: `"skip"` leaves
            it out and logs how many there are.

    Raises:
        RecordError: If a turn contains the text of a control token and `on_bad_record` is
            `"error"`.
    """
    counts = EncodingCounts()
    kept: list[PromptRecord] = []
    examples: list[PromptExample] = []
    for record in records:
        encoded = encode_records(
            [record],
            lambda record: [encoder.encode_prompt(record.prompt)],
            counts,
            on_bad_record,
        )
        for example in encoded:
            examples.append(example._replace(index=len(kept), fields=record.fields))
            kept.append(record)
    if counts.dropped_records:
        described = describe_bad_records(counts.dropped_records, counts.examples)
        _log.warning("left out prompts: %s", described)
    return EncodedPrompts(kept, examples)


def batch_by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Divide positions into batches of similar length.

    The batches with the longest sequences come first: if memory does not suffice, the first batch
    fails.

    Args:
        lengths: Length of the sequence at each position.
        batch_size: Positions per batch.

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
    sampling: SamplingOptions,
    batch_size: int,
    seed: int,
    responses_per_prompt: int = 1,
    progress: Callable[[int], None] | None = None,
    finished: Container[int] = (),
) -> Iterator[SampledBatch]:
    """Sample responses to all prompts, batch by batch.

    Every batch has a seed of its own that follows from `seed`. Models that are given the same
    prompts, seed and batch size draw with the same seeds.

    Args:
        model: The policy.
        encoder: Its encoder.
        examples: The prompts.
        sampling: How to sample.
        batch_size: Prompts per batch. The responses depend on it.
        seed: Seed of the sampling.
        responses_per_prompt: Responses to each prompt.
        progress: Called with the number of prompts after each batch.
        finished: Positions of prompts whose batches are left out. The others are sampled as they
            are without it.

    Yields:
        The batches, those with the longest prompts first.

    Raises:
        ValueError: If prompts and responses do not fit into the model's positions, or a number is
            out of range.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    lengths = [len(example.input_ids) for example in examples]
    for positions in batch_by_length(lengths, batch_size):
        batch_seed = int(torch.randint(2**31, (), generator=generator))
        if positions[0] in finished:
            continue
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
        yield SampledBatch(positions, prompts, rollouts)
        if progress is not None:
            progress(len(positions))


def collect_responses(
    records: Sequence[PromptRecord], batch: SampledBatch, texts: Sequence[str]
) -> dict[int, list[SampledResponse]]:
    """Describe the responses of a batch, by the position of their prompt.

    Args:
        records: All prompts.
        batch: The batch.
        texts: Its decoded responses, in the order of its rows.
    """
    ended, lengths = batch.rollouts.terminated.tolist(), batch.rollouts.lengths.tolist()
    n_samples = len(texts) // len(batch.positions)
    return {
        position: [
            SampledResponse(
                prompt=records[position].prompt,
                prompt_text=prompt_text,
                sample=sample,
                response=texts[row],
                ended=ended[row],
                length=lengths[row],
            )
            for sample, row in enumerate(range(place * n_samples, (place + 1) * n_samples))
        ]
        for place, (position, prompt_text) in enumerate(
            zip(batch.positions, batch.prompts.texts, strict=True)
        )
    }


def generate_from_models(
    models: Sequence[str],
    prompts: Sequence[PromptRecord],
    sampling: SamplingOptions,
    model_options: ModelOptions | None = None,
    device: torch.device | None = None,
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
        models: Folders or hub ids of causal language models. Each uses its own tokenizer and chat
            template.
        prompts: The prompts.
        sampling: How responses are sampled.
        model_options: How models are loaded; `None` takes the defaults.
        device: Where to run; `None` is the CPU.
        batch_size: Prompts per batch.
        responses_per_prompt: Responses of each model to each prompt.
        chat_template: `tokenizer` for the models' own, or the name of a built-in one.
        max_prompt_length: Longest prompt in tokens; `None` decides as `load_encoder` does.
        seed: Seed of the sampling, the same for every model.
        output: JSON lines file for the responses, written when they are complete. Until then
            `<output>.partial` keeps the finished batches, from which the same call continues.
        on_bad_record: What to do about a prompt that a model's encoder refuses, see
            `encode_prompt_records`.

    Raises:
        OSError: If a file cannot be written.
        RecordError: If a prompt cannot be encoded and `on_bad_record` is `"error"`.
        ValueError: If there is no prompt, a model is given twice or cannot be used, an argument is
            out of range, or the finished batches are those of another call.
    """
    model_options, device = model_options or ModelOptions(), device or torch.device("cpu")
    if not prompts:
        raise ValueError("prompts: expected at least one, got none")
    if responses_per_prompt < 1:
        raise ValueError(f"responses_per_prompt: expected >= 1, got {responses_per_prompt}")
    names = short_names(models, "models")
    # Encoders take seconds and weights take minutes: an error in the last model's tokenizer or in
    # a prompt has to come before the first model's weights are loaded.
    encoders = [
        load_encoder(path, sampling, chat_template, max_prompt_length, model_options)
        for path in models
    ]
    if on_bad_record == "skip":  # a prompt that one of the models cannot read is left out for all
        for encoder in encoders:
            prompts = encode_prompt_records(prompts, encoder, on_bad_record).records
    encoded = [encode_prompt_records(prompts, encoder) for encoder in encoders]
    settings = {
        **asdict(sampling),
        "responses_per_prompt": responses_per_prompt,
        "batch_size": batch_size,
        "chat_template": chat_template,
        "dtype": model_options.dtype,
        "device": str(device),
    }
    begun = settings | {
        "seed": seed,
        "models": model_files(models),
        "prompts": [hash_prompts(model_prompts) for model_prompts in encoded],
    }
    responses: dict[str, list[SampledResponse]] = {}
    with ProgressFile(output, begun) as unfinished:
        for name, path, encoder, model_prompts in zip(
            names, models, encoders, encoded, strict=True
        ):
            by_position = {
                position: [
                    SampledResponse(prompts[position].prompt, **fields) for fields in of_prompt
                ]
                for batch in unfinished.batches(name)
                for position, of_prompt in batch
            }
            if len(by_position) < len(prompts):
                model = load_policy(path, model_options, device)
                with progress_bar(f"responses of {name}", len(prompts)) as progress:
                    progress(len(by_position))
                    for batch in sample_batches(
                        model,
                        encoder,
                        model_prompts.examples,
                        sampling,
                        batch_size,
                        seed,
                        responses_per_prompt,
                        progress,
                        finished=set(by_position),
                    ):
                        collected = collect_responses(prompts, batch, _decode(batch, encoder))
                        unfinished.add(
                            name,
                            [
                                [position, [response.sampled_fields() for response in of_prompt]]
                                for position, of_prompt in collected.items()
                            ],
                        )
                        by_position |= collected
                del model  # frees its memory before the next one is loaded
            responses[name] = [
                response for position in range(len(prompts)) for response in by_position[position]
            ]
        generation = Generation(
            models=dict(zip(names, models, strict=True)),
            responses=responses,
            shortened={
                name: model_prompts.shortened
                for name, model_prompts in zip(names, encoded, strict=True)
            },
            seed=seed,
            settings=settings,
        )
        if output is not None:
            write_json_lines(output, generation.records())
    return generation


def _decode(batch: SampledBatch, encoder: DialogueEncoder) -> list[str]:
    ids, mask = batch.rollouts.response_ids.cpu(), batch.rollouts.response_mask.cpu()
    return [
        encoder.decode_response(row[real].tolist()) for row, real in zip(ids, mask, strict=True)
    ]


def model_files(models: Sequence[str]) -> dict[str, dict[str, list[int]]]:
    """Size and time of the weight files of local models, which another training changes.

    Args:
        models: Folders or hub ids.

    Returns:
        Bytes and nanoseconds by file name, by model; nothing for a hub id.
    """
    return {
        path: {
            file.name: [file.stat().st_size, file.stat().st_mtime_ns]
            for file in sorted(Path(path).glob("*.safetensors"))
        }
        for path in models
    }


def hash_prompts(prompts: EncodedPrompts) -> str:
    """SHA-256 of prompts as a model reads them, in hexadecimal digits."""
    texts = json.dumps([example.text for example in prompts.examples])
    return hashlib.sha256(texts.encode()).hexdigest()


def print_generation(generation: Generation) -> None:
    """Print every prompt, followed by the responses of all models, on standard output."""
    console = Console()
    n_samples = generation.settings["responses_per_prompt"]
    first_model = next(iter(generation.responses.values()))
    for start in range(0, len(first_model), n_samples):
        for message in first_model[start].prompt:
            print_text(console, f"{message.role}: ", NAME_STYLE, end="")
            print_text(console, message.content)
        for name, responses in generation.responses.items():
            for response in responses[start : start + n_samples]:
                number = f" {response.sample + 1}" if n_samples > 1 else ""
                print_text(console, f"{name}{number}: ", NAME_STYLE, end="")
                print_text(console, response.response)
                if not response.ended:
                    print_text(console, f"(cut off at {response.length} tokens)", NOTE_STYLE)
        print_text(console, "")
