"""Rows of unequal lengths in one rectangle, and the hidden states of transformers for them."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

LENGTHS = (40, 7, 0, 21, 33, 40, 1)


def make_rows(left: bool = False) -> tuple[Tensor, Tensor]:
    """Random ids of rows of `LENGTHS` tokens, and their mask.

    Args:
        left: Whether the padding is on the left.
    """
    columns = torch.arange(max(LENGTHS))
    lengths = torch.tensor(LENGTHS)[:, None]
    mask = columns >= max(LENGTHS) - lengths if left else columns < lengths
    ids = torch.randint(4, 288, mask.shape, generator=torch.Generator().manual_seed(0))
    return ids.masked_fill(~mask, 0), mask


def compute_padded_states(trunk: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """Hidden states that transformers gives for the rectangle, `[B, T, H]`."""
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": ids, "attention_mask": mask.long(), "position_ids": positions}
    return trunk(**inputs, use_cache=False).last_hidden_state
