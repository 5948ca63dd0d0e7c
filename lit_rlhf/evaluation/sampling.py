"""Prompts of an evaluation, and responses to them in batches of about equal prompt length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from lit_rlhf.data import DataSource, DialogueEncoder, PromptBatch, PromptRecord, load_records
from lit_rlhf.data.examples import (
    EncodingCounts,
    PromptExample,
    collated_prompts,
    encoded_examples,
    prompt_examples,
)
from lit_rlhf.evaluation.responses import Turns
from lit_rlhf.forward import LanguageModel, freeze
from lit_rlhf.models import ModelOptions, load_causal_lm
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


def encode_prompts(
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
    return encoded_records(prompt_records(source, limit), encoder)


def prompt_records(source: DataSource, limit: int | None = None) -> list[PromptRecord]:
    """Read prompts; arguments and errors are those of `encode_prompts`."""
    if limit is not None and limit < 1:
        raise ValueError(f"max_prompts: expected an integer >= 1, got {limit}")
    records = load_records("prompt", [source], apply_weights=False).records[:limit]
    return [record for record in records if isinstance(record, PromptRecord)]  # all are


def encoded_records(records: Sequence[PromptRecord], encoder: DialogueEncoder) -> EncodedPrompts:
    """Encode prompts that have been read.

    Raises:
        RecordError: If a turn contains the text of the EOS token.
    """
    counts = EncodingCounts()
    examples = encoded_examples(
        records,
        lambda record, counts: prompt_examples(record, encoder, counts),
        counts,
        on_bad_record="error",
    )
    numbered = [example._replace(index=index) for index, example in enumerate(examples)]
    return EncodedPrompts(numbered, counts, [record.prompt for record in records])


def length_batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Positions in batches of about equal length.

    The longest come first, so that memory runs out early or never.

    Raises:
        ValueError: If `batch_size` is not positive.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size: expected an integer >= 1, got {batch_size}")
    order = sorted(range(len(lengths)), key=lambda position: -lengths[position])
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def sampled_batches(
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
    for positions in length_batches(lengths, batch_size):
        prompts = collated_prompts([examples[i] for i in positions], encoder.pad_token_id)
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


def loaded_policy(path: str, options: ModelOptions, device: torch.device) -> LanguageModel:
    """A policy that is only sampled from and read.

    Raises:
        ValueError: If there is no causal language model at `path`.
    """
    model = freeze(load_causal_lm(path, options))
    module: nn.Module = model  # transformers' own `to` is typed for one model class only
    module.to(device)
    return model


def chosen_device(name: str) -> torch.device:
    """The device that `name` stands for; `auto` is the first CUDA device, or else the CPU.

    Raises:
        ValueError: If there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device: expected 'auto' or a device of this machine, got {name!r}: {error}"
        ) from error
    return device
