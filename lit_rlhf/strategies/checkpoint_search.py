"""Which checkpoints there are, and whether they are sound."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

from lit_rlhf.strategies.checkpoint_folder import (
    MANIFEST,
    contents_problem,
    folder_problem,
    read_manifest,
)
from lit_rlhf.strategies.placement import REPLACED, put_back


def checkpoint_problem(path: str | Path) -> str | None:
    """What is wrong with a checkpoint, or `None` if it is complete and undamaged.

    Reads the whole checkpoint once.

    Args:
        path: A checkpoint file, or a folder that the multi-engine strategy wrote.
    """
    path = Path(path)
    if not path.exists():
        return "does not exist"
    if path.is_dir():
        return folder_problem(path) or contents_problem(path)
    return file_problem(path)


def file_problem(path: Path) -> str | None:
    """What is wrong with a checkpoint file: a zip archive with a checksum for each of its parts."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # of many types, as damage may make anything of an archive
        return f"is damaged or cut off: {error}"
    return None if damaged is None else f"is damaged: the checksum of {damaged} differs"


def checkpoints_in(*folders: str | Path) -> list[Path]:
    """The checkpoints in `folders` newest first, damaged ones too."""
    found = []
    for folder in map(Path, folders):
        for aside in folder.glob(f".*.ckpt.{REPLACED}"):
            put_back(aside.with_name(aside.name[1 : -len(f".{REPLACED}")]))
        found += [path for path in folder.glob("*.ckpt") if written_file(path).is_file()]
    return sorted(found, key=written_order, reverse=True)


def newest_checkpoint(*folders: str | Path) -> Path | None:
    """The checkpoint in `folders` that was written last, damaged or not; `None` without any."""
    return next(iter(checkpoints_in(*folders)), None)


def written_file(path: Path) -> Path:
    """The file whose time says when a checkpoint was written, and without which it is none."""
    # the time of a folder itself also changes when something is deleted from it
    return path / MANIFEST if path.is_dir() else path


def written_order(path: Path) -> tuple[int, list[int]]:
    """The time a checkpoint was written, and for those that it cannot tell apart their numbers."""
    numbers = [int(number) for number in re.findall(r"\d+", path.name)]
    return written_file(path).stat().st_mtime_ns, numbers


def refusal(path: Path, problem: str) -> ValueError:
    """The error for a checkpoint with a problem; it offers the newest sound one beside it."""
    others = (other for other in checkpoints_in(path.parent) if other != path)
    sound = next((other for other in others if checkpoint_problem(other) is None), None)
    advice = (
        f"there is no other sound checkpoint in {path.parent}"
        if sound is None
        else f"resume from {sound} instead"
    )
    return ValueError(f"checkpoint {path}: {problem}; {advice}")


def checkpoint_engines(path: Path) -> dict[str, Any]:
    """What the manifest of a checkpoint folder says of its engines.

    A checkpoint that was being replaced when the process was killed is put back first. The
    contents of the files are not read.

    Raises:
        FileNotFoundError: If there is no checkpoint at `path`.
        ValueError: If it is damaged or of another kind.
    """
    put_back(path)
    if not path.exists():
        raise FileNotFoundError(f"checkpoint {path}: does not exist")
    problem = folder_problem(path) if path.is_dir() else "not a folder"
    manifest = read_manifest(path) if problem is None else problem
    if isinstance(manifest, str):
        raise refusal(path, manifest)
    engines: dict[str, Any] = manifest["engines"]
    return engines
