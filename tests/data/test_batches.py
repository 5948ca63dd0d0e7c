"""Padding and collation."""

import pytest
import torch

from lit_rlhf.data.batches import padded_sequences, prompt_batch, token_batch

IDS = [torch.tensor([7, 8, 9]), torch.tensor([5])]


def test_token_batch_pads_on_the_right() -> None:
    batch = token_batch(IDS, [torch.tensor([False, True, True]), torch.tensor([False])], 0)
    assert batch.input_ids.tolist() == [[7, 8, 9], [5, 0, 0]]
    assert batch.attention_mask.tolist() == [[True, True, True], [True, False, False]]
    assert batch.completion_mask.tolist() == [[False, True, True], [False, False, False]]


def test_masks_come_from_lengths_and_not_from_the_pad_id() -> None:
    batch = token_batch(IDS, [torch.tensor([False, True, True]), torch.tensor([False])], 9)
    assert batch.attention_mask[0].tolist() == [True, True, True]
    assert batch.completion_mask[0].tolist() == [False, True, True]


def test_batch_types() -> None:
    batch = token_batch([i.int() for i in IDS], [i > 7 for i in IDS], 0)
    assert (batch.input_ids.dtype, batch.attention_mask.dtype, batch.completion_mask.dtype) == (
        torch.int64,
        torch.bool,
        torch.bool,
    )


def test_prompt_batch_pads_on_the_left() -> None:
    batch = prompt_batch(IDS, ["a", "b"], [4, 2], 0)
    assert batch.input_ids.tolist() == [[7, 8, 9], [0, 0, 5]]
    assert batch.attention_mask.tolist() == [[True, True, True], [False, False, True]]
    assert batch.texts == ["a", "b"]
    assert batch.index.tolist() == [4, 2]
    assert batch.ptx is None


def test_completion_mask_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 3 entries in row 0, got 2"):
        token_batch(IDS, [torch.ones(2).bool(), torch.ones(1).bool()], 0)


@pytest.mark.parametrize(
    ("sequences", "message"), [([], "got none"), ([torch.zeros(2, 2)], r"got \(2, 2\)")]
)
def test_what_cannot_be_padded_is_refused(sequences: list[torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        padded_sequences(sequences, 0)


def test_prompt_batch_needs_a_text_per_prompt() -> None:
    with pytest.raises(ValueError, match="expected 2 each, got 1 and 2"):
        prompt_batch(IDS, ["a"], [0, 1], 0)
