"""What `optimize_forward` decides for a network, keeps with it, and says about it."""

import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lit_rlhf.forward import head_matches_logits, hidden_states, optimize_forward
from lit_rlhf.forward.attention import ATTENTION_NAME, attention_implementation
from lit_rlhf.forward.cpu import ROW_MULTIPLE, TOKEN_MULTIPLE
from lit_rlhf.forward.networks import ForwardPlan, forward_plan
from lit_rlhf.models import build_random_scalar_model, load_causal_lm, load_scalar_model
from lit_rlhf.models.config import ModelOptions
from lit_rlhf.models.heads import build_scalar_model
from tests.support.padded_rows import compute_padded_states, make_rows
from tests.support.tiny_models import FAMILIES, optimized_causal_lm, tiny_causal_lm

OTHERS = "'sdpa' or flash attention"


class Leaking(nn.Module):
    """A layer whose tokens see the ones before them, as a recurrent one's do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: Tensor) -> Tensor:
        output: Tensor = self.inner(states)
        return output + states.cumsum(1)


class Refusing(nn.Module):
    """A layer that takes the rows of the comparison in a rectangle only."""

    def forward(self, states: Tensor) -> Tensor:
        if len(states) == 1:
            raise RuntimeError("expected a batch")
        return states


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_forwards_are_compared_in_float32_whatever_precision_is_set(precision: str) -> None:
    model = tiny_causal_lm("llama")
    during = []
    model.model.norm.register_forward_pre_hook(
        lambda *_: during.append(torch.backends.mkldnn.matmul.fp32_precision)
    )
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        optimize_forward(model)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    # padded and packed trunk, logits, and hidden states for the output layer
    assert during == ["ieee"] * 4
    assert forward_plan(model).packed


@pytest.mark.parametrize("family", FAMILIES)
def test_the_decoders_of_transformers_are_packed_with_chunked_logits(family: str) -> None:
    model = tiny_causal_lm(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert optimize_forward(model) is model
    plan = forward_plan(model)
    assert (plan.packed, plan.chunked_logits, plan.reason) == (True, True, "")
    multiples = (plan.token_padding.multiple, plan.row_padding.multiple)
    assert multiples == (TOKEN_MULTIPLE, ROW_MULTIPLE)
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_plain_model_is_padded_and_asking_changes_nothing() -> None:
    model = tiny_causal_lm()
    model.base_model.register_forward_hook(lambda *_: pytest.fail("a query ran a forward"))
    assert forward_plan(model) == ForwardPlan()
    assert attention_implementation(model) == "sdpa"
    assert not [name for name in vars(model) if "lit_rlhf" in name]


def test_all_loading_functions_optimize(folder: Path) -> None:
    for options in (ModelOptions(), ModelOptions(lora_rank=2), ModelOptions(dtype="bfloat16")):
        policy = load_causal_lm(folder, options)
        scalar = load_scalar_model(folder, options, head_seed=0)
        for model in (policy, scalar, build_random_scalar_model(folder, options)):
            assert forward_plan(model).packed
            assert forward_plan(model).chunked_logits == (model is policy)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (None, f"its attention implementation is 'eager' and packing needs {OTHERS}"),
        (Leaking, "its packed and padded outputs differ"),
        (lambda _: Refusing(), "its packed forward raised RuntimeError('expected a batch')"),
    ],
)
def test_other_networks_stay_padded(
    change: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_causal_lm("llama" if change else "gemma2")  # Gemma 2 caps its scores, by eager
    if change:
        layer = model.base_model.layers[0]
        layer.mlp = change(layer.mlp)
    plain = copy.deepcopy(model)
    implementation = attention_implementation(model)
    with caplog.at_level(logging.INFO):
        optimize_forward(model)
    assert forward_plan(model).reason == reason
    assert f"padded forward, because {reason}" in caplog.text
    assert not forward_plan(model).packed
    assert not forward_plan(model).chunked_logits
    assert attention_implementation(model) == implementation
    ids, mask = make_rows()
    ids, mask = ids[:2], mask[:2]
    expected = compute_padded_states(plain.base_model, ids, mask)
    torch.testing.assert_close(hidden_states(model, ids, mask)[mask], expected[mask])


def test_network_that_computes_nothing_finite_is_refused() -> None:
    model = tiny_causal_lm()
    model.base_model.norm.variance_epsilon = -1e6  # as of a wrong rms_norm_eps
    with pytest.raises(ValueError, match=r"finite outputs at .* for every token from LlamaModel"):
        optimize_forward(model)


@pytest.fixture
def flash_attention(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an attention that transformers takes, and that fails where it is computed."""
    name = "flash_attention_2"
    others = PreTrainedModel._check_and_adjust_attn_implementation

    def check(self: PreTrainedModel, implementation: str, *args: Any, **kwargs: Any) -> str:
        return name if implementation == name else others(self, implementation, *args, **kwargs)

    def attend(*_: Any, **__: Any) -> None:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer")

    monkeypatch.setattr(PreTrainedModel, "_check_and_adjust_attn_implementation", check)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, name, attend)
    return name


