import math

import pytest
import torch
from torch import Tensor

from lit_rlhf import functional as F
from lit_rlhf.functional import KLEstimator, clipped_scores, length_penalty, normalized_scores
from lit_rlhf.functional.rewards import scaled_scores, soft_overlong_penalty, token_rewards
from tests.support.masks import length_mask


def test_ensembles_by_hand() -> None:
    members = torch.tensor([[1.0, 5.0, 0.0], [3.0, 2.0, 6.0]])
    assert F.ensemble_scores(members).tolist() == [4.0, 7.0, 6.0]
    assert F.ensemble_scores(members, "mean").tolist() == [2.0, 3.5, 3.0]
    assert F.ensemble_scores(members, "min").tolist() == [1.0, 2.0, 0.0]


@pytest.mark.parametrize("mean", [3.0, torch.tensor(3.0, dtype=torch.float64)])
def test_normalized_scaled_and_clipped_scores_by_hand(mean: Tensor | float) -> None:
    scores, std = torch.tensor([1.0, 3.0, 4.0, 20.0, -20.0]), mean - 1
    normalized = normalized_scores(scores, mean=mean, std=std, clip=None)
    scaled = scaled_scores(scores, std)
    assert normalized.tolist() == [-1.0, 0.0, 0.5, 8.5, -11.5]
    assert scaled.tolist() == [0.5, 1.5, 2.0, 10.0, -10.0]
    assert normalized.dtype == scaled.dtype == torch.float32
    clipped = normalized_scores(scores, mean=mean, std=std, clip=0.8).tolist()
    assert clipped == pytest.approx([-0.8, 0.0, 0.5, 0.8, -0.8], rel=1e-6)
    assert clipped_scores(torch.tensor([-3.0, 0.5, 3.0]), 1.0).tolist() == [-1.0, 0.5, 1.0]


def test_scores_far_from_zero_keep_their_digits() -> None:
    # float32 has no 10000.1: the mean would be off by 0.0004
    mean = torch.tensor(10_000.1, dtype=torch.float64)
    normalized = normalized_scores(torch.tensor([10_000.5]), mean=mean, std=0.5, clip=None)
    assert normalized.item() == pytest.approx(0.8, rel=1e-6)


def test_scores_without_a_spread_are_not_scaled() -> None:
    scores = torch.tensor([2.0, 5.0])
    assert normalized_scores(scores, mean=-2.0, std=0.0, clip=None).tolist() == [4.0, 7.0]
    assert scaled_scores(scores, 0.0).tolist() == [2.0, 5.0]
    # the spread of equal numbers is sometimes not quite 0
    assert scaled_scores(scores, 1e-17).tolist() == [2.0, 5.0]


def test_token_rewards_by_hand() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, 999.0], [-1.0, 999.0, 999.0]])
    ref_logprobs = torch.tensor([[-3.0, -1.0, -999.0], [-1.5, -999.0, -999.0]])
    mask, scores = length_mask(torch.tensor([2, 1]), 3), torch.tensor([10.0, 20.0]).double()
    rewards = token_rewards(scores, logprobs, ref_logprobs, mask, kl_coef=0.1)
    # what the policy likes more than the reference does costs reward; the dtype is of the log-probs
    torch.testing.assert_close(rewards, torch.tensor([[-0.2, 10.1, 0.0], [19.95, 0.0, 0.0]]))


@pytest.mark.parametrize(("estimator", "kl"), [("k2", 2.0), ("k3", math.exp(-2.0) + 1.0)])
def test_token_rewards_with_another_estimator(estimator: KLEstimator, kl: float) -> None:
    logprobs, mask = torch.full((1, 1), -1.0), torch.ones(1, 1, dtype=torch.bool)
    rewards = token_rewards(
        torch.zeros(1), logprobs, logprobs - 2.0, mask, kl_coef=0.5, estimator=estimator
    )
    assert rewards.item() == pytest.approx(-0.5 * kl, rel=1e-6)


def test_a_response_without_a_token_gets_no_reward() -> None:
    scores, masked = torch.tensor([5.0, 5.0]), torch.zeros(2, 2, dtype=torch.bool)
    junk = torch.full((2, 2), float("nan"))
    assert (token_rewards(scores, junk, torch.zeros(2, 2), masked, kl_coef=0.1) == 0).all()


def test_score_is_at_the_last_kept_token_alone_wherever_gaps_lie() -> None:
    mask = torch.tensor([[True, False, True, False], [False, False, True, False]])
    zeros = torch.zeros(2, 4)
    rewards = token_rewards(torch.tensor([3.0, 5.0]), zeros, zeros, mask, kl_coef=0.0)
    assert rewards.tolist() == [[0.0, 0.0, 3.0, 0.0], [0.0, 0.0, 5.0, 0.0]]


def test_rewards_are_constants() -> None:
    scores, mask = torch.randn(1, requires_grad=True), torch.ones(1, 2, dtype=torch.bool)
    for trained in range(3):
        inputs = [scores.detach(), torch.randn(1, 2), torch.randn(1, 2)]
        inputs[trained].requires_grad_()
        assert not token_rewards(*inputs, mask, kl_coef=0.1).requires_grad
    scores.requires_grad_()
    others = [normalized_scores(scores, mean=0.0, std=1.0, clip=clip) for clip in (None, 1.0)]
    others += [scaled_scores(scores, 1.0), clipped_scores(scores, 1.0)]
    assert not any(x.requires_grad for x in others)


def test_scores_are_divided_by_the_standard_deviation_in_float64() -> None:
    # float32 has no 0.3, and the quotients by what it has instead end otherwise
    scores = torch.arange(1.0, 100.0)
    expected = torch.tensor([float(score) / 0.3 for score in scores])
    for std in (0.3, torch.tensor(0.3, dtype=torch.float64)):
        assert torch.equal(scaled_scores(scores, std), expected)


def test_the_length_penalty_is_the_distance_from_the_range() -> None:
    lengths = torch.tensor([0, 2, 3, 4, 5, 6, 9])
    penalties = length_penalty(lengths, shortest=3, longest=5)
    assert (penalties.dtype, penalties.tolist()) == (
        torch.float32,
        [-3.0, -1.0, 0.0, 0.0, 0.0, -1.0, -4.0],
    )
    open_ended = length_penalty(lengths, shortest=3, longest=None)
    assert open_ended.tolist() == [-3.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert length_penalty(torch.tensor([2.5, 5.5]), shortest=3, longest=5).tolist() == [-0.5, -0.5]


def test_soft_overlong_penalty_is_that_of_dapo() -> None:
    longest, buffer = 20, 5
    expected = []
    for n in range(26):  # arXiv 2503.14476, Eq. 13
        start = longest - buffer
        expected.append(0.0 if n <= start else (start - n) / buffer if n <= longest else -1.0)
    actual = soft_overlong_penalty(torch.arange(26), longest=longest, buffer=buffer)
    assert actual.tolist() == pytest.approx(expected)


def test_token_rewards_refuse_log_probs_of_one_dimension() -> None:
    logprobs = torch.zeros(2)
    with pytest.raises(ValueError, match="logprobs"):
        F.token_rewards(torch.zeros(2), logprobs, logprobs, torch.ones(2).bool(), kl_coef=0.1)
