"""The options of sampling, and the sampler that picks a token from logits.

Notation: `n` sequences, `L` tokens of a sequence so far, `V` vocabulary.
"""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lit_rlhf.checks import check_count, check_number, check_positive
from lit_rlhf.functional import tempered_logits


@dataclass(frozen=True)
class SamplingOptions:
    """Options of sampling; by default responses come from softmax(logits), the policy itself.

    The temperature belongs to the policy: log-probs are scored with the same one. `top_p`,
    `top_k`, `min_p`, `repetition_penalty` and `min_new_tokens` make the samples off-policy: the
    samples then come from another distribution than the one that PPO's ratio is taken against.

    Attributes:
        max_new_tokens: Longest response in tokens, EOS included.
        temperature: Divisor of the logits, positive.
        top_p: Sample from the smallest set of tokens with at least this probability, in (0, 1];
            1 is off.
        top_k: Sample from this many most probable tokens; 0 is off.
        min_p: Sample from the tokens that are at least this share as probable as the most probable
            one, in [0, 1]; 0 is off.
        repetition_penalty: transformers' penalty on tokens that occurred, prompt included,
            positive; 1 is off.
        do_sample: Sample; if false, take the most probable token.
        min_new_tokens: No EOS before this many tokens; 0 is off.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    do_sample: bool = True
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        check_count("max_new_tokens", self.max_new_tokens)
        check_count("top_k", self.top_k, minimum=0)
        check_positive("temperature", self.temperature)  # do_sample=False is greedy
        check_positive("repetition_penalty", self.repetition_penalty)
        check_number("top_p", self.top_p, "a number in (0, 1]", lambda share: 0 < share <= 1)
        check_number("min_p", self.min_p, "a number in [0, 1]", lambda share: 0 <= share <= 1)
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens: expected 0 to max_new_tokens = {self.max_new_tokens}, "
                f"got {self.min_new_tokens}"
            )

    @property
    def off_policy_options(self) -> tuple[str, ...]:
        """Names of the options that make samples differ from the policy's distribution."""
        is_on = {
            "top_p": self.top_p < 1,
            "top_k": self.top_k > 0,
            "min_p": self.min_p > 0,
            "repetition_penalty": self.repetition_penalty != 1,
            "do_sample": not self.do_sample,
            "min_new_tokens": self.min_new_tokens > 0,
        }
        return tuple(name for name, on in is_on.items() if on)

    def generation_kwargs(self) -> dict[str, Any]:
        """The options as arguments of transformers' `GenerationConfig`.

        Every option that acts is spelled out: transformers fills in the others from its own
        defaults (50 for `top_k`).
        """
        settings = asdict(self)
        if not self.do_sample:
            # transformers warns about sampling options beside greedy decoding
            for name in ("temperature", "top_p", "top_k", "min_p"):
                del settings[name]
        for name in ("min_new_tokens", "min_p"):
            if settings.get(name) == 0:
                del settings[name]
        return settings


class SampledTokens(NamedTuple):
    """The next token of each sequence.

    Attributes:
        token_ids: The tokens, `[n]` long.
        logprobs: Their log-probs in the distribution that they were drawn from, `[n]` nats; `None`
            where it is the policy's, and where the most probable token was taken.
    """

    token_ids: Tensor
    logprobs: Tensor | None


def sample_tokens(
    logits: Tensor,
    uniforms: Tensor,
    options: SamplingOptions,
    *,
    eos_token_ids: Tensor,
    seen: Tensor,
    n_new: Tensor,
) -> SampledTokens:
    """Sample the next token of each sequence, from the distribution of transformers' `generate`.

    The token is the first at which the cumulative probability exceeds the sequence's random number.
    So it depends on nothing else, and takes one random number, where `torch.multinomial` draws `V`.

    Args:
        logits: The policy's logits, `[n, V]`.
        uniforms: A random number for each sequence, `[n]` float64 in [0, 1).
        options: What the distribution is.
        eos_token_ids: Tokens that end a response, `[m]` long.
        seen: Tokens of the sequence so far, `[n, L]` long; read by the repetition penalty only.
        n_new: Tokens of the response so far, `[n]` long.
    """
    scores = logits.float()
    if options.repetition_penalty != 1:
        penalty = RepetitionPenaltyLogitsProcessor(options.repetition_penalty)
        scores = penalty(seen, scores)
    if options.min_new_tokens:
        too_early = n_new < options.min_new_tokens
        without_eos = scores.index_fill(1, eos_token_ids, -torch.inf)
        scores = torch.where(too_early[:, None], without_eos, scores)
    if not options.do_sample:
        return SampledTokens(scores.argmax(-1), logprobs=None)
    # the order of transformers: penalties first, then temperature, top-k, top-p and min-p
    scores = tempered_logits(scores.unsqueeze(0), options.temperature).squeeze(0)
    if options.top_k > 0:
        scores = TopKLogitsWarper(min(options.top_k, scores.shape[1]))(seen, scores)
    if options.top_p < 1:
        scores = TopPLogitsWarper(options.top_p)(seen, scores)
    if options.min_p > 0:
        # typed as LongTensor, a class that torch's own functions do not return
        scores = MinPLogitsWarper(options.min_p)(seen, scores)  # type: ignore[arg-type]
    # a float32 sum over a large vocabulary would lose the weight of its rare tokens
    cumulative = scores.softmax(-1).cumsum(-1, dtype=torch.float64)
    targets = uniforms[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    # out of range only if a logit is NaN, which the training step reports
    tokens = tokens.clamp(max=scores.shape[1] - 1)
    if not options.off_policy_options:
        return SampledTokens(tokens, logprobs=None)
    logprobs = scores.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    return SampledTokens(tokens, logprobs)
