"""What a rollout looked like: signals that tell a better policy from one that cheats.

Reward and losses do not show a collapse; KL, length and perplexity do (arXiv 2307.04964, Sec. 5.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rlhf.functional import distinct_n, loss_perplexity, masked_sum
from lit_rlhf.rollout.batch import RolloutBatch
from lit_rlhf.rollout.estimates import TokenStatistics
from lit_rlhf.stats import global_sum


def rollout_metrics(
    rollouts: RolloutBatch, estimates: TokenStatistics, scores: Tensor
) -> dict[str, Tensor]:
    """The `rollout/*` metrics of `B` responses on this rank, over the responses of all ranks.

    Args:
        rollouts: Prompts and responses.
        estimates: What policy and reference make of them.
        scores: Raw reward, `[B]`.

    Returns:
        0-dim tensors: means per response of `score`, `kl` (nats), `response_length` (tokens) and
        `truncation_rate`; means per token of `kl_per_token` and `entropy` (nats); token-weighted
        `perplexity` and `ref_perplexity`; and `distinct_2`, the share of distinct bigrams, of
        this rank.
    """
    mask = rollouts.response_mask
    totals = torch.stack(
        [
            masked_sum(estimates.logprobs, mask),
            masked_sum(estimates.ref_logprobs, mask),
            masked_sum(estimates.entropy, mask),
            mask.sum(),
            (~rollouts.terminated).sum(),
            scores.sum(),
            torch.tensor(len(scores), device=scores.device),
        ]
    )
    logprob, ref_logprob, entropies, tokens, truncated, score, n = global_sum(
        totals.double()
    ).unbind()
    tokens = tokens.clamp(min=1)
    return {
        "rollout/score": score / n,
        "rollout/kl": (logprob - ref_logprob) / n,
        "rollout/kl_per_token": (logprob - ref_logprob) / tokens,
        "rollout/response_length": tokens / n,
        "rollout/truncation_rate": truncated / n,
        "rollout/perplexity": loss_perplexity(-logprob / tokens),
        "rollout/ref_perplexity": loss_perplexity(-ref_logprob / tokens),
        "rollout/entropy": entropies / tokens,
        "rollout/distinct_2": distinct_n(rollouts.response_ids, mask, n=2),
    }
