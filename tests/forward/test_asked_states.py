"""States that nobody asks for cost no MLP in the last layer, and those that are asked for stay."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rlhf.forward import (
    disable_dropout,
    hidden_states,
    map_target_logits,
    sequence_scores,
    supports_chunked_logits,
    supports_packing,
)
from lit_rlhf.forward.cpu import TOKENS
from lit_rlhf.forward.last_mlp import spare_last_mlp
from lit_rlhf.forward.outputs import before, response_values
from lit_rlhf.functional import token_logprobs
from lit_rlhf.models import build_scalar_model
from lit_rlhf.rollout import SamplingOptions, generate_responses
from tests.forward.test_packing import padded, ragged
from tests.support.tiny_models import FAMILIES, tiny_causal_lm


def some_asked(mask: Tensor) -> Tensor:
    """In each row but one some tokens, and not the last ones."""
    columns = torch.arange(mask.shape[1])
    asked = mask & (columns % 3 == 1) & (columns < 30)
    asked[3] = False
    return asked


def rows_seen(trunk: PreTrainedModel) -> list[int]:
    """How many tokens the MLPs of later forwards see, one after the other."""
    seen: list[int] = []
    for name, mlp in trunk.named_modules():
        if name.endswith(".mlp"):
            mlp.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][..., 0].numel()))
    return seen


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_states_and_gradients_are_those_of_the_padded_rectangle(family: str, left: bool) -> None:
    model, plain = tiny_causal_lm(family), tiny_causal_lm(family)
    ids, mask = ragged(left)
    asked = some_asked(mask)
    states = hidden_states(model, ids, mask, asked)[asked]
    expected = padded(plain.base_model, ids, mask)[asked]
    torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(1))
    (states * weights).sum().backward()
    (expected * weights).sum().backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        if other.grad is not None:
            assert one.grad is not None
            error = float((one.grad - other.grad).abs().max())
            assert error <= 1e-5 * max(float(other.grad.abs().max()), 1.0), name


def test_the_last_mlp_sees_what_is_asked_for_and_the_others_what_comes_before_it() -> None:
    model = tiny_causal_lm()
    ids, mask = ragged()
    assert supports_packing(model.base_model)
    seen, asked = rows_seen(model.base_model), some_asked(mask)
    hidden_states(model, ids, mask, asked)
    needed = sum(int(row.nonzero().max()) + 1 for row in asked if row.any())
    assert seen == [needed] * (len(seen) - 1) + [int(asked.sum())]
    assert needed < int(mask.sum())
    del seen[:]
    hidden_states(model, ids, mask)
    assert set(seen) == {int(mask.sum())}


@pytest.mark.parametrize("autocast", [False, True])
def test_sizes_come_back_where_products_are_compiled_for_them(autocast: bool) -> None:
    model = tiny_causal_lm() if autocast else tiny_causal_lm().to(torch.bfloat16)
    ids, mask = ragged()
    asked = some_asked(mask)
    assert supports_packing(model.base_model)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), torch.no_grad():
        expected = padded(model.base_model, ids, mask)[asked].float()
        seen = rows_seen(model.base_model)
        states = hidden_states(model, ids, mask, asked)[asked].float()
        hidden_states(model, ids, mask)
        hidden_states(model, ids[6:], mask[6:], mask[6:])  # a row of one token
    needed = sum(int(row.nonzero().max()) + 1 for row in asked if row.any())
    exact = [needed, int(asked.sum()), int(mask.sum()), int(mask.sum()), 1, 1]
    assert seen == [n + -n % TOKENS for n in exact]  # of two layers
    assert float((states - expected).norm() / expected.norm()) < 0.03


def test_heads_ask_for_what_they_read() -> None:
    ids, mask = ragged()
    ids, mask = ids[mask.any(1)], mask[mask.any(1)]
    policy, scorer = tiny_causal_lm(), build_scalar_model(tiny_causal_lm())
    supports_packing(policy.base_model), supports_packing(scorer.base_model)
    of_policy, of_scorer = rows_seen(policy.base_model), rows_seen(scorer.base_model)
    sequence_scores(scorer, ids, mask)
    assert of_scorer[-1] == len(ids)
    response_values(scorer, ids, mask, response_length=10)
    assert of_scorer[-1] == int(mask[:, -11:-1].sum())
    targets = mask & (torch.arange(40) > 20)
    map_target_logits(policy, ids, mask, targets, lambda a, b: (token_logprobs(a, b),))
    assert of_policy[-1] == int(targets.sum())


def test_prompts_are_read_for_their_last_tokens() -> None:
    model = tiny_causal_lm()
    ids, mask = ragged(left=True)
    ids, mask = ids[mask.any(1)], mask[mask.any(1)]
    assert supports_chunked_logits(model)
    seen = rows_seen(model.base_model)
    options = SamplingOptions(max_new_tokens=1)
    generate_responses(model, ids, mask, options, eos_token_ids=[], pad_token_id=0, seed=0)
    assert seen == [int(mask.sum())] * (len(seen) - 1) + [len(ids)]


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_recomputes_the_same(family: str) -> None:
    ids, mask = ragged()
    gradients = []
    for checkpointing in (False, True):
        model = disable_dropout(tiny_causal_lm(family)).train()
        if checkpointing:
            model.activation_checkpointing_enable()
        # the backward comes to the first one when the second has gone through all layers
        first, second = some_asked(mask), mask & (torch.arange(40) == 0)
        one, other = (hidden_states(model, ids, mask, asked)[asked] for asked in (first, second))
        (one.square().sum() + other.square().sum()).backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_every_weight_has_a_gradient_where_nothing_is_asked_for() -> None:
    # ranks of a distributed run wait for each other's gradients
    model = tiny_causal_lm()
    ids, mask = ragged()
    nothing = torch.zeros_like(mask)
    (hidden_states(model, ids, mask, nothing) * nothing[..., None]).sum().backward()
    assert all(weight.grad is not None for weight in model.base_model.parameters())


def test_a_layer_that_is_used_twice_is_left_as_it_is() -> None:
    model = tiny_causal_lm()
    layers = model.base_model.layers
    for place in range(1, len(layers)):
        layers[place] = layers[0]
    plain = copy.deepcopy(model)
    ids, mask = ragged()
    asked = some_asked(mask)
    assert supports_packing(model.base_model)
    expected = padded(plain.base_model, ids, mask)
    torch.testing.assert_close(hidden_states(model, ids, mask, asked)[asked], expected[asked])
    assert not layers[0].mlp._forward_hooks


def test_copies_do_not_share_what_is_asked_for() -> None:
    model = tiny_causal_lm()
    assert supports_packing(model.base_model)
    ids, mask = ragged()
    asked = some_asked(mask)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(
            hidden_states(twin, ids, mask, asked), hidden_states(model, ids, mask, asked)
        )
        hooks = [
            next(iter(m.base_model.layers[-1].mlp._forward_hooks.values())) for m in (model, twin)
        ]
        assert hooks[0].__self__ is not hooks[1].__self__


class Layer(nn.Module):
    """A decoder's layer, without what makes it one."""

    def __init__(self, mlp: nn.Module, *more: float) -> None:
        super().__init__()
        self.attention = Attention()
        self.mlp = mlp
        self.more = more

    def forward(self, states: Tensor, **kwargs: object) -> tuple[Tensor, ...]:
        output = self.mlp(self.attention(states, **kwargs), *self.more)
        return output if isinstance(output, tuple) else (output,)