def test_flash_attention_keeps_the_packed_forward(flash_attention: str) -> None:
    expected, model = optimized_causal_lm(), tiny_causal_lm()
    model.set_attn_implementation(flash_attention)
    lm_head = model.get_output_embeddings()
    assert head_matches_logits(model, lm_head)  # the reward stage asks before it packs
    assert attention_implementation(model) == flash_attention
    assert forward_plan(optimize_forward(model)) == forward_plan(expected)
    assert forward_plan(model).packed
    ids, mask = make_rows()
    actual = hidden_states(model, ids, mask)[mask]
    assert torch.equal(actual, hidden_states(expected, ids, mask)[mask])


def test_flash_attention_stays_where_packing_is_another_function(flash_attention: str) -> None:
    model = tiny_causal_lm("gemma2")  # caps its scores, as flash attention can and `sdpa` cannot
    model.config.attn_logit_softcapping = 0.1
    for layer in model.base_model.layers:
        layer.self_attn.attn_logit_softcapping = 0.1
    model.set_attn_implementation(flash_attention)
    assert forward_plan(optimize_forward(model)).reason == "its packed and padded outputs differ"
    assert attention_implementation(model) == flash_attention


def test_interfaces_without_layouts_stay_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_causal_lm()
    monkeypatch.setattr(type(model.base_model), "_supports_attention_backend", False)
    assert "attention interface" in forward_plan(optimize_forward(model)).reason


class Doubling(LlamaForCausalLM):  # type: ignore[misc]
    """A model that changes its logits after the output layer, in a way that no config tells."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = 2 * output.logits
        return output


def test_logits_that_the_output_layer_does_not_give_are_not_chunked() -> None:
    model = tiny_causal_lm()
    assert head_matches_logits(model, model.lm_head)
    model.__class__ = Doubling
    assert not head_matches_logits(model, model.lm_head)
    optimize_forward(model)
    assert forward_plan(model).packed
    assert not forward_plan(model).chunked_logits


def test_the_decision_is_logged_once_for_each_network(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_causal_lm()
    forwards: list[bool] = []
    model.base_model.register_forward_hook(lambda *_: forwards.append(True))
    with caplog.at_level(logging.INFO):
        optimize_forward(model)
        n_forwards = len(forwards)
        optimize_forward(model)
    assert caplog.text.count("packed forward, chunked logits") == 1
    assert len(forwards) == n_forwards


def test_networks_are_compared_in_the_precision_of_their_weights() -> None:
    # autocast rounds by more than two ways may differ
    model = tiny_causal_lm().train()
    seen: list[bool] = []
    model.base_model.register_forward_hook(
        lambda module, *_: seen.append(
            torch.is_autocast_enabled("cpu") or torch.is_grad_enabled() or module.training
        )
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        optimize_forward(model)
    assert forward_plan(model).chunked_logits
    assert seen == [False] * 4
    assert model.training


def test_the_decision_holds_in_copies_and_after_a_cast_and_is_not_saved(tmp_path: Path) -> None:
    model, (ids, mask) = optimized_causal_lm(), make_rows()
    expected = hidden_states(model, ids, mask)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert forward_plan(twin) == forward_plan(model)
        torch.testing.assert_close(hidden_states(twin, ids, mask), expected)
    with torch.no_grad():
        rounded = hidden_states(copy.deepcopy(model).to(torch.bfloat16), ids, mask)[mask]
        assert float((rounded - expected[mask]).norm() / expected[mask].norm()) < 0.05
    assert attention_implementation(model) == ATTENTION_NAME
    model.save_pretrained(tmp_path)
    assert ATTENTION_NAME not in (tmp_path / "config.json").read_text("utf-8")


def test_a_new_head_on_an_optimized_trunk_is_a_network_of_its_own() -> None:
    scalar = build_scalar_model(optimized_causal_lm())
    assert not forward_plan(scalar).packed
    assert forward_plan(optimize_forward(scalar)).packed
    assert not forward_plan(scalar).chunked_logits
