"""Sequences back to back give what they give in a padded rectangle, and cost no padding."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlhf.forward import (
    disable_dropout,
    hidden_states,
    supports_chunked_logits,
    supports_packing,
)
from lit_rlhf.forward.attention import NAME, takes_layouts
from lit_rlhf.forward.cpu import TOKENS
from lit_rlhf.forward.packing import PackedLayout
from lit_rlhf.models import ModelOptions, load_causal_lm
from tests.support.tiny_models import FAMILIES, tiny_causal_lm

LENGTHS = (40, 7, 0, 21, 33, 40, 1)


def ragged(left: bool = False) -> tuple[Tensor, Tensor]:
    columns = torch.arange(40)
    lengths = torch.tensor(LENGTHS)[:, None]
    mask = columns >= 40 - lengths if left else columns < lengths
    ids = torch.randint(4, 288, mask.shape, generator=torch.Generator().manual_seed(0))
    return ids.masked_fill(~mask, 0), mask


def padded(trunk: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """What transformers gives on the rectangle."""
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    output = trunk(
        input_ids=ids, attention_mask=mask.long(), position_ids=positions, use_cache=False
    )
    states: Tensor = output.last_hidden_state
    return states


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_states_and_gradients_are_those_of_the_padded_rectangle(family: str, left: bool) -> None:
    model, plain = tiny_causal_lm(family), tiny_causal_lm(family)
    assert supports_packing(model.base_model)
    ids, mask = ragged(left)
    rows = mask.any(1)  # transformers has no say of a row without tokens
    states, expected = hidden_states(model, ids, mask), padded(plain.base_model, ids, mask)
    torch.testing.assert_close(states[mask], expected[mask], rtol=1e-5, atol=1e-5)
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(1))
    (states[rows] * weights[rows])[mask[rows]].sum().backward()
    (expected[rows] * weights[rows])[mask[rows]].sum().backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        if other.grad is not None:
            largest = float(other.grad.abs().max())
            assert one.grad is not None
            error = float((one.grad - other.grad).abs().max())
            assert error <= 1e-5 * max(largest, 1.0), name


def test_padding_is_not_computed_with() -> None:
    model = tiny_causal_lm()
    ids, mask = ragged()
    supports_packing(model.base_model)
    seen: list[torch.Size] = []
    model.base_model.layers[0].mlp.register_forward_hook(
        lambda _, inputs, output: seen.append(output.shape)
    )
    hidden_states(model, ids, mask)
    assert [shape[:2] for shape in seen] == [(1, int(mask.sum()))]


def test_groups_hold_rows_of_similar_length_and_every_token_once() -> None:
    layout = PackedLayout.of([8, 2, 7, 6, 0, 5], torch.device("cpu"))
    assert [(group.n_rows, group.width) for group in layout.groups] == [(3, 8), (1, 5), (1, 2)]
    assert len(layout.places) == 3 * 8 + 5 + 2
    assert layout.places[layout.tokens].tolist() == list(range(28))
    # row 0 stands first, then row 2 (tokens 10 to 16) with its last token repeated
    assert layout.places[8:16].tolist() == [10, 11, 12, 13, 14, 15, 16, 16]
    assert layout.position_ids[0, :12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 0, 1]


@pytest.mark.parametrize("autocast", [False, True])
def test_tokens_are_padded_to_a_multiple_where_matmuls_are_compiled(autocast: bool) -> None:
    model = tiny_causal_lm() if autocast else tiny_causal_lm().to(torch.bfloat16)
    ids, mask = ragged()
    assert supports_packing(model.base_model)
    seen: list[int] = []
    model.base_model.layers[0].mlp.register_forward_hook(
        lambda _, inputs, output: seen.append(output.shape[1])
    )
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), torch.no_grad():
        expected = padded(model.base_model, ids, mask)[mask].float()
        del seen[:]
        states = hidden_states(model, ids, mask)[mask].float()
        hidden_states(model, ids[6:], mask[6:])  # a row of one token
    assert seen == [n + -n % TOKENS for n in (int(mask.sum()), 1)]
    assert float((states - expected).norm() / expected.norm()) < 0.03


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_recomputes_the_same(family: str) -> None:
    ids, mask = ragged()
    gradients = []
    for checkpointing in (False, True):
        model = disable_dropout(tiny_causal_lm(family)).train()
        if checkpointing:
            model.activation_checkpointing_enable()
        # the backward reaches the first forward after the second one has run
        one, other = (hidden_states(model, ids[rows], mask[rows]) for rows in ([0, 3, 1], [4, 6]))
        (one.square().sum() + other.square().sum()).backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_adapters_stay_in_effect(tmp_path: object) -> None:
    from tests.support.tiny_models import tiny_tokenizer

    folder = f"{tmp_path}/model"
    tiny_causal_lm().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    model = load_causal_lm(folder, ModelOptions(lora_rank=2))
    ids, mask = ragged()
    before = hidden_states(model, ids, mask)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.3)
    assert (hidden_states(model, ids, mask) - before)[mask].abs().max() > 0.1


def test_a_model_that_does_not_fit_is_left_as_it_is() -> None:
    capped = tiny_causal_lm("gemma2")  # eager attention, which caps its scores
    assert not supports_packing(capped.base_model)
    assert capped.config._attn_implementation == "eager"
    mixing = tiny_causal_lm("llama")

    class Leaking(torch.nn.Module):
        """A layer whose tokens see the ones before them, as a recurrent one's do."""

        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, states: Tensor) -> Tensor:
            output: Tensor = self.inner(states)
            return output + states.cumsum(1)

    mixing.base_model.layers[0].mlp = Leaking(mixing.base_model.layers[0].mlp)
    plain = copy.deepcopy(mixing)
    assert not supports_packing(mixing.base_model)
    assert mixing.config._attn_implementation == "sdpa"
    ids, mask = ragged()
    ids, mask = ids[:2], mask[:2]
    expected = padded(plain.base_model, ids, mask)
    torch.testing.assert_close(hidden_states(mixing, ids, mask)[mask], expected[mask])


def test_a_model_is_tried_out_in_the_precision_of_its_weights() -> None:
    # autocast rounds by more than two ways may differ
    model = tiny_causal_lm()
    seen: list[bool] = []
    model.base_model.register_forward_hook(
        lambda *_: seen.append(torch.is_autocast_enabled("cpu") or torch.is_grad_enabled())
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert supports_chunked_logits(model)
    assert seen == [False] * 4


def test_the_attention_is_not_saved(tmp_path: object) -> None:
    model = tiny_causal_lm()
    assert supports_packing(model.base_model)
    assert model.config._attn_implementation == NAME
    model.save_pretrained(f"{tmp_path}/saved")
    with open(f"{tmp_path}/saved/config.json", encoding="utf-8") as file:
        assert NAME not in file.read()


def test_transformers_still_marks_models_by_the_private_names_that_are_read() -> None:
    model = tiny_causal_lm()
    assert takes_layouts(model.base_model)
    assert model.base_model.config._attn_implementation == "sdpa"


def test_bfloat16_is_close_to_float32() -> None:
    model, half = tiny_causal_lm(), tiny_causal_lm().to(torch.bfloat16)
    assert supports_packing(half.base_model)
    ids, mask = ragged()
    with torch.no_grad():
        exact, rounded = (hidden_states(network, ids, mask)[mask] for network in (model, half))
    assert float((exact - rounded).norm() / exact.norm()) < 0.05
