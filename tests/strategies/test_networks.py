from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from lit_rlhf.strategies.engine_shards import engine_layout, trained_parameters
from lit_rlhf.strategies.networks import cast_parameters, optimized_networks


class Pair(nn.Module):
    policy: nn.Sequential
    critic: nn.Linear

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        self.critic = nn.Linear(2, 1)
        self.offset = nn.Parameter(torch.zeros(2))


def test_each_optimizer_belongs_to_the_child_that_holds_its_parameters() -> None:
    module = Pair()
    optimizers = [SGD(module.critic.parameters(), lr=1), SGD(module.policy[1].parameters(), lr=1)]
    assert optimized_networks(module, optimizers) == ["critic", "policy"]


def test_parameters_of_two_children_are_refused_by_name() -> None:
    module = Pair()
    both = SGD([*module.policy.parameters(), *module.critic.parameters()], lr=1)
    with pytest.raises(ValueError, match="got those of: critic, policy"):
        optimized_networks(module, [both])


def test_a_parameter_outside_every_child_is_refused() -> None:
    module = Pair()
    optimizer = SGD([*module.critic.parameters(), module.offset], lr=1)
    with pytest.raises(ValueError, match="got those of: critic, and 1 that are in no child"):
        optimized_networks(module, [optimizer])


def test_a_parameter_that_two_children_share_is_refused() -> None:
    module = Pair()
    module.critic.weight = nn.Parameter(torch.zeros(3, 2))
    module.policy[0].weight = module.critic.weight
    with pytest.raises(ValueError, match="expected the parameters of exactly one direct child"):
        optimized_networks(module, [SGD(module.critic.parameters(), lr=1)])


def test_two_optimizers_on_one_child_are_refused() -> None:
    module = Pair()
    optimizers = [SGD(layer.parameters(), lr=1) for layer in module.policy]
    with pytest.raises(ValueError, match="optimizer 1: 'policy' already has optimizer 0"):
        optimized_networks(module, optimizers)


def test_a_group_of_frozen_parameters_is_refused() -> None:
    module = Pair()
    optimizer = SGD(module.critic.parameters(), lr=1)
    module.critic.requires_grad_(False)
    with pytest.raises(ValueError, match="parameter group 0 of SGD"):
        trained_parameters(optimizer)


def test_the_layout_names_trained_parameters_in_order_and_tied_ones() -> None:
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
    second.weight = first.weight
    second.bias.requires_grad_(False)
    extra = nn.Parameter(torch.zeros(3))
    network = nn.Sequential(first, second)
    network.register_parameter("extra", extra)
    groups: list[dict[str, Any]] = [{"params": [extra]}, {"params": [second.bias, first.weight]}]
    optimizer = SGD(groups, lr=1)
    assert engine_layout(network, trained_parameters(optimizer)) == {
        "groups": [[["extra", [3]]], [["0.weight", [2, 2]]]],
        "aliases": {"1.weight": "0.weight"},
    }


def test_casting_leaves_buffers_and_integers_alone() -> None:
    module = nn.BatchNorm1d(2)
    cast_parameters(module, torch.bfloat16)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert module.running_mean is not None
    assert module.running_mean.dtype == torch.float32
