"""Locks on folders and files, so that two runs or commands do not write to the same one."""

import errno
import os
import socket
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from lit_rlhf.errors import UserError

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems that have no locks."""
_LONGEST_ADDITION = 40
"""Bytes by which names of hidden files are longer than the name beside which they are: that of a
new manifest is `..NAME.lit_rlhf.json.01234567.partial`."""


class FolderInUseError(UserError):
    """Another run or command writes to a folder or file; the message names its process."""


class FolderLocks:
    """Locks on folders, and on files, that this process holds.

    The operating system gives a lock up when the process ends, however it ends. The file of the
    lock, `lock_path(folder)`, says who holds it. It is deleted when the lock is released, but stays
    after an interruption, as a mark that the work on the folder was not finished.
    """

    def __init__(self) -> None:
        self._held: list[BaseFileLock] = []
        self._made: list[Path] = []  # folders that were missing, the innermost first

    def acquire(self, folders: Iterable[Path]) -> None:
        """Lock all folders or none; they need not exist. Warns of a file system without locks."""
        new: list[Path] = []  # files of locks that were not there
        try:
            self._acquire(folders, new)
        except BaseException:
            self.interrupt()
            for path in new:  # others are marks of interrupted work, which stay
                path.unlink(missing_ok=True)
            self._remove_made()
            raise

    def _acquire(self, folders: Iterable[Path], new: list[Path]) -> None:
        """Lock folders.

        Args:
            folders: The folders.
            new: Takes the files of the locks that this call creates.
        """
        for path, folder in {lock_path(folder): folder for folder in folders}.items():
            missing = [parent for parent in path.parents if not parent.exists()]
            path.parent.mkdir(parents=True, exist_ok=True)
            self._made += missing
            _check_length(folder, path.parent)
            existed = path.exists()
            # not per thread: the lock may be released in another thread
            lock: BaseFileLock = FileLock(path, blocking=False, thread_local=False)
            try:
                lock.acquire()
            except Timeout:
                holder = (
                    path.read_text(encoding="utf-8", errors="replace")
                    or "one that has just started"
                )
                raise FolderInUseError(
                    f"{folder}: another run or command writes to it: {holder}. Wait for its end, "
                    "or choose another name"
                ) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                warnings.warn(f"{path} cannot be locked: {error}", stacklevel=2)
                continue
            self._held.append(lock)
            if not existed:
                new.append(path)
            # where the system has no locks, filelock keeps its own notes in the file
            if not isinstance(lock, SoftFileLock):
                since = datetime.now().astimezone().isoformat(timespec="seconds")
                holder = f"process {os.getpid()} on {socket.gethostname()}, since {since}"
                # in the file that is locked, which is not a link: opening it has checked that
                descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW)
                with open(descriptor, "w", encoding="utf-8") as file:
                    file.write(holder)

    def release(self) -> None:
        """Give up all locks after finished work, and delete their files."""
        for lock in self._held:
            # before the lock is given up, so that no other process has locked the file by then
            Path(lock.lock_file).unlink(missing_ok=True)
        self.interrupt()
        self._remove_made()

    def _remove_made(self) -> None:
        for folder in self._made:
            with suppress(OSError):  # it has content by now
                folder.rmdir()
        self._made = []

    def interrupt(self) -> None:
        """Give up all locks after work that was not finished; their files stay."""
        for lock in self._held:
            lock.release()
        self._held = []


def _check_length(output: Path, parent: Path) -> None:
    """Refuse a name that leaves no room for the hidden ones, which come when the work is done."""
    longest = os.pathconf(parent, "PC_NAME_MAX") - _LONGEST_ADDITION
    length = len(os.fsencode(output.resolve().name))
    if length > longest:
        raise ValueError(
            f"{output}: expected a name of at most {longest} bytes, as hidden files beside it have "
            f"longer ones, got {length}"
        )


@contextmanager
def lock_outputs(outputs: Iterable[str | Path]) -> Iterator[None]:
    """Lock the files and folders that a command writes until it has ended, well or not.

    Devices and pipes are not locked, and a warning says so of a folder whose parent belongs to
    others, for instance of a volume at the root. A file that cannot be written beside is refused:
    it could not be replaced either.
    """
    locks = FolderLocks()
    paths = [Path(output) for output in outputs]
    try:
        locks.acquire(p for p in paths if p.is_file() or p.is_dir() or not p.exists())
    except OSError as error:
        is_closed = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        if not is_closed or not all(path.is_dir() for path in paths):
            raise
        warnings.warn(f"{error.filename} cannot be locked: {error.strerror}", stacklevel=2)
    try:
        yield
    finally:
        locks.release()


def lock_path(folder: Path) -> Path:
    """File of the lock on a folder or file: `.NAME.lock` beside it."""
    folder = folder.resolve()
    return folder.with_name(f".{folder.name}.lock")
