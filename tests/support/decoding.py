"""Prompts of unequal lengths, and responses to them: sampled by us, and by transformers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from lit_rlhf.forward import LanguageModel
from lit_rlhf.rollout import RolloutBatch, SamplingOptions, generate_responses
from tests.support.tiny_models import EOS_ID, PAD_ID, VOCAB_SIZE

EOS_IDS = [EOS_ID, 17, 44, 150, 200]
"""Enough ids that some responses of models with random weights end early."""
WIDTH = 20
MAX_NEW_TOKENS = 30


def make_prompts(lengths: tuple[int, ...] = (20, 13, 5, 17, 1, 9)) -> tuple[Tensor, Tensor]:
    """Random ids of prompts padded on the left to 20 columns, and their mask.

    Args:
        lengths: Number of tokens of each prompt, at most 20.
    """
    mask = torch.arange(WIDTH) >= WIDTH - torch.tensor(lengths)[:, None]
    ids = torch.randint(4, 288, mask.shape, generator=torch.Generator().manual_seed(1))
    return ids.masked_fill(~mask, PAD_ID), mask


def make_short_prompts() -> tuple[Tensor, Tensor]:
    """Random ids of prompts of 9, 4, 1 and 6 tokens, padded on the left, and their mask."""
    lengths, width = (9, 4, 1, 6), 9
    generator = torch.Generator().manual_seed(0)
    ids = torch.full((len(lengths), width), PAD_ID)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(4, VOCAB_SIZE, (length,), generator=generator)
        mask[row, width - length :] = True
    return ids, mask


def sample_responses(
    model: LanguageModel,
    ids: Tensor,
    mask: Tensor,
    options: SamplingOptions,
    *,
    eos_token_ids: Sequence[int] = EOS_IDS,
    seed: int = 0,
    batch_size: int | None = None,
) -> RolloutBatch:
    """Sample by `generate_responses`, with the padding of the tiny models.

    Args:
        model: Causal language model.
        ids: Prompts, `[B, P]`.
        mask: True for their tokens, `[B, P]`.
        options: How tokens are sampled.
        eos_token_ids: Tokens of which the first ends a response.
        seed: Seed of all random numbers.
        batch_size: Sequences in progress at a time, at most; `None`: all.
    """
    return generate_responses(
        model,
        ids,
        mask,
        options,
        eos_token_ids=eos_token_ids,
        pad_token_id=PAD_ID,
        seed=seed,
        batch_size=batch_size,
    )


def generate_with_transformers(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, **options: Any
) -> Tensor:
    """Decode greedily by transformers' own loop, one prompt at a time and therefore unpadded.

    Args:
        model: Causal language model.
        ids: Prompts, `[B, P]`.
        mask: True for their tokens, `[B, P]`.
        **options: Further fields of `GenerationConfig`.
    """
    options |= {"eos_token_id": EOS_IDS, "pad_token_id": PAD_ID, "do_sample": False}
    config = GenerationConfig(max_new_tokens=MAX_NEW_TOKENS, **options)
    responses = torch.full((len(ids), MAX_NEW_TOKENS), PAD_ID)
    for row, (tokens, real) in enumerate(zip(ids, mask, strict=True)):
        prompt = tokens[real].unsqueeze(0)
        out = model.generate(prompt, generation_config=config)  # type: ignore[operator]
        response = out[0, prompt.shape[1] :]
        responses[row, : len(response)] = response
    return responses
