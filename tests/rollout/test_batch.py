"""Rollouts as tensors: what their views, parts and copies hold."""

import pytest
import torch

from lit_rlhf.rollout import Experience, RolloutBatch
from lit_rlhf.rollout.batch import PolicyStatistics


def batch() -> RolloutBatch:
    """Responses of 3, 1 and 2 tokens to prompts of 2, 1 and 2; every token is its own."""
    prompt_mask = torch.tensor([[True, True], [False, True], [True, True]])
    response_mask = torch.arange(3) < torch.tensor([3, 1, 2])[:, None]
    numbers = torch.arange(9.0).view(3, 3)
    return RolloutBatch(
        prompt_ids=torch.arange(6).view(3, 2),
        prompt_mask=prompt_mask,
        response_ids=torch.arange(10, 19).view(3, 3),
        response_mask=response_mask,
        terminated=torch.tensor([False, True, True]),
        statistics=PolicyStatistics(-numbers, numbers, temperature=0.7),
    )


def test_sequences_are_prompts_followed_by_responses() -> None:
    rollouts = batch()
    assert rollouts.sequence_ids[0].tolist() == [0, 1, 10, 11, 12]
    assert rollouts.sequence_mask[1].tolist() == [False, True, True, False, False]
    assert rollouts.lengths.tolist() == [3, 1, 2]
    mask = rollouts.to_sequence_mask(rollouts.response_mask)
    assert mask[2].tolist() == [False, False, True, True, False]


@pytest.mark.parametrize(
    ("limit", "sizes"), [(1, [1, 1, 1]), (6, [1, 2]), (7, [2, 1]), (10, [2, 1]), (11, [3])]
)
def test_split_respects_the_token_limit(limit: int, sizes: list[int]) -> None:
    # the samples have 5, 2 and 4 real tokens
    whole, parts = batch(), list(batch().split(limit))
    assert [len(part.terminated) for part in parts] == sizes
    for field in ("prompt_ids", "prompt_mask", "response_ids", "response_mask", "terminated"):
        joined = torch.cat([getattr(part, field) for part in parts])
        assert torch.equal(joined, getattr(whole, field))
    with pytest.raises(ValueError, match="max_tokens_per_forward: expected an integer >= 1, got 0"):
        next(batch().split(0))


def test_statistics_are_those_of_one_temperature() -> None:
    rollouts = batch()
    assert rollouts.statistics_at(0.7) is rollouts.statistics
    assert rollouts.statistics_at(1.0) is None
    assert rollouts._replace(statistics=None).statistics_at(0.7) is None


def test_a_selection_has_rows_of_every_tensor() -> None:
    whole = batch()
    picked = whole.select(slice(1, 2))
    assert picked.statistics is None
    for one, all_rows in zip(picked[:5], whole[:5], strict=True):
        assert torch.equal(one, all_rows[1:2])


def test_selected_experience_has_the_rows_and_columns_of_every_field() -> None:
    numbers = torch.arange(9.0).view(3, 3)
    lower = torch.arange(30.0).view(3, 5, 2)
    rollouts = batch()
    whole = Experience(
        rollouts=rollouts,
        old_logprobs=numbers,
        old_values=numbers + 10,
        advantages=numbers + 20,
        returns=numbers + 30,
        loss_mask=rollouts.response_mask,
        policy_lower=lower,
        critic_lower=lower + 100,
        weights=torch.tensor([1.0, 2.0, 3.0]),
    )
    # the second sample alone has a prompt of one token and a response of one
    picked = whole.select(torch.tensor([1]))
    assert picked.rollouts.sequence_ids.tolist() == [[3, 13]]
    assert picked.old_logprobs.tolist() == [[3.0]]
    assert picked.old_values.tolist() == [[13.0]]
    assert picked.advantages.tolist() == [[23.0]]
    assert picked.returns.tolist() == [[33.0]]
    assert picked.loss_mask.tolist() == [[True]]
    assert picked.weights is not None
    assert picked.weights.tolist() == [2.0]
    # columns 1 and 2 of prompt and response, whose two padded columns are left out
    assert picked.policy_lower is not None
    assert torch.equal(picked.policy_lower, lower[1:2, 1:3])
    assert picked.critic_lower is not None
    assert torch.equal(picked.critic_lower, lower[1:2, 1:3] + 100)
    assert whole.select(torch.tensor([2, 0])).advantages[:, 0].tolist() == [26.0, 20.0]
