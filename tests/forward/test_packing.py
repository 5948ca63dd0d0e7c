"""Sequences back to back give what they give in a padded rectangle, and cost no padding."""

import pytest
import torch

from lit_rlhf.forward import disable_dropout, forward_plan, hidden_states
from lit_rlhf.forward.cpu import TOKEN_MULTIPLE
from lit_rlhf.forward.packing import PackedLayout
from lit_rlhf.models.prepare import checkpoint_activations
from tests.support.padded_rows import compute_padded_states, make_rows
from tests.support.tiny_models import FAMILIES, optimized_causal_lm, tiny_causal_lm


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_states_and_gradients_equal_the_padded_ones(family: str, left: bool) -> None:
    model = optimized_causal_lm(family)
    plain = tiny_causal_lm(family)
    assert forward_plan(model).packed
    model.double()
    plain.double()
    ids, mask = make_rows(left)
    rows = mask.any(1)  # what transformers computes for a row without tokens has no meaning
    states = hidden_states(model, ids, mask)
    expected = compute_padded_states(plain.base_model, ids, mask)
    # norms still compute in float32, and may round the other way: by 2e-7 in Gemma's gradients
    torch.testing.assert_close(states[mask], expected[mask], rtol=2e-6, atol=2e-6)
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(1))
    (states[rows] * weights[rows])[mask[rows]].sum().backward()
    (expected[rows] * weights[rows])[mask[rows]].sum().backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        if other.grad is not None:
            largest = float(other.grad.abs().max())
            assert float((one.grad - other.grad).abs().max()) <= 2e-6 * max(largest, 1.0), name


def test_groups_hold_rows_of_similar_length_and_every_token_once() -> None:
    layout = PackedLayout([8, 2, 7, 6, 0, 5], torch.device("cpu"))
    rows = layout.groups
    assert (rows.groups, len(rows.gather_indices)) == ([(3, 8), (1, 5), (1, 2)], 3 * 8 + 5 + 2)
    assert rows.gather_indices[rows.token_places].tolist() == list(range(28))
    # row 0 stands first, then row 2 (tokens 10 to 16) with its last token repeated
    assert rows.gather_indices[8:16].tolist() == [10, 11, 12, 13, 14, 15, 16, 16]
    assert layout.position_ids[0, :12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 0, 1]


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_padding_is_computed_with_up_to_a_multiple_of_compiled_matmuls(precision: str) -> None:
    model = optimized_causal_lm()
    if precision == "bfloat16":
        model = model.to(torch.bfloat16)
    multiple = 1 if precision == "float32" else TOKEN_MULTIPLE
    ids, mask = make_rows()
    sizes: list[torch.Size] = []
    mlp = model.base_model.layers[0].mlp
    mlp.register_forward_hook(lambda _, inputs, output: sizes.append(output.shape[:2]))
    with (
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast"),
        torch.no_grad(),
    ):
        expected = compute_padded_states(model.base_model, ids, mask)[mask].float()
        sizes.clear()
        states = hidden_states(model, ids, mask)[mask].float()
        hidden_states(model, ids[6:], mask[6:])  # a row of one token
    assert sizes == [(1, n + -n % multiple) for n in (int(mask.sum()), 1)]
    assert float((states - expected).norm() / expected.norm()) < 0.03


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_recomputes_the_same(family: str) -> None:
    ids, mask = make_rows()
    gradients = []
    for checkpointing in (False, True):
        model = disable_dropout(optimized_causal_lm(family)).train()
        if checkpointing:
            checkpoint_activations(model)
        # the backward reaches the first forward after the second one has run
        one, other = (hidden_states(model, ids[rows], mask[rows]) for rows in ([0, 3, 1], [4, 6]))
        (one.square().sum() + other.square().sum()).backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
