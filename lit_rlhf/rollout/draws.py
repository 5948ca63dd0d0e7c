"""Drawing a token from logits.

Notation: `n` rows, `V` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lit_rlhf.functional.logprobs import tempered_logits
from lit_rlhf.rollout.options import SamplingOptions


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
