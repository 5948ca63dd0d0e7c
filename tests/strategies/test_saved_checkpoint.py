"""Reading a checkpoint without the processes that wrote it."""

from pathlib import Path

import pytest
import torch

from lit_rlhf.strategies import read_checkpoint, read_lightning_state, read_state_dict
from lit_rlhf.strategies.checkpoint_files import LIGHTNING_FILE, MANIFEST
from tests.support.engine_checkpoints import write_checkpoint_folder
from tests.support.engine_folders import write


def test_a_state_dict_joins_shards_names_tied_weights_and_adds_the_rest(tmp_path: Path) -> None:
    path = write(tmp_path / "last.ckpt")
    state, a = read_state_dict(path), torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    expected = {"policy.a": a, "policy.b": torch.tensor([4.0, 5.0, 6.0]), "policy.tied": a}
    expected |= {"frozen.c": torch.ones(1), "scale": torch.ones(())}
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], value) for key, value in expected.items())
    assert read_state_dict(path, "policy").keys() == {"a", "b", "tied"}


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("name", [LIGHTNING_FILE, "policy/rank_00001.safetensors", MANIFEST])
def test_a_truncated_file_is_named(tmp_path: Path, name: str, share: float) -> None:
    path = write(tmp_path / "last.ckpt")
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ValueError, match=f"last.ckpt: {name} is damaged"):
        read_state_dict(path)


@pytest.mark.parametrize("name", [LIGHTNING_FILE, "policy/rank_00001.safetensors"])
def test_a_flipped_byte_is_found_and_another_checkpoint_offered(tmp_path: Path, name: str) -> None:
    intact, path = write(tmp_path / "step=1.ckpt"), write(tmp_path / "step=2.ckpt")
    content = bytearray((path / name).read_bytes())
    content[-20] ^= 1
    (path / name).write_bytes(content)
    message = f"{name} is damaged: its checksum differs.*resume from {intact} instead"
    with pytest.raises(ValueError, match=message):
        read_state_dict(path)


def test_an_unknown_network_and_a_missing_file_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=r"\['frozen', 'policy', 'scale'\], got 'critic'"):
        read_state_dict(path, "critic")
    (path / "policy/rank_00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"policy/rank_00002\.safetensors is missing"):
        read_state_dict(path)


def test_lightnings_part_is_read_from_files_and_folders(tmp_path: Path) -> None:
    content = {"state_dict": {"scale": torch.ones(())}, "hyper_parameters": {"seed": 1}}
    torch.save(content, tmp_path / "file.ckpt")
    write_checkpoint_folder(tmp_path / "folder.ckpt", content)
    for name in ("file.ckpt", "folder.ckpt"):
        assert read_lightning_state(tmp_path / name)["hyper_parameters"] == {"seed": 1}
        assert read_checkpoint(tmp_path / name).networks == ["scale"]


def test_files_of_other_programs_are_refused(tmp_path: Path) -> None:
    torch.save([torch.ones(1)], tmp_path / "list.ckpt")
    with pytest.raises(ValueError, match="expected a checkpoint of Lightning's"):
        read_checkpoint(tmp_path / "list.ckpt")
    (tmp_path / "text.ckpt").write_text("not an archive")
    for read in (read_checkpoint, read_lightning_state):
        with pytest.raises(ValueError, match=r"text\.ckpt: .*; resume from .*list\.ckpt instead"):
            read(tmp_path / "text.ckpt")
        with pytest.raises(FileNotFoundError, match=r"none\.ckpt: does not exist"):
            read(tmp_path / "none.ckpt")
