"""Checkpoint files: whole or not there, whatever happens, and checked before use."""

import json
import os
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO

from lit_rlhf.files import delete_partials, partial_path
from lit_rlhf.files.atomic_io import replaced_path
from lit_rlhf.strategies import AtomicCheckpointIO, checkpoint_files, find_newest_checkpoint
from lit_rlhf.strategies.checkpoint_files import (
    LIGHTNING_FILE,
    checkpoint_problem,
    read_lightning_state,
    read_state_dict,
)
from tests.support.engine_folders import write
from tests.support.full_disk import largest_file

TENSOR = torch.arange(2000, dtype=torch.float32)  # 8000 of the 10,000 bytes of a checkpoint


def content(step: int) -> dict[str, Any]:
    return {"global_step": step, "state_dict": {"weight": TENSOR + step}, "notes": [step, None]}


def saved(path: Path, step: int) -> Path:
    AtomicCheckpointIO().save_checkpoint(content(step), path)
    return path


def step_of(path: Path) -> int:
    """Which `content` is at `path`, all of it."""
    loaded = AtomicCheckpointIO().load_checkpoint(path)
    torch.testing.assert_close(loaded, content(loaded["global_step"]), rtol=0, atol=0)
    return int(loaded["global_step"])


def test_saved_checkpoint_is_alone_in_its_folder_and_replaces_one_before(tmp_path: Path) -> None:
    path = tmp_path / "new" / "last.ckpt"
    for step in (1, 2):
        assert step_of(saved(path, step)) == step
        assert checkpoint_problem(path) is None
        assert list(path.parent.iterdir()) == [path]
    assert torch.load(path, weights_only=True)[checkpoint_files.NAME_KEY] == "last.ckpt"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads Linux' list of open files")
def test_checkpoint_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def recorded_fsync(descriptor: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def recorded_replace(path: Path, target: Path) -> Path:
        done.append("replace")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "replace", recorded_replace)
    saved(tmp_path / "last.ckpt", 1)
    assert done == ["sync .last.ckpt.partial", "replace", f"sync {tmp_path.name}"]


def test_what_a_killed_save_left_goes_with_the_next_save(tmp_path: Path) -> None:
    partial_path(tmp_path / "step=1.ckpt").write_bytes(b"half")
    (partial_path(tmp_path / "step=2.ckpt") / "policy").mkdir(parents=True)
    assert find_newest_checkpoint(tmp_path) is None
    path = saved(tmp_path / "step=3.ckpt", 3)
    assert list(tmp_path.iterdir()) == [path]


def test_a_save_that_fails_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    path = saved(tmp_path / "last.ckpt", 1)
    unsavable = {**content(2), "callback": lambda: None}
    with pytest.raises(Exception, match="lambda"):
        AtomicCheckpointIO().save_checkpoint(unsavable, path)
    assert (step_of(path), list(tmp_path.iterdir())) == (1, [path])


@pytest.mark.parametrize("room", [0, 500, 4000, 9000])
def test_a_full_disk_is_named_and_leaves_the_checkpoint_before(tmp_path: Path, room: int) -> None:
    path = saved(tmp_path / "last.ckpt", 1)
    told_of = re.escape(f"checkpoint {path} could not be written")
    with largest_file(room), pytest.raises(OSError, match=told_of) as error:
        saved(path, 2)
    assert "File too large" in str(error.value)
    assert (step_of(path), list(tmp_path.iterdir())) == (1, [path])


@pytest.mark.parametrize("cut", [*range(0, 10_000, 1250), -100, -1])
def test_cut_off_checkpoint_is_refused_and_another_offered(tmp_path: Path, cut: int) -> None:
    older, path = saved(tmp_path / "step=1.ckpt", 1), saved(tmp_path / "step=2.ckpt", 2)
    path.write_bytes(path.read_bytes()[:cut])
    message = f"checkpoint {path}: is damaged or cut off.*resume from {older} instead"
    with pytest.raises(ValueError, match=message):
        step_of(path)
    assert step_of(older) == 1


def test_compressed_file_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = saved(tmp_path / "last.ckpt", 1)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(ValueError, match="is compressed, unlike any checkpoint"):
        step_of(path)


