"""Locks on folders: who is refused, and what a process leaves when it ends."""

import errno
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest
from filelock import FileLock

from lit_rlhf.files import (
    FolderInUseError,
    FolderLocks,
    lock_outputs,
    lock_path,
    write_manifest,
    write_text,
)


def killed(work: Callable[[], None]) -> None:
    """Do `work` in a process of its own, and kill it."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        work()
        os.write(writing, b"!")
        signal.pause()
    os.close(writing)
    assert os.read(reading, 1) == b"!"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading)


def test_a_second_run_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    first, second = FolderLocks(), FolderLocks()
    first.acquire([tmp_path / "a", tmp_path / "b"])
    message = rf"{tmp_path}/b: another run or command writes to it: process {os.getpid()} on "
    with pytest.raises(FolderInUseError, match=message):
        second.acquire([tmp_path / "c", tmp_path / "b"])
    FolderLocks().acquire([tmp_path / "c"])  # the refused run has kept nothing
    first.release()
    second.acquire([tmp_path / "b"])
    second.release()
    assert not lock_path(tmp_path / "b").exists()


def test_a_folder_has_one_lock_however_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a", target_is_directory=True)
    locks = FolderLocks()
    locks.acquire([tmp_path / "a", tmp_path / "link", tmp_path / "b" / ".." / "a"])
    assert [path.name for path in tmp_path.glob(".*")] == [".a.lock"]
    locks.release()


def test_a_killed_run_leaves_its_mark_and_no_lock(tmp_path: Path) -> None:
    killed(lambda: FolderLocks().acquire([tmp_path / "a"]))
    assert lock_path(tmp_path / "a").is_file()
    locks = FolderLocks()
    locks.acquire([tmp_path / "a"])
    locks.release()
    assert not lock_path(tmp_path / "a").exists()


def test_a_worker_that_outlives_a_killed_run_holds_no_lock(tmp_path: Path) -> None:
    """Workers of a DataLoader are forks; they notice only after seconds that they are alone."""
    reading, writing = os.pipe()

    def work() -> None:
        FolderLocks().acquire([tmp_path / "a"])
        if not os.fork():
            os.close(writing)
            os.read(reading, 1)  # until the test closes its end
            os._exit(0)

    killed(work)
    FolderLocks().acquire([tmp_path / "a"])
    os.close(reading)
    os.close(writing)


def test_outputs_of_a_command_are_locked_until_it_ends(tmp_path: Path) -> None:
    output = tmp_path / "new" / "out.jsonl"
    with suppress(KeyError), lock_outputs([output, "/dev/null"]):
        with pytest.raises(FolderInUseError, match=r"out\.jsonl: another run or command"):
            FolderLocks().acquire([output])
        raise KeyError
    assert list(tmp_path.iterdir()) == []  # nor the folder that was made for the lock
    with lock_outputs([output]):
        output.write_text("content")
    assert list(output.parent.iterdir()) == [output]


def test_name_that_leaves_no_room_for_hidden_ones_is_refused_at_once(tmp_path: Path) -> None:
    longest = tmp_path / ("é" * 107 + "a")
    with lock_outputs([longest]):
        write_text(longest, "content")
        write_manifest(longest, {})
    message = r"expected a name of at most 215 bytes, as hidden files beside it have longer ones"
    with pytest.raises(ValueError, match=f"{message}, got 216"), lock_outputs([f"{longest}a"]):
        raise AssertionError
    assert {path.name for path in tmp_path.iterdir()} == {
        longest.name,
        f".{longest.name}.lit_rlhf.json",
    }


def test_lock_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("kept")
    lock_path(tmp_path / "out").symlink_to("theirs")
    with pytest.raises(OSError, match="symbolic links"):
        FolderLocks().acquire([tmp_path / "out"])
    assert (tmp_path / "theirs").read_text() == "kept"


def test_only_a_file_system_without_locks_is_warned_of(tmp_path: Path) -> None:
    no_locks = OSError(errno.ENOLCK, "No locks available")
    message = r"\.a\.lock cannot be locked: .*No locks available"
    with patch.object(FileLock, "acquire", side_effect=[no_locks, PermissionError]):
        with pytest.warns(UserWarning, match=message):
            FolderLocks().acquire([tmp_path / "a"])
        with pytest.raises(PermissionError):
            FolderLocks().acquire([tmp_path / "a"])


def test_a_refused_run_leaves_no_file_of_a_lock(tmp_path: Path) -> None:
    first, second = FolderLocks(), FolderLocks()
    first.acquire([tmp_path / "z"])
    mark = lock_path(tmp_path / "b")
    mark.write_text("an interrupted run")  # says that b is not finished
    with pytest.raises(FolderInUseError):
        second.acquire([tmp_path / "new" / "a", tmp_path / "b", tmp_path / "z"])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".b.lock", ".z.lock"]
    with FileLock(mark, blocking=False):  # it is free
        pass


def test_a_file_that_cannot_be_written_beside_is_refused_at_once(tmp_path: Path) -> None:
    closed = PermissionError(errno.EACCES, "Permission denied", ".out.lock")
    with patch.object(FileLock, "acquire", side_effect=closed):
        with pytest.warns(UserWarning, match="cannot be locked"), lock_outputs([tmp_path]):
            pass  # a volume, whose content can be written
        with pytest.raises(PermissionError), lock_outputs([tmp_path / "out.jsonl"]):
            pass
