"""Sampling responses from a policy.

Notation: `B` samples, `P` prompt tokens, `T` response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedModel

from lit_rlhf.forward import LanguageModel, eval_mode, supports_chunked_logits, unwrap_model
from lit_rlhf.models import using_generation_config
from lit_rlhf.rollout.batch import RolloutBatch
from lit_rlhf.rollout.decoder import Generated, generated
from lit_rlhf.rollout.sampling import SamplingOptions


@torch.no_grad()
def generate_responses(
    model: LanguageModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    options: SamplingOptions,
    eos_token_ids: Sequence[int],
    pad_token_id: int,
    seed: int,
    batch_size: int | None = None,
) -> RolloutBatch:
    """A response to each prompt, sampled in evaluation mode.

    The settings in the model's folder have no say: the distribution is softmax(logits /
    temperature) unless `options` says otherwise. The padding token may be an EOS token: a response
    ends at its first EOS.

    Args:
        model: A causal language model.
        prompt_ids: `[B, P]` long, padded on the left.
        prompt_mask: Real tokens, `[B, P]` bool.
        options: How to sample.
        eos_token_ids: Tokens that end a response; empty for none.
        pad_token_id: Fills responses behind their end.
        seed: The same seed gives the same tokens. The caller's random state is left as it was.
        batch_size: Most sequences in progress at a time; `None` takes all. A sequence that
            ends makes room for the next prompt.

    Returns:
        The prompts as given, and responses as wide as the longest of them.

    Raises:
        ValueError: If shapes or dtypes do not fit, a prompt is empty or not padded on the left, or
            prompt and response do not fit into the model's positions.
    """
    _check_prompts(prompt_ids, prompt_mask)
    inner = unwrap_model(model)
    limit = getattr(inner.config, "max_position_embeddings", None)
    longest = int(prompt_mask.sum(dim=1).max()) + options.max_new_tokens
    if limit is not None and longest > limit:
        raise ValueError(
            f"options.max_new_tokens: expected prompt and response within the model's {limit} "
            f"positions, got {longest} ({options.max_new_tokens} of them new)"
        )
    size = _checked_size(batch_size, len(prompt_ids))
    if supports_chunked_logits(model):
        responses, statistics = generated(
            model, prompt_ids, prompt_mask, options, eos_token_ids, seed, size
        )
    else:
        responses, statistics = _by_transformers(
            inner, prompt_ids, prompt_mask, options, eos_token_ids, pad_token_id, seed, size
        )
    is_eos = torch.isin(responses, responses.new_tensor(list(eos_token_ids)))
    # real tokens are those with no EOS before them
    response_mask = (is_eos.cumsum(dim=1) - is_eos.long()) == 0
    width = int(response_mask.sum(dim=1).max())
    responses, response_mask = responses[:, :width], response_mask[:, :width]
    if statistics is not None:
        outside = ~response_mask
        statistics = statistics._replace(
            logprobs=statistics.logprobs[:, :width].masked_fill(outside, 0.0),
            entropy=statistics.entropy[:, :width].masked_fill(outside, 0.0),
        )
    return RolloutBatch(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        response_ids=responses.masked_fill(~response_mask, pad_token_id),
        response_mask=response_mask,
        terminated=is_eos.any(dim=1),
        statistics=statistics,
    )


def _by_transformers(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    options: SamplingOptions,
    eos_token_ids: Sequence[int],
    pad_token_id: int,
    seed: int,
    size: int,
) -> Generated:
    """Responses from `generate`, which every architecture has, batch by batch."""
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        **options.generation_kwargs(),
        eos_token_id=list(eos_token_ids) or None,
        pad_token_id=pad_token_id,
        num_beams=1,
        use_cache=True,
    )
    parts = []
    with (
        eval_mode(model),
        using_generation_config(model, GenerationConfig()),  # type: ignore[no-untyped-call]
        _seeded(seed, prompt_ids.device),
    ):
        for start in range(0, len(prompt_ids), size):
            ids, mask = prompt_ids[start : start + size], prompt_mask[start : start + size]
            sequences = model.generate(  # type: ignore[operator]
                input_ids=ids, attention_mask=mask.long(), generation_config=config
            )
            parts.append(sequences[:, prompt_ids.shape[1] :])
    width = max(part.shape[1] for part in parts)
    # rows of a narrower batch all have an EOS: what fills them up is behind it
    filled = [functional.pad(p, (0, width - p.shape[1]), value=pad_token_id) for p in parts]
    return Generated(torch.cat(filled), None)


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the generators that sampling on `device` draws from, and put them back afterwards."""
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        torch.default_generator.manual_seed(seed)
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def _checked_size(batch_size: int | None, n_samples: int) -> int:
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size: expected an integer >= 1, got {batch_size}")
    return batch_size or n_samples


def _check_prompts(prompt_ids: Tensor, prompt_mask: Tensor) -> None:
    if prompt_ids.dim() != 2 or prompt_ids.dtype != torch.long or 0 in prompt_ids.shape:
        raise ValueError(
            "prompt_ids: expected shape [B, P] without a 0 and dtype int64, "
            f"got {tuple(prompt_ids.shape)} and {prompt_ids.dtype}"
        )
    if prompt_mask.shape != prompt_ids.shape or prompt_mask.dtype != torch.bool:
        raise ValueError(
            f"prompt_mask: expected prompt_ids' shape {tuple(prompt_ids.shape)} and dtype bool, "
            f"got {tuple(prompt_mask.shape)} and {prompt_mask.dtype}"
        )
    left_padded = prompt_mask[:, -1].all() and (prompt_mask[:, 1:] >= prompt_mask[:, :-1]).all()
    if not bool(left_padded):
        raise ValueError(
            "prompt_mask: expected prompts of at least one token, padded on the left, "
            "got a row with False behind a True or with False only"
        )
