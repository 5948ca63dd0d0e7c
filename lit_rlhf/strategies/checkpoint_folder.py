"""Checkpoints that are folders: complete under their name, or not there at all."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT = "lit_rlhf.multi_engine/1"


def partial_folder(path: Path) -> Path:
    """Where a checkpoint is written before it takes its name."""
    return path.with_name(f".{path.name}.partial")


def replaced_folder(path: Path) -> Path:
    """Where the checkpoint of that name waits while a new one takes its place."""
    return path.with_name(f".{path.name}.replaced")


def publish(path: Path, engines: dict[str, Any]) -> None:
    """Describe the files of the partial folder in a manifest and move it to `path`.

    Args:
        path: The checkpoint's name; one that is there is replaced.
        engines: What the manifest says of each engine.
    """
    partial, replaced = partial_folder(path), replaced_folder(path)
    files = {
        str(file.relative_to(partial)): file.stat().st_size
        for file in sorted(partial.rglob("*"))
        if file.is_file()
    }
    manifest = {"format": FORMAT, "files": files, "engines": engines}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    remove(replaced)
    if path.exists():
        if swapped(partial, path):
            remove(partial)
            return
        path.rename(replaced)
    partial.rename(path)
    remove(replaced)


def swapped(first: Path, second: Path) -> bool:
    """Swap two names at once, so that there is no moment without a checkpoint.

    Returns:
        False where the system (other than Linux) or the file system cannot.
    """
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    names = os.fsencode(first), os.fsencode(second)
    return rename is not None and rename(here, names[0], here, names[1], exchange) == 0


def remove(path: Path) -> None:
    """Delete a file or folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def checkpoint_problem(path: str | Path) -> str | None:
    """What is wrong with a checkpoint folder, or `None` if it is complete."""
    path = Path(path)
    if not path.is_dir():
        return "not a folder" if path.exists() else "does not exist"
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"has no {MANIFEST}: not a checkpoint of the multi-engine strategy"
    except (UnicodeDecodeError, json.JSONDecodeError):
        return f"{MANIFEST} is damaged"
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        return f"{MANIFEST} is not of format {FORMAT}"
    for name, size in manifest["files"].items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} is damaged: expected {size} bytes, got {file.stat().st_size}"
    return None


def checkpoint_engines(path: Path) -> dict[str, Any]:
    """What the manifest of a checkpoint says of its engines.

    A checkpoint that was being replaced when the process was killed is put back first.

    Raises:
        FileNotFoundError: If there is no checkpoint at `path`.
        ValueError: If it is damaged or of another kind.
    """
    if not path.exists() and checkpoint_problem(replaced_folder(path)) is None:
        with suppress(FileNotFoundError):  # another rank was faster
            replaced_folder(path).rename(path)
    problem = checkpoint_problem(path)
    if problem is not None:
        error = ValueError if path.exists() else FileNotFoundError
        raise error(f"checkpoint {path}: {problem}")
    manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    engines: dict[str, Any] = manifest["engines"]
    return engines
