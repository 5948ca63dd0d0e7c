"""Logits of target tokens alone, in chunks, give what all logits at once give."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig

from lit_rlhf import forward
from lit_rlhf.functional import token_logprobs_and_entropy
from tests.support.pretend_cuda import PretendCuda, mark, mark_module
from tests.support.tiny_models import FAMILIES, optimized_causal_lm, tiny_causal_lm, tiny_config

SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "bos_token_id"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "eos_token_id"),
)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    mask = torch.arange(24) < torch.tensor([24, 9, 17])[:, None]
    mask[2] = mask[2].flip(0)  # padded on the left
    ids = torch.randint(4, 288, mask.shape, generator=torch.Generator().manual_seed(0))
    targets = mask & (torch.rand(mask.shape, generator=torch.Generator().manual_seed(1)) < 0.5)
    targets[:, 0] = False
    targets[2, 7] = False  # the first real token of that row: nothing predicts it
    return ids, mask, targets


def read(logits: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    return token_logprobs_and_entropy(logits, ids, 0.7)


@pytest.mark.parametrize("chunk", [None, 288 * 5])
@pytest.mark.parametrize("family", [*FAMILIES, "gemma2"])
def test_chunked_readings_agree_with_those_of_all_logits(
    family: str, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chunk is not None:
        monkeypatch.setattr("lit_rlhf.forward.outputs.CHUNK_SIZE", chunk)
    model, plain = optimized_causal_lm(family), tiny_causal_lm(family)
    assert forward.forward_plan(model).chunked_logits == (family != "gemma2")
    ids, mask, targets = batch()
    logits = forward.token_logits(plain, ids, mask)[:, :-1]
    expected = [torch.where(targets[:, 1:], values, 0.0) for values in read(logits, ids[:, 1:])]
    readings = forward.map_target_logits(model, ids, mask, targets, read)
    for reading, values in zip(readings, expected, strict=True):
        assert reading.shape == ids.shape
        torch.testing.assert_close(reading[:, 1:], values, rtol=1e-5, atol=1e-5)
        assert not reading[~targets].any()
    (readings[0].sum() + 0.3 * readings[1].sum()).backward()
    (expected[0].sum() + 0.3 * expected[1].sum()).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        if other.grad is not None:
            largest = max(float(other.grad.abs().max()), 1.0)
            assert float((one.grad - other.grad).abs().max()) <= 1e-5 * largest


@pytest.mark.parametrize(("device", "size"), [("cpu", "CHUNK_SIZE"), ("cuda", "CUDA_CHUNK_SIZE")])
def test_no_more_logits_exist_at_once_than_a_chunk(
    device: str, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CHUNK_SIZE", "CPU_CHUNK_SIZE", "CUDA_CHUNK_SIZE"):
        monkeypatch.setattr(f"lit_rlhf.forward.outputs.{name}", 288 * (4 if name == size else 9))
    model, (ids, mask, targets) = optimized_causal_lm(), batch()
    n_targets = int(targets.sum())
    sizes: list[int] = []
    model.lm_head.register_forward_hook(lambda _, __, output: sizes.append(output.shape[1]))
    with PretendCuda() if device == "cuda" else nullcontext():
        if device == "cuda":
            mark_module(model)
            mark([ids, mask, targets])
        (logprobs, _) = forward.map_target_logits(model, ids, mask, targets, read)
        logprobs.sum().backward()
    # once forward, once more in the backward
    assert (max(sizes), sum(sizes)) == (4, 2 * n_targets)


def test_chunks_are_as_large_as_the_device_likes() -> None:
    sizes = {
        (kind, training): forward.logits_per_chunk(torch.device(kind), training=training)
        for kind in ("cpu", "mps", "cuda")
        for training in (True, False)
    }
    assert sizes == {
        ("cpu", True): 2**24,
        ("cpu", False): 2**20,
        ("mps", True): 2**24,
        ("mps", False): 2**24,
        ("cuda", True): 2**27,
        ("cuda", False): 2**27,
    }


@pytest.mark.parametrize("chunk", [None, 288 * 5])
def test_logprobs_are_the_models(chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if chunk is not None:
        monkeypatch.setattr("lit_rlhf.forward.outputs.CHUNK_SIZE", chunk)
    model, plain = optimized_causal_lm(), tiny_causal_lm()
    ids, mask, targets = batch()
    by_token = forward.token_logits(plain, ids, mask).double().log_softmax(-1)
    expected = by_token[:, :-1].gather(-1, ids[:, 1:, None])[..., 0] * targets[:, 1:]
    for network in (model, plain):
        actual = forward.target_logprobs(network, ids, mask, targets)[:, 1:]
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)
    hidden = forward.hidden_states(model, ids, mask)
    actual = forward.target_logprobs_from_hidden(model, model.lm_head, hidden, ids, targets)
    expected = forward.target_logprobs(plain, ids, mask, targets)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_empty_targets_give_a_zero_with_a_graph() -> None:
    model, (ids, mask, targets) = optimized_causal_lm(), batch()
    logprobs = forward.target_logprobs(model, ids, mask, torch.zeros_like(targets))
    assert float(logprobs.sum().detach()) == 0.0
    logprobs.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(("row", "column"), [(0, 0), (2, 7), (1, 12)])
def test_a_target_follows_a_real_token(row: int, column: int) -> None:
    ids, mask, targets = batch()
    targets[row, column] = True
    with pytest.raises(ValueError, match="target_mask: expected tokens that follow a real token"):
        forward.map_target_logits(tiny_causal_lm(), ids, mask, targets, read)
    with pytest.raises(ValueError, match=r"target_mask: expected shape \(3, 24\)"):
        forward.map_target_logits(tiny_causal_lm(), ids, mask, targets[:, 1:], read)


@pytest.mark.parametrize(
    ("config_class", "settings"),
    [
        (CohereConfig, {"logit_scale": 0.25}),
        (GraniteConfig, {"logits_scaling": 4.0}),
        (Gemma2Config, {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}),
    ],
)
def test_logits_from_hidden_include_what_follows_the_head(
    config_class: Any, settings: dict[str, Any]
) -> None:
    sizes = {name: getattr(tiny_config("llama"), name) for name in SIZES}
    config = config_class(**sizes, head_dim=8, pad_token_id=0, initializer_range=0.5, **settings)
    model = AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-untyped-call]
    ids, mask = torch.randint(4, 288, (2, 7)), torch.ones(2, 7, dtype=torch.bool)
    head = model.get_output_embeddings()
    logits = forward.logits_from_hidden(model, head, forward.hidden_states(model, ids, mask))
    torch.testing.assert_close(logits, forward.token_logits(model, ids, mask), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(logits, head(forward.hidden_states(model, ids, mask)))
