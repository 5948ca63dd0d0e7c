"""Writing aside and moving into place, so that a name never stands for something half written."""

from __future__ import annotations

import ctypes
import os
import shutil
import zlib
from contextlib import suppress
from pathlib import Path

import torch

PARTIAL, REPLACED = "partial", "replaced"
CHUNK = 1 << 20  # bytes read at once


def partial_path(path: Path) -> Path:
    """Where a checkpoint is written before it takes its name."""
    return path.with_name(f".{path.name}.{PARTIAL}")


def replaced_path(path: Path) -> Path:
    """Where the checkpoint of that name waits while a new one takes its place."""
    return path.with_name(f".{path.name}.{REPLACED}")


def write(content: object, path: Path) -> None:
    """Save `content` with torch; it is on disk when this returns.

    Raises:
        OSError: If the system does not take it, for instance as the disk is full.
    """
    try:
        with path.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
    except RuntimeError as error:  # torch's writer raises its own over the system's
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


def put_in_place(path: Path) -> None:
    """Give what is written at `partial_path(path)` its name, whatever has that name now."""
    partial, replaced = partial_path(path), replaced_path(path)
    if os.path.lexists(path) and (path.is_dir() or partial.is_dir()):
        # a rename replaces neither a folder nor a file by a folder
        if swapped(partial, path):
            remove(partial)
        else:
            remove(replaced)
            path.rename(replaced)
            partial.rename(path)
    else:
        partial.replace(path)
    remove(replaced)
    sync(path.parent)


def swapped(first: Path, second: Path) -> bool:
    """Swap two names at once, so that there is no moment without a checkpoint.

    Returns:
        False where the system (other than Linux) or the file system cannot.
    """
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    names = os.fsencode(first), os.fsencode(second)
    return rename is not None and rename(here, names[0], here, names[1], exchange) == 0


def put_back(path: Path) -> None:
    """Undo a replacement by `put_in_place` that a kill has cut in two."""
    if not path.exists() and replaced_path(path).exists():
        with suppress(FileNotFoundError):  # another rank was faster
            replaced_path(path).rename(path)


def remove(path: Path) -> None:
    """Delete a file, link or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_partials(folder: Path) -> None:
    """Delete what interrupted writes have left in `folder`."""
    for path in folder.glob(f".*.{PARTIAL}"):
        remove(path)


def sync(path: Path) -> None:
    """Have the contents of a file, or the names in a folder, written to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            value = zlib.crc32(chunk, value)
    return value
