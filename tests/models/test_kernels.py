"""torch.compile and fused kernels change how a network runs, and nothing that comes out of it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lit_rlhf.forward import target_logprobs
from lit_rlhf.models import ModelOptions, load_causal_lm
from lit_rlhf.rollout import SamplingOptions, generate_responses
from tests.support.tiny_models import EOS_ID, PAD_ID

# torch 2.13 looks at the gradients of what it traces, its inductor loads modules that are scripted,
# and it warns of both itself
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]


def batch(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.arange(length) < torch.tensor([length, length // 2, length - 3])[:, None]
    ids = torch.randint(4, 288, mask.shape, generator=torch.Generator().manual_seed(length))
    return ids, mask


@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)],
)
def test_a_compiled_model_is_the_same_model(folder: Path, backend: str) -> None:
    plain = load_causal_lm(folder)
    model = load_causal_lm(folder, ModelOptions(torch_compile=backend))
    for length in (12, 20, 15):  # other sizes, one compilation
        ids, mask = batch(length)
        targets = mask.clone()
        targets[:, 0] = False
        readings = [target_logprobs(network, ids, mask, targets) for network in (plain, model)]
        torch.testing.assert_close(readings[0], readings[1], rtol=1e-5, atol=1e-5)
        for network, reading in zip((plain, model), readings, strict=True):
            network.zero_grad()
            reading.sum().backward()
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
    ids, mask = batch(12)
    options = SamplingOptions(max_new_tokens=8)
    one_rollout, other_rollout = (
        generate_responses(network, ids.flip(1), mask.flip(1), options, [EOS_ID], PAD_ID, 0, 2)
        for network in (plain, model)
    )
    assert torch.equal(one_rollout.response_ids, other_rollout.response_ids)
    assert plain.state_dict().keys() == model.state_dict().keys()


@pytest.mark.slow
def test_adapters_are_compiled_too(folder: Path) -> None:
    model = load_causal_lm(folder, ModelOptions(torch_compile="aot_eager", lora_rank=2))
    ids, mask = batch(12)
    targets = mask.clone()
    targets[:, 0] = False
    target_logprobs(model, ids, mask, targets).sum().backward()
    assert any(p.grad is not None for name, p in model.named_parameters() if "lora_B" in name)


def test_an_unknown_backend_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"torch_compile: expected one of .*, got 'tpu'"):
        load_causal_lm(folder, ModelOptions(torch_compile="tpu"))


def test_fused_kernels_without_their_package_say_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ValueError, match=r"fused_kernels: .*pip install 'lit-rlhf\[liger\]'"):
        load_causal_lm(folder, ModelOptions(fused_kernels=True))


def test_fused_kernels_leave_the_losses_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []

    def apply(
        rope: bool = True,
        cross_entropy: bool = True,
        fused_linear_cross_entropy: bool = True,
        model: object = None,
    ) -> None:
        calls.append({"losses": (cross_entropy, fused_linear_cross_entropy), "model": model})

    patches = ModuleType("liger_kernel.transformers.monkey_patch")
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": apply}  # type: ignore[attr-defined]
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", patches)
    model = load_causal_lm(folder, ModelOptions(fused_kernels=True))
    assert calls == [{"losses": (False, False), "model": model}]
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"gemma": apply}  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"fused_kernels: expected .* among gemma, got 'llama'"):
        load_causal_lm(folder, ModelOptions(fused_kernels=True))
