"""The rollout metrics, against sums worked out by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_rlhf import rollout

LENGTHS = (4, 1, 2)
LOGPROBS = ((-1.0, -2.0, -0.5, -3.0), (-0.25,), (-1.5, -2.5))
REF_LOGPROBS = ((-1.5, -2.0, -1.5, -2.0), (-0.25,), (-2.5, -4.0))
ENTROPY = ((0.5, 1.0, 1.5, 2.0), (3.0,), (0.25, 0.75))
SCORES = (1.0, -2.0, 4.0)
JUNK = 999.0


def padded(rows: Any) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[JUNK] * (width - len(row))] for row in rows])


def batch(rows: slice = slice(None)) -> dict[str, Tensor]:
    """Three responses, the second cut off; junk behind their ends."""
    lengths = torch.tensor(LENGTHS[rows])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.tensor([[5, 6, 5, 6], [7, 0, 0, 0], [5, 6, 0, 0]])[rows, : mask.shape[1]]
    return {
        "logprobs": padded(LOGPROBS[rows]),
        "ref_logprobs": padded(REF_LOGPROBS[rows]),
        "entropy": padded(ENTROPY[rows]),
        "response_mask": mask,
        "response_ids": ids.masked_fill(~mask, 8),
        "terminated": torch.tensor([True, False, True])[rows],
        "scores": {"score": torch.tensor(SCORES[rows])},
    }


def measured(*parts: slice) -> dict[str, float]:
    """Metrics of the responses in these batches."""
    metrics = rollout.RolloutMetrics()
    for rows in parts:
        metrics.update(**batch(rows))
    computed = metrics.compute()
    assert all(value.shape == () for value in computed.values())
    return {key: float(value) for key, value in computed.items()}


def expected() -> dict[str, float]:
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


@pytest.mark.parametrize("cut", [None, 1, 2])
def test_metrics_depend_on_neither_padding_nor_batches(cut: int | None) -> None:
    parts = (slice(None),) if cut is None else (slice(cut), slice(cut, None))
    assert measured(*parts) == pytest.approx(expected(), rel=1e-6)
    assert measured() == {}


def test_commonest_opening_is_counted_over_batches() -> None:
    metrics = rollout.RolloutMetrics()
    for rows in ([[1, 2, 3, 4, 5], [1, 2, 3, 4, 9]], [[1, 2, 3, 4, 7], [1, 2, 3, 0, 0]]):
        ids = torch.tensor(rows)
        zeros, ended = torch.zeros(ids.shape), torch.ones(2, dtype=torch.bool)
        metrics.update(
            logprobs=zeros,
            ref_logprobs=zeros,
            entropy=zeros,
            response_mask=ids > 0,
            response_ids=ids,
            terminated=ended,
        )
    # three of four begin with 1 2 3 4; the fourth ends after 1 2 3
    computed = metrics.compute()
    assert float(computed["rollout/opening_share"]) == 0.75
    assert "rollout/score" not in computed  # none were given


def test_responses_of_one_token_repeat_nothing() -> None:
    metrics, one = rollout.RolloutMetrics(), torch.zeros(2, 1)
    ids = torch.tensor([[4], [5]])
    metrics.update(
        logprobs=one,
        ref_logprobs=one,
        entropy=one,
        response_mask=ids > 0,
        response_ids=ids,
        terminated=torch.ones(2, dtype=torch.bool),
    )
    assert float(metrics.compute()["rollout/repeated_2"]) == 0.0
