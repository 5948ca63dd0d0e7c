"""The rollout metrics, against sums worked out by hand."""

import pytest
import torch

from lit_rlhf import rollout
from tests.support.rollout_metrics import add_batch, compute_metrics, expected_metrics


@pytest.mark.parametrize("cut", [None, 1, 2])
def test_metrics_depend_on_neither_padding_nor_batches(cut: int | None) -> None:
    parts = (slice(None),) if cut is None else (slice(cut), slice(cut, None))
    assert compute_metrics(*parts) == pytest.approx(expected_metrics(), rel=1e-6)
    assert compute_metrics() == {}


def test_commonest_opening_is_counted_over_batches() -> None:
    metrics = rollout.RolloutMetrics()
    for rows in ([[1, 2, 3, 4, 5], [1, 2, 3, 4, 9]], [[1, 2, 3, 4, 7], [1, 2, 3, 0, 0]]):
        ids = torch.tensor(rows)
        add_batch(metrics, ids, mask=ids > 0)
    # three of four begin with 1 2 3 4; the fourth ends after 1 2 3
    computed = metrics.compute()
    assert float(computed["rollout/opening_share"]) == 0.75
    assert "rollout/score" not in computed  # none were given


def test_openings_of_short_responses_are_alike_whatever_stands_behind_them() -> None:
    metrics = rollout.RolloutMetrics()
    for rows in ([[1, 2]], [[1, 2, 7, 7, 7], [1, 2, 8, 8, 8], [1, 2, 3, 4, 5]]):
        ids = torch.tensor(rows)
        add_batch(metrics, ids, mask=ids < 7)
    # three of four are 1 2
    assert float(metrics.compute()["rollout/opening_share"]) == 0.75


def test_scores_are_means_over_the_responses_with_a_vote() -> None:
    metrics = rollout.RolloutMetrics()
    ids = torch.tensor([[4], [5], [6]])
    scores = torch.tensor([1.0, 2.0, 6.0])
    for votes in ([True, True, False], [False, True, False]):
        add_batch(
            metrics,
            ids,
            mask=ids > 0,
            scores={"score": scores, "all": scores},
            votes={"score": torch.tensor(votes)},
        )
    computed = metrics.compute()
    assert float(computed["rollout/score"]) == pytest.approx((1 + 2 + 2) / 3)
    assert float(computed["rollout/all"]) == 3.0


def test_responses_of_one_token_have_no_bigrams_to_repeat() -> None:
    metrics = rollout.RolloutMetrics()
    ids = torch.tensor([[4], [5]])
    add_batch(metrics, ids, mask=ids > 0)
    assert not {"rollout/repeated_2", "rollout/distinct_2"} & metrics.compute().keys()
