from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from lit_rlhf.strategies.checkpoint_files import read_engine_layouts
from lit_rlhf.strategies.engine_shards import (
    EngineLayout,
    ShardReader,
    engine_layout,
    trained_parameters,
)
from tests.strategies.folders import write


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_partitions_of_any_number_of_ranks_can_be_read(tmp_path: Path, world_size: int) -> None:
    path = write(tmp_path / "last.ckpt")
    size = -(-7 // world_size)
    with ShardReader(path / "policy", read_engine_layouts(path)["policy"]) as reader:
        parts = [
            reader.read_range("0.exp_avg", r * size, (r + 1) * size) for r in range(world_size)
        ]
    assert {len(part) for part in parts} == {size}
    joined = torch.cat(parts)
    assert torch.equal(joined[:7], torch.arange(7.0) * 10)
    assert not joined[7:].any()


def test_another_network_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "last.ckpt")
    network = nn.Module()
    network.a = nn.Parameter(torch.zeros(4))
    with (
        ShardReader(path / "policy", read_engine_layouts(path)["policy"]) as reader,
        pytest.raises(ValueError, match=r"parameter a: expected shape \[2, 2\], got \[4\]"),
    ):
        reader.load_weights(network)


def test_a_group_of_frozen_parameters_is_refused() -> None:
    layer = nn.Linear(2, 1).requires_grad_(False)
    with pytest.raises(ValueError, match="parameter group 0 of SGD"):
        trained_parameters(SGD(layer.parameters(), lr=1))


def test_the_layout_names_trained_parameters_in_order_and_tied_ones() -> None:
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
    second.weight = first.weight
    second.bias.requires_grad_(False)
    extra = nn.Parameter(torch.zeros(3))
    network = nn.Sequential(first, second)
    network.register_parameter("extra", extra)
    groups: list[dict[str, Any]] = [{"params": [extra]}, {"params": [second.bias, first.weight]}]
    layout = engine_layout(network, trained_parameters(SGD(groups, lr=1)), world_size=2)
    assert layout == EngineLayout(
        2, ((("extra", (3,)),), (("0.weight", (2, 2)),)), {"1.weight": "0.weight"}
    )
    assert layout.names == {"extra", "0.weight", "1.weight"}
