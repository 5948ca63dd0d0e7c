"""Rollout metrics of given responses, and of three that are worked out by hand."""

import math
from typing import Any

import torch
from torch import Tensor

from lit_rlhf import rollout

LENGTHS = (4, 1, 2)
LOGPROBS = ((-1.0, -2.0, -0.5, -3.0), (-0.25,), (-1.5, -2.5))
REF_LOGPROBS = ((-1.5, -2.0, -1.5, -2.0), (-0.25,), (-2.5, -4.0))
ENTROPY = ((0.5, 1.0, 1.5, 2.0), (3.0,), (0.25, 0.75))
SCORES = (1.0, -2.0, 4.0)
JUNK = 999.0
"""Fills the columns behind the ends of the responses."""


def pad_rows(rows: Any) -> Tensor:
    """Rows of numbers as one tensor, with `JUNK` behind their ends."""
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[JUNK] * (width - len(row))] for row in rows])


def make_batch(rows: slice = slice(None)) -> dict[str, Tensor]:
    """The responses as `RolloutMetrics.update` takes them; the second is cut off.

    Args:
        rows: Which of the three responses.
    """
    lengths = torch.tensor(LENGTHS[rows])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.tensor([[5, 6, 5, 6], [7, 0, 0, 0], [5, 6, 0, 0]])[rows, : mask.shape[1]]
    return {
        "logprobs": pad_rows(LOGPROBS[rows]),
        "ref_logprobs": pad_rows(REF_LOGPROBS[rows]),
        "entropy": pad_rows(ENTROPY[rows]),
        "response_mask": mask,
        "response_ids": ids.masked_fill(~mask, 8),
        "terminated": torch.tensor([True, False, True])[rows],
        "scores": {"score": torch.tensor(SCORES[rows])},
    }


def add_batch(
    metrics: rollout.RolloutMetrics,
    ids: Tensor,
    mask: Tensor,
    *,
    entropy: float = 0.0,
    **scores: dict[str, Tensor],
) -> None:
    """Add responses that all ended, whose tokens have log-probs of 0.

    Args:
        metrics: What they are added to.
        ids: Their tokens, `[B, T]` long.
        mask: Which of them are real, `[B, T]` bool.
        entropy: Entropy at each token, nats.
        **scores: `scores` and `votes` of the update.
    """
    zeros = torch.zeros(ids.shape)
    metrics.update(
        logprobs=zeros,
        ref_logprobs=zeros,
        entropy=torch.full(ids.shape, entropy),
        response_mask=mask,
        response_ids=ids,
        terminated=torch.ones(len(ids), dtype=torch.bool),
        **scores,
    )


def compute_metrics(*parts: slice) -> dict[str, float]:
    """Metrics of the responses, in one batch for each slice of them."""
    metrics = rollout.RolloutMetrics()
    for rows in parts:
        metrics.update(**make_batch(rows))
    computed = metrics.compute()
    assert all(value.shape == () for value in computed.values())
    return {key: float(value) for key, value in computed.items()}


def expected_metrics() -> dict[str, float]:
    """Metrics of all three responses, worked out from the numbers above."""
    tokens = 7
    logprob, ref = (sum(sum(row) for row in rows) for rows in (LOGPROBS, REF_LOGPROBS))
    return {
        "rollout/score": 1.0,
        "rollout/kl": (logprob - ref) / 3,
        "rollout/kl_per_token": (logprob - ref) / tokens,
        "rollout/response_length": 7 / 3,
        "rollout/truncation_rate": 1 / 3,
        "rollout/perplexity": math.exp(-logprob / tokens),
        "rollout/ref_perplexity": math.exp(-ref / tokens),
        "rollout/entropy": sum(sum(row) for row in ENTROPY) / tokens,
        # 5 6, 6 5, 5 6 and 5 6: two of four
        "rollout/distinct_2": 0.5,
        # the second 5 6 of the first response; the third has one bigram
        "rollout/repeated_2": 1 / 4,
        "rollout/opening_share": 1 / 3,
        "rollout/responses": 3.0,
    }
