"""Atomic replacement of files and folders.

New content is written under a hidden name beside the final one, forced to disk, and then renamed.
So a file under the final name is always complete, even after a crash or a power cut.
"""

import ctypes
import os
import shutil
import zlib
from contextlib import suppress
from pathlib import Path

from lit_callbacks.files import fsync

PARTIAL = "partial"
REPLACED = "replaced"
_CRC_BLOCK = 1 << 20  # bytes read at a time


def partial_path(path: Path) -> Path:
    """Hidden name under which the content of `path` is written."""
    return path.with_name(f".{path.name}.{PARTIAL}")


def replaced_path(path: Path) -> Path:
    """Hidden name of the previous content of `path` while it is being replaced."""
    return path.with_name(f".{path.name}.{REPLACED}")


def save_durably(content: object, path: Path) -> None:
    """Save `content` with `torch.save` in a new file, and force it to disk."""
    import torch  # commands lock their outputs before it is loaded

    try:
        with path.open("xb") as file:  # which follows no link
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
    except RuntimeError as error:
        # torch 2.13's zip writer notices a failed write only when it closes the archive, and its
        # RuntimeError ("unexpected pos") then hides the system's error, which says why.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


def move_into_place(path: Path) -> None:
    """Rename `partial_path(path)` to `path`, replacing the file or folder of that name."""
    partial = partial_path(path)
    replaced = replaced_path(path)
    if os.path.lexists(path) and (path.is_dir() or partial.is_dir()):
        # `rename` cannot replace a folder with content, nor a file by a folder.
        if try_swap_names(partial, path):
            delete(partial)
        else:
            # Between these two renames nothing has the name `path`. A process killed there leaves
            # the old content at `replaced`, and `undo_interrupted_replacement` brings it back.
            delete(replaced)
            path.rename(replaced)
            partial.rename(path)
    else:
        partial.replace(path)
    delete(replaced)
    fsync(path.parent)  # a rename survives a power cut once its folder is on disk


def try_swap_names(first: Path, second: Path) -> bool:
    """Swap two names in one step, so that neither is missing at any moment.

    Returns False, and changes nothing, if the system is not Linux or the file system cannot do it.
    """
    # Python has no call for it. glibc 2.28 and newer have the function, musl does not.
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    # the kernel's names: paths are relative to the working directory, and the two are exchanged
    AT_FDCWD = -100
    RENAME_EXCHANGE = 2
    status = renameat2(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE)
    return bool(status == 0)


def try_replacement(path: Path, option: str) -> None:
    """Move empty folders as replacing the folder `path` will move full ones, and delete them.

    A mount point, a name that is too long, a quota and missing permissions then end a command at
    its start, and not when its result is there. What has the name `path` stays as it is.

    Args:
        path: The folder, which need not exist.
        option: The option that names it, for the error.

    Raises:
        ValueError: If the folder could not be replaced.
    """
    partial = partial_path(path)
    inner = partial_path(partial)  # the networks of a run are saved like this, each by itself
    try:
        for leftover in (partial, inner):  # by a command that was killed
            delete(leftover)
        inner.mkdir(parents=True)
        move_into_place(partial)
        if os.path.lexists(path):
            # if it is killed here, `undo_interrupted_replacement` brings the name back
            path.rename(replaced_path(path))
            replaced_path(path).rename(path)
        else:
            move_into_place(path)
            path.rmdir()
    except OSError as error:
        raise ValueError(
            f"{option}: expected a folder that another one can replace, got {path}: "
            f"{error.strerror}. A mount point, such as a volume of Docker, cannot be replaced: "
            f"name a folder in it, for instance {path / 'model'}"
        ) from error
    finally:
        with suppress(OSError):  # the name may be too long
            delete(partial)
            delete(inner)


def undo_interrupted_replacement(path: Path) -> None:
    """Give the previous content its name back if `move_into_place` was killed half-way."""
    if not path.exists() and replaced_path(path).exists():
        with suppress(FileNotFoundError):  # another rank has renamed it
            replaced_path(path).rename(path)


def delete(path: Path) -> None:
    """Delete a file, link or folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def delete_partials(folder: Path) -> None:
    """Delete leftovers of interrupted writes in `folder`."""
    for path in folder.glob(f".*.{PARTIAL}"):
        delete(path)


def file_crc32(path: Path) -> int:
    """CRC-32 of a file's content."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(_CRC_BLOCK):
            value = zlib.crc32(block, value)
    return value