def test_a_flipped_byte_anywhere_is_found_or_changes_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path / "last.ckpt", 1)
    whole, n_refused = path.read_bytes(), 0
    for offset in range(0, len(whole), 53):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 255]) + whole[offset + 1 :])
        try:
            assert step_of(path) == 1, offset  # padding, for instance
        except ValueError as error:
            assert f"checkpoint {path}: is damaged" in str(error), offset  # noqa: PT017
            n_refused += 1
    assert n_refused > 0.8 * len(whole) / 53


def test_the_newest_intact_checkpoint_is_offered(tmp_path: Path) -> None:
    paths = [saved(tmp_path / f"step={step}.ckpt", step) for step in (8, 9, 10, 11)]
    for path, time in zip(paths, (3, 4, 4, 5), strict=True):
        os.utime(path, (time, time))
    assert find_newest_checkpoint(tmp_path) == paths[3]
    for path in paths[2:]:
        path.write_bytes(path.read_bytes()[:-1])
        os.utime(path, (4, 4))
    with pytest.raises(ValueError, match=r"step=9\.ckpt instead"):
        step_of(paths[3])
    assert find_newest_checkpoint(tmp_path / "none", tmp_path) == paths[3]
    assert find_newest_checkpoint(tmp_path / "none") is None


def test_newest_checkpoint_is_the_furthest_whatever_the_clock_said(tmp_path: Path) -> None:
    paths = []
    for batches in (3, 4):
        paths.append(tmp_path / f"batch={batches}.ckpt")
        progress = {"epoch_loop.batch_progress": {"total": {"completed": batches}}}
        AtomicCheckpointIO().save_checkpoint({"loops": {"fit_loop": progress}}, paths[-1])
    os.utime(paths[1], (4, 4))  # as after a copy, or on a machine whose clock was late
    with pytest.warns(UserWarning, match=r"batch=3\.ckpt was written after .*batch=4\.ckpt"):
        assert find_newest_checkpoint(tmp_path) == paths[1]
    os.utime(paths[0], (3, 3))
    assert find_newest_checkpoint(tmp_path) == paths[1]


def test_newest_checkpoint_is_found_while_another_run_deletes_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [saved(tmp_path / f"step={step}.ckpt", step) for step in (1, 2)]
    read = checkpoint_files.batches_of

    def delete_first(path: Path) -> float:
        paths[0].unlink(missing_ok=True)
        return read(path)

    monkeypatch.setattr(checkpoint_files, "batches_of", delete_first)
    assert find_newest_checkpoint(tmp_path) == paths[1]


def test_files_of_a_checkpoint_folder_have_the_mode_of_the_umask(tmp_path: Path) -> None:
    path = partial_path(tmp_path / "last.ckpt") / "policy" / "rank_0.safetensors"
    path.parent.mkdir(parents=True)
    path.touch(mode=0o600)
    checkpoint_files.finish_folder(tmp_path / "last.ckpt", {}, {})
    (tmp_path / "usual").touch()
    file = tmp_path / "last.ckpt" / "policy" / "rank_0.safetensors"
    assert file.stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_checkpoint_is_not_offered_in_its_own_place(tmp_path: Path) -> None:
    # torch's reader may find a damage that the checksums do not cover
    path = saved(tmp_path / "step=1.ckpt", 1)
    assert checkpoint_problem(path) is None
    message = str(checkpoint_files.damaged_checkpoint_error(path, "is damaged: bad header"))
    assert message.endswith(f"bad header; there is no other intact checkpoint in {tmp_path}")


def test_a_file_of_another_size_is_found_without_reading_it(tmp_path: Path) -> None:
    path = write(tmp_path / "last.ckpt")
    file = path / LIGHTNING_FILE
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    expected = f"{LIGHTNING_FILE} is damaged: expected {size} bytes, got {size - 1}"
    assert checkpoint_files.folder_problem(path) == expected


