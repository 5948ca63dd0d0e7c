"""Masks of responses, for tests by hand."""

import torch
from torch import Tensor


def length_mask(lengths: Tensor, width: int) -> Tensor:
    """The first `lengths` `[B]` columns of each row, `[B, width]`."""
    return torch.arange(width) < lengths.unsqueeze(1)
