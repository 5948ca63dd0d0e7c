"""Metrics of a rollout that tell a better policy from a collapsing one.

Reward and losses look healthy during a collapse; KL, response length and perplexity do not
(Section 5.2 of arXiv 2307.04964). Notation: `B` responses, `T` response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rlhf.functional import distinct_n, loss_perplexity, masked_sum
from lit_rlhf.stats import global_sum


def rollout_metrics(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    entropy: Tensor,
    response_mask: Tensor,
    response_ids: Tensor,
    terminated: Tensor,
    scores: Tensor | None = None,
) -> dict[str, Tensor]:
    """The `rollout/*` metrics, over the responses of all ranks.

    Under `torch.distributed` every rank has to call it, with its own responses.

    Args:
        logprobs: Of the policy, `[B, T]` nats.
        ref_logprobs: Of the reference, `[B, T]` nats.
        entropy: Of the policy's next-token distributions, `[B, T]` nats.
        response_mask: Response tokens, `[B, T]` bool.
        response_ids: `[B, T]` long.
        terminated: Whether a response ended with EOS, `[B]` bool; otherwise it was cut off.
        scores: Raw rewards, `[B]`; `None` leaves `rollout/score` out.

    Returns:
        0-dim tensors. Means per response: `score`, `kl` (nats), `response_length` (tokens) and
        `truncation_rate`. Means per token: `kl_per_token` and `entropy` (nats). Token-weighted:
        `perplexity` and `ref_perplexity`. `distinct_2` is the share of distinct bigrams, among
        the responses of this rank alone.
    """
    score_sum = terminated.new_zeros((), dtype=logprobs.dtype) if scores is None else scores.sum()
    totals = torch.stack(
        [
            masked_sum(logprobs, response_mask),
            masked_sum(ref_logprobs, response_mask),
            masked_sum(entropy, response_mask),
            response_mask.sum(),
            (~terminated).sum(),
            score_sum,
            torch.tensor(len(terminated), device=terminated.device),
        ]
    )
    # one reduction for all sums: per-rank means would weigh a short rank's tokens more
    logprob, ref_logprob, entropies, n_tokens, n_truncated, score, n = global_sum(
        totals.double()
    ).unbind()
    n_tokens = n_tokens.clamp(min=1)
    metrics = {
        "rollout/kl": (logprob - ref_logprob) / n,
        "rollout/kl_per_token": (logprob - ref_logprob) / n_tokens,
        "rollout/response_length": n_tokens / n,
        "rollout/truncation_rate": n_truncated / n,
        "rollout/perplexity": loss_perplexity(-logprob / n_tokens),
        "rollout/ref_perplexity": loss_perplexity(-ref_logprob / n_tokens),
        "rollout/entropy": entropies / n_tokens,
        "rollout/distinct_2": distinct_n(response_ids, response_mask, n=2),
    }
    return metrics if scores is None else {"rollout/score": score / n, **metrics}
