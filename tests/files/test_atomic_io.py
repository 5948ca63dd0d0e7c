import ctypes
import errno
import os
from pathlib import Path

import pytest

from lit_rlhf.files import delete_partials, fsync, partial_path
from lit_rlhf.files.atomic_io import try_swap_names


def can_swap_names(folder: Path) -> bool:
    """Whether system and file system can swap two names, by a system call of our own."""
    for name in ("a", "b"):
        (folder / name).mkdir()
    swap = getattr(ctypes.CDLL(None), "renameat2", None)
    names = [os.fsencode(folder / name) for name in ("a", "b")]
    return swap is not None and swap(-100, names[0], -100, names[1], 2) == 0


def test_names_are_swapped_in_one_step_or_nothing_changes(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("1")
    second.mkdir()
    swapped = try_swap_names(first, second)
    assert swapped == can_swap_names(tmp_path)
    if swapped:
        assert first.is_dir()
        assert second.read_text() == "1"
    assert not try_swap_names(tmp_path / "none", second)


def test_folder_that_cannot_be_synced_is_passed_over_and_a_file_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network and FUSE mounts answer EINVAL for folders."""

    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    (tmp_path / "file").touch()
    number = errno.EINVAL
    fsync(tmp_path)
    with pytest.raises(OSError, match="Invalid argument"):
        fsync(tmp_path / "file")
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        fsync(tmp_path)


def test_partials_of_files_and_folders_are_deleted_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").touch()
    partial_path(tmp_path / "step=1.ckpt").touch()
    (partial_path(tmp_path / "step=2.ckpt") / "policy").mkdir(parents=True)
    delete_partials(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
