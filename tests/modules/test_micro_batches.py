"""Batches in parts, and what their metrics add up to."""

from __future__ import annotations

import pytest
import torch

from lit_rlhf.data import PreferenceBatch, TokenBatch
from lit_rlhf.modules.micro_batches import accumulate, slice_batch, split_batch


def token_batch() -> TokenBatch:
    ids = torch.arange(10).view(5, 2)
    return TokenBatch(ids, ids >= 0, ids > 3)


def test_nested_batches_are_cut_alike() -> None:
    tokens = token_batch()
    batch = PreferenceBatch(tokens, tokens, torch.arange(5.0), torch.arange(5))
    part = slice_batch(batch, slice(1, 3))
    assert part.chosen.input_ids.tolist() == [[2, 3], [4, 5]]
    assert part.rejected.completion_mask.tolist() == [[False, False], [True, True]]
    assert part.margin.tolist() == [1.0, 2.0]


def test_a_micro_batch_needs_a_row() -> None:
    with pytest.raises(ValueError, match="micro_batch_size: expected at least 1 row, got 0"):
        list(split_batch(token_batch(), 5, 0))


def test_shares_add_up_without_their_graphs() -> None:
    totals: dict[str, torch.Tensor] = {}
    for value in (1.0, 2.5):
        accumulate(totals, {"loss": torch.tensor(value, requires_grad=True)})
    assert float(totals["loss"]) == 3.5
    assert not totals["loss"].requires_grad
