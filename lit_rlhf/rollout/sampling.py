"""How a token is sampled from logits: the options, and the sampler.

Notation: `n` rows, `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lit_rlhf.functional import tempered_logits


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
    def off_policy_options(self) -> tuple[str, ...]:
        """Names of the options that make samples differ from the policy's distribution."""
        on = {
            "top_p": self.top_p < 1,
            "top_k": self.top_k > 0,
            "repetition_penalty": self.repetition_penalty != 1,
            "do_sample": not self.do_sample,
            "min_new_tokens": self.min_new_tokens > 0,
        }
        return tuple(name for name, is_on in on.items() if is_on)

    def generation_kwargs(self) -> dict[str, Any]:
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


def sample_tokens(
    logits: Tensor,
    uniforms: Tensor,
    options: SamplingOptions,
    eos_token_ids: Tensor,
    seen: Tensor,
    n_new: Tensor,
) -> Tensor:
    """One token for each row, as transformers' `generate` draws it.

    A row's token is the first at which the cumulative probability exceeds the row's uniform number,
    so it depends on nothing but the row's own logits and number. It also costs one number where
    `torch.multinomial` draws `V`.

    Args:
        logits: `[n, V]`.
        uniforms: In [0, 1), `[n]` float64.
        options: How to sample.
        eos_token_ids: Tokens that end a response, `[E]` long.
        seen: The tokens so far, `[n, L]` long; not looked at without a repetition penalty.
        n_new: Tokens of the response so far, `[n]` long.

    Returns:
        `[n]` long.
    """
    scores = logits.float()
    if options.repetition_penalty != 1:
        penalty = RepetitionPenaltyLogitsProcessor(options.repetition_penalty)
        scores = penalty(seen, scores)
    if options.min_new_tokens:
        early = n_new < options.min_new_tokens
        without = scores.index_fill(1, eos_token_ids, -torch.inf)
        scores = torch.where(early[:, None], without, scores)
    if not options.do_sample:
        return scores.argmax(-1)
    scores = tempered_logits(scores.unsqueeze(0), options.temperature).squeeze(0)
    if options.top_k > 0:
        scores = TopKLogitsWarper(min(options.top_k, scores.shape[1]))(seen, scores)
    if options.top_p < 1:
        scores = TopPLogitsWarper(options.top_p)(seen, scores)
    # in float64: float32 sums over a large vocabulary lose what its rare tokens weigh
    cumulative = scores.softmax(-1).cumsum(-1, dtype=torch.float64)
    targets = uniforms[:, None] * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    return found.clamp(max=scores.shape[1] - 1)  # beyond it only where a logit is NaN
