"""Sampling responses from a policy.

Notation: `B` samples, `P` prompt tokens, `T` response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig

from lit_rlhf.models import LanguageModel, evaluating, unwrapped, using_generation_config
from lit_rlhf.rollout.batch import RolloutBatch


@dataclass(frozen=True)
class SamplingOptions:
    """How responses are sampled. The defaults sample from the policy itself, softmax(logits).

    Temperature is part of the policy, as log-probs are scored with the same one. `top_p`, `top_k`,
    `repetition_penalty` and `min_new_tokens` make the samples off-policy: PPO's ratio is then taken
    against a distribution that the samples do not come from.

    Attributes:
        max_new_tokens: Longest response, in tokens, EOS included.
        temperature: Logits are divided by it.
        top_p: Sample from the smallest set of tokens with this probability; 1 is off.
        top_k: Sample from this many most probable tokens; 0 is off.
        repetition_penalty: Penalty on tokens that occurred, prompt included; 1 is off.
        do_sample: Sample; off takes the most probable token.
        min_new_tokens: No EOS before this many tokens; 0 is off.

    Raises:
        ValueError: If an option is out of its range.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    do_sample: bool = True
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: expected an integer >= 1, got {self.max_new_tokens}")
        if self.temperature <= 0:
            raise ValueError(
                f"temperature: expected > 0 (do_sample off is greedy), got {self.temperature}"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected 0 < value <= 1, got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k: expected an integer >= 0, got {self.top_k}")
        if self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty: expected > 0, got {self.repetition_penalty}")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens: expected 0 to max_new_tokens = {self.max_new_tokens}, "
                f"got {self.min_new_tokens}"
            )

    @property
    def off_policy(self) -> tuple[str, ...]:
        """Names of the options that make samples differ from the policy's distribution."""
        on = {
            "top_p": self.top_p < 1,
            "top_k": self.top_k > 0,
            "repetition_penalty": self.repetition_penalty != 1,
            "do_sample": not self.do_sample,
            "min_new_tokens": self.min_new_tokens > 0,
        }
        return tuple(name for name, is_on in on.items() if is_on)

    def generation_config(self) -> dict[str, Any]:
        """The options by transformers' names, for `generate` and for the saved model.

        None is left open, as transformers would fill it in: `top_k`, for one, with 50.
        """
        settings = asdict(self)
        if not self.do_sample:
            for name in ("temperature", "top_p", "top_k"):
                del settings[name]
        if self.min_new_tokens == 0:
            del settings["min_new_tokens"]
        return settings


@torch.no_grad()
def sampled_responses(
    model: LanguageModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    options: SamplingOptions,
    eos_token_ids: Sequence[int],
    pad_token_id: int,
    seed: int,
    micro_batch_size: int | None = None,
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
        micro_batch_size: Prompts that generate together; `None` takes all.

    Returns:
        The prompts as given, and responses as wide as the longest of them.

    Raises:
        ValueError: If shapes or dtypes do not fit, a prompt is empty or not padded on the left, or
            prompt and response do not fit into the model's positions.
    """
    _check_prompts(prompt_ids, prompt_mask)
    inner = unwrapped(model)
    limit = getattr(inner.config, "max_position_embeddings", None)
    longest = int(prompt_mask.sum(dim=1).max()) + options.max_new_tokens
    if limit is not None and longest > limit:
        raise ValueError(
            f"options.max_new_tokens: expected prompt and response within the model's {limit} "
            f"positions, got {longest} ({options.max_new_tokens} of them new)"
        )
    size = _checked_size(micro_batch_size, len(prompt_ids))
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        **options.generation_config(),
        eos_token_id=list(eos_token_ids) or None,
        pad_token_id=pad_token_id,
        num_beams=1,
        use_cache=True,
    )
    parts = []
    with (
        evaluating(inner),
        using_generation_config(inner, GenerationConfig()),  # type: ignore[no-untyped-call]
        _seeded(seed, prompt_ids.device),
    ):
        for start in range(0, len(prompt_ids), size):
            ids, mask = prompt_ids[start : start + size], prompt_mask[start : start + size]
            sequences = inner.generate(  # type: ignore[operator]
                input_ids=ids, attention_mask=mask.long(), generation_config=config
            )
            parts.append(sequences[:, prompt_ids.shape[1] :])
    width = max(part.shape[1] for part in parts)
    responses = torch.cat(
        [functional.pad(part, (0, width - part.shape[1]), value=pad_token_id) for part in parts]
    )
    is_eos = torch.isin(responses, responses.new_tensor(list(eos_token_ids)))
    seen = is_eos.cumsum(dim=1)
    # real tokens are those with no EOS before them; rows of a narrower micro-batch all have one
    response_mask = (seen - is_eos.long()) == 0
    return RolloutBatch(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        response_ids=responses.masked_fill(~response_mask, pad_token_id),
        response_mask=response_mask,
        terminated=is_eos.any(dim=1),
    )


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


def _checked_size(micro_batch_size: int | None, n_samples: int) -> int:
    if micro_batch_size is not None and micro_batch_size < 1:
        raise ValueError(f"micro_batch_size: expected an integer >= 1, got {micro_batch_size}")
    return micro_batch_size or n_samples


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
