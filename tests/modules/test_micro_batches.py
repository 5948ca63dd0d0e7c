"""Batches in parts, and what their metrics add up to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lit_rlhf.data import PreferenceBatch, TokenBatch
from lit_rlhf.forward import hidden_states
from lit_rlhf.modules import micro_batches
from lit_rlhf.modules.micro_batches import (
    accumulate,
    activation_bytes,
    rows_within_memory,
    slice_batch,
    split_batch,
)
from tests.support.tiny_models import optimized_causal_lm


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


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_activations_are_estimated_from_the_widths_of_matmuls(family: str) -> None:
    model = optimized_causal_lm(family).train()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(4, 250, (8, 64), generator=torch.Generator().manual_seed(0))
    with saved_tensors_hooks(count, lambda tensor: tensor):
        states = hidden_states(model, ids, ids >= 0)

    assert states.requires_grad
    estimate = activation_bytes(model) * ids.numel()
    assert 0.6 < estimate / sum(saved.values()) < 1.6


def test_checkpointed_activations_are_the_inputs_of_layers_and_one_layer() -> None:
    model = optimized_causal_lm().train()
    whole = activation_bytes(model)  # two layers
    model.activation_checkpointing_enable()
    assert activation_bytes(model) == whole // 2 + 2 * 16 * 4


def test_rows_are_as_many_as_the_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    model = optimized_causal_lm()
    monkeypatch.setattr(micro_batches, "ACTIVATION_BYTES", 100 * activation_bytes(model))
    assert rows_within_memory(model, n_rows=8, n_tokens=400) == 2
    assert rows_within_memory(model, n_rows=8, n_tokens=80) == 8
    assert rows_within_memory(model, n_rows=8, n_tokens=8000) == 1
