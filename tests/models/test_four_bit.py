"""Weights in 4 bits: loading, state dicts, sharing, merging, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_rlhf import models
from lit_rlhf.forward import forward_plan, token_logits, token_values, unwrap_model
from lit_rlhf.models.four_bit import dequantized_weights
from tests.support.stages import causal_lm
from tests.support.tiny_models import four_bit_config, move_adapters, tiny_tokenizer

QLORA = models.ModelOptions(lora_rank=2, load_in_4bit=True, gradient_checkpointing=True)
IDS = torch.arange(3, 11).unsqueeze(0)
MASK = torch.ones_like(IDS, dtype=torch.bool)


def test_bitsandbytes_is_asked_for(causal_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.four_bit.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="load_in_4bit: expected bitsandbytes to be installed"):
        models.load_causal_lm(causal_folder("llama"), QLORA)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Llama; read only."""
    pytest.importorskip("bitsandbytes", reason="the extra `bitsandbytes` is not installed")
    folder = tmp_path_factory.mktemp("four_bit")
    models.save_model_folder(causal_lm(four_bit_config()), tiny_tokenizer(), folder / "llama")
    return folder / "llama"


def test_layers_compute_with_their_4_bit_numbers(folder: Path, tmp_path: Path) -> None:
    model = models.load_causal_lm(folder, QLORA)
    move_adapters(model, std=0.1)
    plain = models.load_causal_lm(folder)
    models.save_model_folder(model, tiny_tokenizer(), tmp_path / "merged")
    merged = models.load_causal_lm(tmp_path / "merged")
    logits = token_logits(model, IDS, MASK)
    assert forward_plan(model).packed
    torch.testing.assert_close(logits, token_logits(merged, IDS, MASK), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits, token_logits(plain, IDS, MASK), atol=1e-3)
    numbers = dequantized_weights(unwrap_model(models.load_causal_lm(folder, QLORA)))
    states = [getattr(weight, "quant_state", None) for weight in model.parameters()]
    assert all(state.nested for state in states if state is not None)  # their scales have 8 bits
    assert len(numbers) == 7 * unwrap_model(plain).config.num_hidden_layers
    # 16 numbers for each block of 64
    assert len(next(iter(numbers.values())).flatten()[:64].unique()) <= 16


def test_gradients_reach_layers_below_even_after_evaluation(folder: Path) -> None:
    """bitsandbytes repacks weights in evaluation mode on some CPUs, without a gradient after it."""
    model, twin = models.load_causal_lm(folder, QLORA), models.load_causal_lm(folder, QLORA)
    model.eval()
    token_logits(model, IDS, MASK)
    model.train()
    gradients = []
    for network in (model, twin):
        token_logits(network, IDS, MASK).square().sum().backward()
        gradients.append({n: p.grad for n, p in network.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight"
    assert gradients[0][first].abs().max() > 0


def test_state_dicts_leave_4_bit_weights_out(folder: Path) -> None:
    model, other = models.load_causal_lm(folder, QLORA), models.load_causal_lm(folder, QLORA)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    state = model.state_dict()
    assert not any("proj.base_layer" in name for name in state)
    assert {"lora_A", "lora_B"} <= {part for name in state for part in name.split(".")}
    other.load_state_dict(state)
    assert torch.equal(token_logits(model, IDS, MASK), token_logits(other, IDS, MASK))


@pytest.mark.parametrize("kind", ["policy", "reward"])
def test_a_critic_shares_4_bit_weights(folder: Path, kind: str) -> None:
    if kind == "policy":
        base = models.load_causal_lm(folder, QLORA)
    else:
        base = models.load_scalar_model(folder, models.ModelOptions(load_in_4bit=True), head_seed=0)
        base.requires_grad_(False)
    own = models.load_scalar_model(folder, QLORA, head_seed=0)
    critic = models.load_scalar_model(folder, QLORA, head_seed=0, base=base)
    assert torch.equal(token_values(critic, IDS, MASK), token_values(own, IDS, MASK))
    assert critic.state_dict().keys() == own.state_dict().keys()
    shared = {id(p) for p in critic.parameters()} & {id(p) for p in base.parameters()}
    assert len(shared) >= len(dequantized_weights(unwrap_model(critic)))
    assert not hasattr(models.merge_adapters(critic).config, "quantization_config")