class Attention(nn.Module):
    """What is handed the layout."""

    def forward(self, states: Tensor, **kwargs: object) -> Tensor:
        return states


class Choosing(nn.Module):
    """An MLP that also says something of its tokens."""

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return states + 1, states[0].sum(-1)


class Weighed(nn.Module):
    """An MLP that takes more than states."""

    def forward(self, states: Tensor, weight: float) -> Tensor:
        return states * weight


def test_mlps_that_return_or_take_more_than_states() -> None:
    states, layout = torch.ones(1, 3, 2), SimpleNamespace(asked=torch.tensor([0, 2]))
    trunk = nn.ModuleDict({"layer": Layer(Choosing())})
    assert spare_last_mlp(trunk)
    output, said = trunk["layer"](states, layout=layout)
    assert output.tolist() == [[[2, 2], [0, 0], [2, 2]]]
    assert said.tolist() == [2, 2]
    output, said = trunk["layer"](states)  # nothing is left of the forward before
    assert output.tolist() == [[[2, 2]] * 3]
    trunk = nn.ModuleDict({"layer": Layer(Weighed(), 3.0)})
    spare_last_mlp(trunk)
    (output,) = trunk["layer"](states, layout=layout)
    assert output.tolist() == [[[3, 3]] * 3]
    assert spare_last_mlp(nn.ModuleDict({"layer": nn.Linear(2, 2)})) == []


def test_the_tokens_before_targets() -> None:
    targets = torch.tensor([[False, True, False, True], [False, False, False, False]])
    assert before(targets).tolist() == [[True, False, True, False], [False] * 4]
