"""Locks on folders, so that two runs do not write to the same one."""

import errno
import os
import socket
import warnings
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from lit_rlhf.errors import UserError

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems that have no locks."""


class FolderInUseError(UserError):
    """Another run writes to a folder; the message names its process."""


class FolderLocks:
    """Locks on folders that this process holds.

    The operating system gives a lock up when the process ends, however it ends. The file of the
    lock, `lock_path(folder)`, says who holds it. It is deleted when the lock is released, but stays
    after an interruption, as a mark that the work on the folder was not finished.
    """

    def __init__(self) -> None:
        self._held: list[BaseFileLock] = []

    def acquire(self, folders: Iterable[Path]) -> None:
        """Lock all folders or none; they need not exist. Warns of a file system without locks."""
        for path, folder in {lock_path(folder): folder for folder in folders}.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            # not per thread: the lock may be released in another thread
            lock: BaseFileLock = FileLock(path, blocking=False, thread_local=False)
            try:
                lock.acquire()
            except Timeout:
                holder = path.read_text(encoding="utf-8") or "one that has just started"
                self.interrupt()
                raise FolderInUseError(
                    f"{folder}: another run writes to this folder: {holder}. Wait for "
                    "its end, or give this run another folder"
                ) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                warnings.warn(f"{path} cannot be locked: {error}", stacklevel=2)
                continue
            # where the system has no locks, filelock keeps its own notes in the file
            if not isinstance(lock, SoftFileLock):
                since = datetime.now().astimezone().isoformat(timespec="seconds")
                holder = f"process {os.getpid()} on {socket.gethostname()}, since {since}"
                path.write_text(holder, encoding="utf-8")
            self._held.append(lock)

    def release(self) -> None:
        """Give up all locks after finished work, and delete their files."""
        for lock in self._held:
            # before the lock is given up, so that no other process has locked the file by then
            Path(lock.lock_file).unlink(missing_ok=True)
        self.interrupt()

    def interrupt(self) -> None:
        """Give up all locks after work that was not finished; their files stay."""
        for lock in self._held:
            lock.release()
        self._held = []


def lock_path(folder: Path) -> Path:
    """File of the lock on a folder: `.NAME.lock` beside it."""
    folder = folder.resolve()
    return folder.with_name(f".{folder.name}.lock")
