"""Batches in parts, and what their metrics add up to."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lit_rlhf import micro_batches
from lit_rlhf.data import PreferenceBatch, TokenBatch
from lit_rlhf.forward import hidden_states
from lit_rlhf.micro_batches import (
    activation_bytes,
    slice_batch,
    split_rows,
    tokens_within_memory,
)
from lit_rlhf.models.prepare import checkpoint_activations
from lit_rlhf.modules import MinibatchOptions, RewardModule, SFTModule
from tests.support.tiny_models import optimized_causal_lm, tiny_causal_lm


def test_nested_batches_are_cut_alike() -> None:
    ids = torch.arange(10).view(5, 2)
    tokens = TokenBatch(ids, ids >= 0, ids > 3)
    batch = PreferenceBatch(tokens, tokens, torch.arange(5.0), torch.arange(5))
    part = slice_batch(batch, slice(1, 3))
    assert part.chosen.input_ids.tolist() == [[2, 3], [4, 5]]
    assert part.rejected.completion_mask.tolist() == [[False, False], [True, True]]
    assert part.margin.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("max_rows", "max_tokens", "sizes"),
    [(None, None, [6]), (4, None, [4, 2]), (None, 10, [3, 1, 2]), (2, 10, [2, 1, 1, 2])],
)
def test_sizes_are_kept(max_rows: int | None, max_tokens: int | None, sizes: list[int]) -> None:
    parts = list(split_rows(torch.tensor([3, 3, 4, 20, 5, 5]), max_rows, max_tokens))
    assert [part.stop - part.start for part in parts] == sizes
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(6))


@pytest.mark.parametrize("name", ["micro_batch_size", "micro_batch_tokens"])
def test_a_limit_of_micro_batches_is_positive(root: Path, name: str) -> None:
    stages: list[Callable[..., object]] = [MinibatchOptions]
    stages += [partial(kind, str(root / "policy")) for kind in (SFTModule, RewardModule)]
    for stage in stages:
        with pytest.raises(ValueError, match=f"{name}: expected an integer >= 1, got 0"):
            stage(**{name: 0})


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


def test_activations_depend_on_checkpointing_and_trunk(monkeypatch: pytest.MonkeyPatch) -> None:
    optimized = optimized_causal_lm().train()
    whole = activation_bytes(optimized)  # two layers
    checkpoint_activations(optimized)  # the inputs of layers and one layer
    assert activation_bytes(optimized) == whole // 2 + 2 * 16 * 4
    model = tiny_causal_lm()
    trunk = activation_bytes(model)
    monkeypatch.setattr(type(model), "base_model", property(lambda self: self))
    assert activation_bytes(model) == trunk + 6 * (16 + 288)


def test_tokens_are_as_many_as_the_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    model = optimized_causal_lm()
    monkeypatch.setattr(micro_batches, "ACTIVATION_BYTES", 100 * activation_bytes(model))
    assert tokens_within_memory(model) == 100
    monkeypatch.setattr(micro_batches, "ACTIVATION_BYTES", 1)
    assert tokens_within_memory(model) == 1
