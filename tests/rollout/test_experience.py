"""The experience buffer: rows, and minibatches that cover it once."""

import pytest
import torch

from lit_rlhf.rollout import Experience, RolloutBatch, iterate_minibatches


def buffer() -> Experience:
    """Responses of 5, 2 and 1 tokens to prompts of 1, 4 and 2; every number is its own."""
    prompt_mask = torch.tensor([[0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 1, 1]]).bool()
    response_mask = torch.arange(5) < torch.tensor([5, 2, 1])[:, None]
    numbers = torch.arange(15.0).view(3, 5)
    rollouts = RolloutBatch(
        prompt_ids=torch.arange(12).view(3, 4),
        prompt_mask=prompt_mask,
        response_ids=torch.arange(15).view(3, 5),
        response_mask=response_mask,
        terminated=torch.tensor([False, True, True]),
    )
    return Experience(
        rollouts,
        old_logprobs=numbers,
        old_values=numbers + 100,
        advantages=numbers + 200,
        returns=numbers + 300,
        loss_mask=response_mask & torch.tensor([True, False, True])[:, None],
        importance=numbers + 400,
    )


@pytest.mark.parametrize(
    ("index", "prompt", "response"),
    [([0, 1, 2], 4, 5), ([1, 2], 4, 2), ([2], 2, 1), ([0], 1, 5), ([2, 0], 2, 5)],
)
def test_selected_rows_lose_shared_padding(index: list[int], prompt: int, response: int) -> None:
    whole = buffer()
    part = whole.select(torch.tensor(index))
    assert len(part) == len(index)
    rollouts = part.rollouts
    assert rollouts.prompt_ids.shape == rollouts.prompt_mask.shape == (len(index), prompt)
    assert rollouts.response_ids.shape == rollouts.response_mask.shape == (len(index), response)
    for new, old in enumerate(index):
        real = rollouts.prompt_mask[new]
        expected = whole.rollouts.prompt_ids[old][whole.rollouts.prompt_mask[old]]
        assert torch.equal(rollouts.prompt_ids[new][real], expected)
        own_mask, mask = rollouts.response_mask[new], whole.rollouts.response_mask[old]
        assert int(own_mask.sum()) == int(mask.sum())
        assert torch.equal(
            rollouts.response_ids[new][own_mask], whole.rollouts.response_ids[old][mask]
        )
        of_tokens = ("old_logprobs", "old_values", "advantages", "returns", "loss_mask")
        for name in (*of_tokens, "importance"):
            assert torch.equal(getattr(part, name)[new][own_mask], getattr(whole, name)[old][mask])
        assert bool(rollouts.terminated[new]) == bool(whole.rollouts.terminated[old])


def test_minibatches_cover_the_buffer_once_in_an_order_of_their_generator() -> None:
    def draw_minibatches(seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return [index.tolist() for index in iterate_minibatches(12, size=4, generator=generator)]

    assert [len(index) for index in draw_minibatches(0)] == [4, 4, 4]
    assert sorted(row for index in draw_minibatches(0) for row in index) == list(range(12))
    assert draw_minibatches(0) == draw_minibatches(0) != draw_minibatches(1)
    generator = torch.Generator().manual_seed(0)
    first, second = (
        torch.cat(list(iterate_minibatches(12, size=4, generator=generator))) for _ in range(2)
    )
    assert not torch.equal(first, second)


@pytest.mark.parametrize("size", [0, 5, 24])
def test_minibatch_size_must_divide_the_buffer(size: int) -> None:
    with pytest.raises(ValueError, match=f"minibatch_size: expected a divisor of the 12.*{size}"):
        list(iterate_minibatches(12, size=size, generator=torch.Generator()))
