"""Batches in parts, and what their metrics add up to."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from lit_rlhf import micro_batches
from lit_rlhf.data import PreferenceBatch, TokenBatch
from lit_rlhf.forward import (
    PLAN_ATTRIBUTE,
    LanguageModel,
    activation_bytes,
    checkpoints_activations,
    hidden_states,
    matmul_widths,
)
from lit_rlhf.forward.networks import ForwardPlan
from lit_rlhf.micro_batches import (
    LossShare,
    default_tokens,
    micro_batch_memory,
    slice_batch,
    split_batch,
    split_rows,
    tokens_within_memory,
)
from lit_rlhf.models.prepare import checkpoint_activations
from lit_rlhf.modules import MinibatchOptions, RewardModule, SFTModule
from tests.support.tiny_models import optimized_causal_lm, tiny_causal_lm

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
CHUNK = 2**27 * 14
"""Bytes of a chunk of logits on CUDA in half precision."""


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
    estimate = kept_bytes(model) * ids.numel()
    assert 0.6 < estimate / sum(saved.values()) < 1.6


def kept_bytes(model: LanguageModel) -> int:
    """Bytes that the layers of a float32 model keep of a token."""
    return activation_bytes(
        matmul_widths(model), itemsize=4, checkpointing=checkpoints_activations(model)
    )


def test_activations_depend_on_checkpointing() -> None:
    optimized = optimized_causal_lm().train()
    whole = kept_bytes(optimized)  # two layers
    checkpoint_activations(optimized)  # the inputs of layers and one layer
    assert kept_bytes(optimized) == whole // 2 + 2 * 16 * 4


def test_matmuls_are_the_layers_with_or_without_a_trunk(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_causal_lm()  # Llama with two heads of 8 that share a key
    # queries, keys, values, output, and the MLP's three
    widths = (16 + 16) + 2 * (16 + 8) + (16 + 16) + 3 * (16 + 32)
    assert matmul_widths(model) == (2, 16, 2 * widths)
    monkeypatch.setattr(type(model), "base_model", property(lambda self: self))
    assert matmul_widths(model) == (2, 16, 2 * widths)


def test_matmuls_of_weights_in_four_bits_have_their_own_widths() -> None:
    model = tiny_causal_lm()
    expected = matmul_widths(model)
    for module in model.modules():
        if isinstance(module, nn.Linear):  # as bitsandbytes keeps them
            module.weight = nn.Parameter(module.weight.data.reshape(-1, 1))
    assert matmul_widths(model) == expected


def test_a_cpu_takes_as_many_tokens_as_its_bytes_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    model = optimized_causal_lm()
    monkeypatch.setattr(micro_batches, "ACTIVATION_BYTES", 100 * kept_bytes(model))
    assert default_tokens(model, CPU) == 100
    plain = tiny_causal_lm()  # all logits exist at once
    monkeypatch.setattr(micro_batches, "ACTIVATION_BYTES", 100 * (kept_bytes(plain) + 288 * 28))
    assert default_tokens(plain, CPU) == 100
    monkeypatch.setattr(micro_batches, "ACTIVATION_BYTES", 1)
    assert default_tokens(model, CPU) == 1


def llama_7b(kind: Any = AutoModelForCausalLM) -> Any:
    """LLaMA 7B without numbers; its logits are computed in chunks."""
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
    config = LlamaConfig(vocab_size=32000, num_attention_heads=32, num_labels=1, **sizes)
    with torch.device("meta"):
        model = kind.from_config(config, dtype=torch.bfloat16).train()
    setattr(model, PLAN_ATTRIBUTE, ForwardPlan(packed=True, chunked_logits=True))
    return model


def test_a_cuda_device_takes_activations_and_a_chunk_of_logits() -> None:
    model = llama_7b()
    scalar = llama_7b(AutoModelForSequenceClassification)
    activation_bytes = 3 * 32 * (11 * 4096 + 3 * 11008)  # per token, in bfloat16
    logits = 14 * 32000

    def tokens(model: Any, memory: int, itemsize: int = 2) -> int:
        return tokens_within_memory(model, CUDA, memory=memory, itemsize=itemsize)

    # less than a chunk of logits, then more
    assert tokens(model, 20 * 10**9) == 20 * 10**9 // (activation_bytes + logits) == 2517
    assert tokens(model, 40 * 10**9) == (40 * 10**9 - CHUNK) // activation_bytes == 5085
    assert tokens(scalar, 40 * 10**9) == 40 * 10**9 // activation_bytes == 5336
    float32 = 6 * 32 * (11 * 4096 + 3 * 11008)
    assert tokens(scalar, 40 * 10**9, itemsize=4) == 40 * 10**9 // float32 == 2668
    assert tokens(model, 1) == 1
    assert tokens(model, 10**15) == 16384
    setattr(model, PLAN_ATTRIBUTE, ForwardPlan(chunked_logits=False))
    assert tokens(model, 40 * 10**9) == 40 * 10**9 // (activation_bytes + logits) == 5035
    checkpoint_activations(scalar)
    layers = 3 * (11 * 4096 + 3 * 11008) + 2 * 32 * 4096
    assert tokens(scalar, 10**9) == 10**9 // layers == 2014


@pytest.mark.parametrize("autocast", [False, True])
def test_a_cuda_device_gives_a_quarter_of_its_memory(
    monkeypatch: pytest.MonkeyPatch, autocast: bool
) -> None:
    properties = SimpleNamespace(total_memory=80 * 10**9)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: properties)
    monkeypatch.setattr("torch.is_autocast_enabled", lambda kind: autocast and kind == "cuda")
    model = llama_7b().float()
    expected = tokens_within_memory(model, CUDA, memory=20 * 10**9, itemsize=2 if autocast else 4)
    assert default_tokens(model, CUDA) == expected < 16384
    assert default_tokens(model, torch.device("mps")) is None
    assert micro_batch_memory(torch.device("mps")) is None


def test_a_size_of_the_user_is_the_only_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batches, "ACTIVATION_BYTES", 1)
    lengths = torch.tensor([3, 3, 4, 20])
    model = optimized_causal_lm()
    rows = split_batch(model, lengths, max_rows=3, max_tokens=None)
    tokens = split_batch(model, lengths, max_rows=None, max_tokens=10)
    default = split_batch(model, lengths, max_rows=None, max_tokens=None)
    assert [(part.rows.start, part.rows.stop) for part in rows] == [(0, 3), (3, 4)]
    assert [(part.rows.start, part.rows.stop) for part in tokens] == [(0, 3), (3, 4)]
    assert len(default) == 4


def test_rank_with_fewer_micro_batches_takes_rows_again_at_weight_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(micro_batches, "global_max", lambda number: 4)
    parts = split_batch(optimized_causal_lm(), torch.tensor([3, 3, 4]), max_rows=2, max_tokens=None)
    assert [(part.rows.start, part.rows.stop) for part in parts] == [(0, 2), (2, 3), (0, 2), (0, 2)]
    assert [part.weight for part in parts] == [1.0, 1.0, 0.0, 0.0]
    share = LossShare(torch.tensor(3.0), {"x/loss": torch.tensor(5.0)}).scaled(0.5)
    assert float(share.loss) == 1.5
    assert float(share.metrics["x/loss"]) == 2.5
