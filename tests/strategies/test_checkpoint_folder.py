from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lit_rlhf.strategies import checkpoint_problem, plain_state_dict
from lit_rlhf.strategies.checkpoint_folder import MANIFEST, publish
from lit_rlhf.strategies.checkpoint_search import checkpoint_engines, newest_checkpoint
from lit_rlhf.strategies.engine_shards import STATE_FILE, ShardReader, shard_file
from lit_rlhf.strategies.placement import (
    partial_path,
    remove_partials,
    replaced_path,
    swapped,
)

LAYOUT: dict[str, Any] = {
    "world_size": 3,
    "groups": [[["a", [2, 2]], ["b", [3]]]],
    "aliases": {"tied": "a"},
}


def write(path: Path, value: float = 0.0) -> Path:
    """A checkpoint of one engine: 7 elements on 3 ranks, 3 each, so the last two are padding."""
    partial = partial_path(path)
    (partial / "policy").mkdir(parents=True)
    flat = torch.cat([torch.arange(7.0) + value, torch.zeros(2)])
    for rank, part in enumerate(torch.split(flat, 3)):
        tensors = {"0.weights": part.clone(), "0.exp_avg": part * 10}
        save_file(tensors, shard_file(partial / "policy", rank))
    torch.save(
        {"state_dict": {"frozen.c": torch.ones(1), "scale": torch.ones(())}}, partial / STATE_FILE
    )
    publish(path, {"policy": LAYOUT}, {})
    return path


def test_a_written_checkpoint_is_complete_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = write(tmp_path / "last.ckpt")
    assert checkpoint_problem(path) is None
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_plain_state_dict_joins_shards_names_tied_weights_and_adds_the_rest(tmp_path: Path) -> None:
    path = write(tmp_path / "last.ckpt")
    state = plain_state_dict(path)
    a = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    expected = {"policy.a": a, "policy.b": torch.tensor([4.0, 5.0, 6.0]), "policy.tied": a}
    expected |= {"frozen.c": torch.ones(1), "scale": torch.ones(())}
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], value) for key, value in expected.items())
    assert plain_state_dict(path, "policy").keys() == {"a", "b", "tied"}


def test_an_unknown_network_is_answered_with_those_there_are(tmp_path: Path) -> None:
    path = write(tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=r"\['frozen', 'policy', 'scale'\], got 'critic'"):
        plain_state_dict(path, "critic")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_partitions_of_any_number_of_ranks_can_be_read(tmp_path: Path, world_size: int) -> None:
    path = write(tmp_path / "last.ckpt")
    size = -(-7 // world_size)
    with ShardReader(path / "policy", LAYOUT) as reader:
        parts = [reader.elements("0.exp_avg", r * size, (r + 1) * size) for r in range(world_size)]
    assert {len(part) for part in parts} == {size}
    joined = torch.cat(parts)
    assert torch.equal(joined[:7], torch.arange(7.0) * 10)
    assert not joined[7:].any()


def test_a_new_checkpoint_replaces_the_old_one(tmp_path: Path) -> None:
    write(tmp_path / "last.ckpt")
    write(tmp_path / "last.ckpt", value=5.0)
    assert plain_state_dict(tmp_path / "last.ckpt")["policy.b"].tolist() == [9.0, 10.0, 11.0]
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_names_are_swapped_at_once_or_the_old_one_waits_aside(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("1")
    second.mkdir()
    if swapped(first, second):  # not on every file system
        assert first.is_dir()
        assert second.read_text() == "1"
    assert not swapped(tmp_path / "none", second)


def test_a_checkpoint_that_was_being_replaced_is_found_again(tmp_path: Path) -> None:
    path = write(tmp_path / "last.ckpt")
    path.rename(replaced_path(path))  # where a kill between the two renames leaves it
    assert checkpoint_engines(path)["policy"] == LAYOUT
    assert checkpoint_problem(path) is None


def test_what_is_killed_in_the_middle_of_a_save_is_cleared_away_or_put_back(tmp_path: Path) -> None:
    older = write(tmp_path / "step=9.ckpt")
    path = write(tmp_path / "step=10.ckpt")
    path.rename(replaced_path(path))
    (path := write(tmp_path / "step=2.ckpt")).rename(partial_path(path))
    # a removal that was cut short comes after the manifest's time
    (older / STATE_FILE).unlink()
    assert newest_checkpoint(tmp_path) == tmp_path / "step=10.ckpt"
    assert checkpoint_problem(tmp_path / "step=10.ckpt") is None
    assert checkpoint_problem(older) == f"{STATE_FILE} is missing"
    remove_partials(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step=10.ckpt", "step=9.ckpt"]


def test_a_single_file_of_that_name_gives_way(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").write_bytes(b"of another strategy")
    assert checkpoint_problem(write(tmp_path / "last.ckpt")) is None


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("name", [STATE_FILE, "policy/rank_00001.safetensors", MANIFEST])
def test_a_truncated_file_is_named(tmp_path: Path, name: str, share: float) -> None:
    path = write(tmp_path / "last.ckpt")
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ValueError, match=f"last.ckpt: {name} is damaged"):
        plain_state_dict(path)


@pytest.mark.parametrize("name", [STATE_FILE, "policy/rank_00001.safetensors"])
def test_a_flipped_byte_is_found_and_another_checkpoint_offered(tmp_path: Path, name: str) -> None:
    sound = write(tmp_path / "step=1.ckpt")
    path = write(tmp_path / "step=2.ckpt")
    content = bytearray((path / name).read_bytes())
    content[-20] ^= 1
    (path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{name} is damaged: its checksum differs")):
        plain_state_dict(path)
    with pytest.raises(ValueError, match=re.escape(f"resume from {sound} instead")):
        plain_state_dict(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "last.ckpt")
    (path / "policy/rank_00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"policy/rank_00002\.safetensors is missing"):
        plain_state_dict(path)


def test_other_things_are_not_taken_for_a_checkpoint(tmp_path: Path) -> None:
    assert checkpoint_problem(tmp_path / "none") == "does not exist"
    with pytest.raises(FileNotFoundError, match="does not exist"):
        checkpoint_engines(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="not a folder"):
        checkpoint_engines(tmp_path / "file")
    assert "has no manifest.json" in str(checkpoint_problem(tmp_path))
    (tmp_path / MANIFEST).write_text(json.dumps({"format": "other"}))
    assert "is not of format" in str(checkpoint_problem(tmp_path))


def test_state_that_would_run_code_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    partial = partial_path(path)
    partial.mkdir()
    torch.save({"state_dict": {"x": Path("object")}}, partial / STATE_FILE)
    publish(path, {}, {})
    with pytest.raises(Exception, match="Weights only load failed"):
        plain_state_dict(path)
