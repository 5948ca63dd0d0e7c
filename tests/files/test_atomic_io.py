import ctypes
import errno
import os
import sys
from pathlib import Path

import pytest

from lit_rlhf.files import delete_partials, fsync, partial_path, try_replacement
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


def test_replacement_that_can_work_is_tried_without_a_trace(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "weights").write_text("old")
    for left in (".new.partial", "..new.partial.partial"):  # by a command that was killed
        (tmp_path / left / "critic").mkdir(parents=True)
    for name in ("full", "new", "n" * 230):
        try_replacement(tmp_path / name, "output")
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "weights"]


@pytest.mark.parametrize("name", ["mounted", "n" * 240, "read_only/model"])
def test_replacement_that_cannot_work_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The kernel moves no mount point: it answers EBUSY."""
    (tmp_path / "mounted").mkdir()
    (tmp_path / "mounted" / "weights").write_text("old")
    rename = Path.rename

    def move(path: Path, target: Path) -> Path:
        if "mounted" in (path.name, target.name):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        return rename(path, target)

    def make(path: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        if "read_only" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        os.makedirs(path, mode, exist_ok)

    monkeypatch.setattr(Path, "rename", move)
    monkeypatch.setattr(Path, "mkdir", make)
    with pytest.raises(ValueError, match=r"can replace, got .*A mount point.*: name a folder"):
        try_replacement(tmp_path / name, "output")
    assert [path.name for path in tmp_path.rglob("*")] == ["mounted", "weights"]


MAY_NOT_MOUNT = 77
"""Exit status of a process that the system lets mount nothing."""


def try_replacing_a_mount(folder: Path) -> int:
    """Mount a file system at a folder, in a process of its own; 0 if replacing it is refused."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        new_user_and_mounts = 0x10000000 | 0x00020000
        if libc.unshare(new_user_and_mounts) or libc.mount(
            b"none", os.fsencode(folder), b"tmpfs", 0, None
        ):
            os._exit(MAY_NOT_MOUNT)
        with pytest.raises(ValueError, match=r"Device or resource busy.*name a folder in it"):
            try_replacement(folder, "output")
        status = 0
    finally:
        os._exit(status)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems mount differently")
def test_replacement_of_a_mount_point_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    status = try_replacing_a_mount(tmp_path / "volume")
    if status == MAY_NOT_MOUNT:
        pytest.skip("the system lets this account mount nothing")
    assert status == 0
    assert [path.name for path in tmp_path.rglob("*")] == ["volume"]


def test_partials_of_files_and_folders_are_deleted_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").touch()
    partial_path(tmp_path / "step=1.ckpt").touch()
    (partial_path(tmp_path / "step=2.ckpt") / "policy").mkdir(parents=True)
    delete_partials(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
