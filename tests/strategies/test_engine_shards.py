from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from lit_rlhf.files import file_crc32
from lit_rlhf.strategies import engine_shards
from lit_rlhf.strategies.checkpoint_files import read_engine_layouts
from lit_rlhf.strategies.engine_shards import (
    EngineLayout,
    ShardReader,
    engine_layout,
    engine_partitions,
    save_shard,
    shard_file,
    trained_parameters,
)
from tests.support.engine_folders import write


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_partitions_of_any_number_of_ranks_can_be_read(tmp_path: Path, world_size: int) -> None:
    path, size = write(tmp_path / "last.ckpt"), -(-7 // world_size)
    with ShardReader(path / "policy", read_engine_layouts(path)["policy"]) as reader:
        starts = range(0, size * world_size, size)
        parts = [reader.read_range("0.exp_avg", start=start, stop=start + size) for start in starts]
    assert {len(part) for part in parts} == {size}
    joined = torch.cat(parts)
    assert torch.equal(joined[:7], torch.arange(7.0) * 10)
    assert not joined[7:].any()


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands for an optimizer of two parameter groups, with moments and a step count."""
    states = [
        (torch.arange(float(size)), {"exp_avg": torch.rand(size), "step": torch.tensor(3.0)})
        for size in (5, 8)
    ]
    monkeypatch.setattr(engine_shards, "group_states", lambda _: states)
    return states


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksum_is_that_of_the_file(partitions: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    partitions[0] = (partitions[0][0].to(dtype), {})  # safetensors orders by type
    crc32 = save_shard(engine_partitions(partitions, True), shard_file(tmp_path, 0))
    assert crc32 == file_crc32(shard_file(tmp_path, 0))


def test_a_shard_that_is_damaged_on_its_way_to_the_disk_is_not_what_its_checksum_says(
    partitions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = engine_shards.save_file

    def damaged(tensors: Any, path: Path) -> None:
        save(tensors, path)
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    monkeypatch.setattr(engine_shards, "save_file", damaged)
    crc32 = save_shard(engine_partitions(partitions, True), shard_file(tmp_path, 0))
    assert crc32 != file_crc32(shard_file(tmp_path, 0))


def test_two_groups_return_from_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = [torch.arange(1.0, 6.0), torch.arange(10.0, 18.0)]
    for rank in range(2):
        padded = [nn.functional.pad(group, (0, len(group) % 2)).chunk(2)[rank] for group in flat]
        monkeypatch.setattr(
            engine_shards, "group_states", lambda _, parts=padded: [(part, {}) for part in parts]
        )
        partitions = engine_partitions(None, False)  # type: ignore[arg-type]
        save_shard(partitions, shard_file(tmp_path, rank))
    specs = [[("a", (2,)), ("b", (3,))], [("c", (4,)), ("d", (2, 2))]]
    layout = EngineLayout.from_json({"world_size": 2, "groups": specs, "aliases": {"tied": "d"}})
    with ShardReader(tmp_path, layout) as reader:
        weights = {name: tensor.tolist() for name, tensor in reader.read_weights().items()}
        beyond = reader.read_range("0.weights", start=4, stop=8)
    last = [[14.0, 15.0], [16.0, 17.0]]
    frozen = {"c": [10.0, 11.0, 12.0, 13.0], "d": last, "tied": last}
    assert weights == {"a": [1.0, 2.0], "b": [3.0, 4.0, 5.0], **frozen}
    assert beyond.tolist() == [5.0, 0.0, 0.0, 0.0]


def test_another_network_is_refused(tmp_path: Path) -> None:
    path, network = write(tmp_path / "last.ckpt"), nn.Module()
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
    extra, network = nn.Parameter(torch.zeros(3)), nn.Sequential(first, second)
    network.register_parameter("extra", extra)
    groups: list[dict[str, Any]] = [{"params": [extra]}, {"params": [second.bias, first.weight]}]
    layout = engine_layout(network, trained_parameters(SGD(groups, lr=1)), world_size=2)
    groups = ((("extra", (3,)),), (("0.weight", (2, 2)),))
    assert layout == EngineLayout(2, groups, {"1.weight": "0.weight"})
    assert layout.names == {"extra", "0.weight", "1.weight"}