def test_a_link_to_a_checkpoint_that_is_gone_is_none(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").symlink_to("step=1.ckpt")
    assert find_newest_checkpoint(tmp_path) is None
    assert not saved(tmp_path / "last.ckpt", 1).is_symlink()


def test_a_file_and_a_folder_take_the_place_of_one_another(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.mkdir()
    (path / "lit_rlhf.json").touch()
    with pytest.raises(ValueError, match="not of format"):
        step_of(path)
    assert (step_of(saved(path, 1)), list(tmp_path.iterdir())) == (1, [path])
    for value in (0.0, 5.0):
        write(path, value=value)
        assert checkpoint_problem(path) is None
    assert read_state_dict(path)["policy.b"].tolist() == [9.0, 10.0, 11.0]
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_not_there_or_would_run_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.ckpt: does not exist"):
        step_of(tmp_path / "none.ckpt")
    torch.save({"state_dict": {"x": Path("object")}}, tmp_path / "object.ckpt")
    with pytest.raises(Exception, match="Weights only load failed"):
        step_of(tmp_path / "object.ckpt")
    with pytest.raises(TypeError, match="storage_options"):
        AtomicCheckpointIO().save_checkpoint({}, tmp_path / "x.ckpt", storage_options={})


@pytest.mark.parametrize("plugin", [None, TorchCheckpointIO, AsyncCheckpointIO])
def test_command_line_leaves_plugins_that_do_more_alone(plugin: type[CheckpointIO] | None) -> None:
    plugins: list[Any] | None = None if plugin is None else [plugin()]
    trainer = Trainer(plugins=plugins, accelerator="cpu", logger=False, enable_checkpointing=False)
    checkpoint_files.use_atomic_checkpoints(trainer)
    expected = AsyncCheckpointIO if plugin is AsyncCheckpointIO else AtomicCheckpointIO
    assert type(trainer.strategy.checkpoint_io) is expected


def test_a_checkpoint_that_was_being_replaced_is_found_again(tmp_path: Path) -> None:
    path = write(tmp_path / "last.ckpt")
    path.rename(replaced_path(path))  # where a kill between the two renames leaves it
    assert checkpoint_files.read_engine_layouts(path)["policy"].world_size == 3
    assert checkpoint_problem(path) is None


def test_what_is_killed_in_the_middle_of_a_save_is_cleared_away_or_put_back(tmp_path: Path) -> None:
    older, path = write(tmp_path / "step=9.ckpt"), write(tmp_path / "step=10.ckpt")
    path.rename(replaced_path(path))
    (path := write(tmp_path / "step=2.ckpt")).rename(partial_path(path))
    # a removal that was cut short comes after the manifest's time
    (older / LIGHTNING_FILE).unlink()
    assert find_newest_checkpoint(tmp_path) == tmp_path / "step=10.ckpt"
    assert checkpoint_problem(tmp_path / "step=10.ckpt") is None
    assert checkpoint_problem(older) == f"{LIGHTNING_FILE} is missing"
    delete_partials(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step=10.ckpt", "step=9.ckpt"]


def test_other_things_are_not_taken_for_a_checkpoint(tmp_path: Path) -> None:
    assert checkpoint_problem(tmp_path / "none") == "does not exist"
    with pytest.raises(FileNotFoundError, match="does not exist"):
        checkpoint_files.read_engine_layouts(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="not a folder"):
        checkpoint_files.read_engine_layouts(tmp_path / "file")
    assert "has no lit_rlhf.json" in str(checkpoint_problem(tmp_path))
    (tmp_path / checkpoint_files.MANIFEST).write_text(json.dumps({"format": "other"}))
    assert "not of format" in str(checkpoint_problem(tmp_path))


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        (
            {"state_dict": {"x": torch.zeros(1).expand(2**40)}},
            "x: expected a tensor that is stored",
        ),
        ({"state_dict": []}, "expected a checkpoint of Lightning's, got one without state_dict"),
        ({"hyper_parameters": []}, "expected a mapping as hyper_parameters, got list"),
        ({"callbacks": 5}, "expected a mapping as callbacks, got int"),
    ],
)
def test_checkpoint_of_another_form_is_refused(
    tmp_path: Path, part: dict[str, Any], problem: str
) -> None:
    torch.save(content(1) | part, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=rf"checkpoint .*a\.ckpt: {problem}"):
        read_lightning_state(tmp_path / "a.ckpt")


def test_files_with_checksums_stay_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    partial = partial_path(path)
    (partial / "policy").mkdir(parents=True)
    for name in ("policy/shard", "state.ckpt"):
        (partial / name).write_bytes(b"content")
    forced: list[str] = []
    monkeypatch.setattr(checkpoint_files, "fsync", lambda file: forced.append(file.name))
    checkpoint_files.finish_folder(path, {}, {"policy/shard": 7})
    assert forced == ["policy", "state.ckpt", "lit_rlhf.json", partial.name]
    files = checkpoint_files.read_folder_manifest(path)["files"]
    assert files["policy/shard"] == {"bytes": 7, "crc32": 7}
