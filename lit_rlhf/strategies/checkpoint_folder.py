"""Checkpoints that are folders: complete under their name, or not there at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_rlhf.strategies.placement import checksum, partial_path, put_in_place, sync

MANIFEST = "manifest.json"
FORMAT = "lit_rlhf.multi_engine/2"


def publish(path: Path, engines: dict[str, Any], checksums: Mapping[str, int]) -> None:
    """Describe the files of the partial folder in a manifest and move it to `path`.

    Args:
        path: The checkpoint's name; one that is there is replaced.
        engines: What the manifest says of each engine.
        checksums: CRC-32 by name of the files that are on disk for certain; the others are synced
            and read here.
    """
    partial = partial_path(path)
    files = {}
    for file in sorted(partial.rglob("*")):
        name = str(file.relative_to(partial))
        if name not in checksums:
            sync(file)
        if file.is_file():
            crc = checksums[name] if name in checksums else checksum(file)
            files[name] = {"bytes": file.stat().st_size, "crc32": crc}
    manifest = {"format": FORMAT, "files": files, "engines": engines}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    sync(partial / MANIFEST)
    sync(partial)
    put_in_place(path)


def read_manifest(path: Path) -> dict[str, Any] | str:
    """The manifest of a checkpoint folder, or what is wrong with it."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"has no {MANIFEST}: not a checkpoint of the multi-engine strategy"
    except (UnicodeDecodeError, json.JSONDecodeError):
        return f"{MANIFEST} is damaged"
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        return f"{MANIFEST} is not of format {FORMAT}"
    return manifest


def folder_problem(path: Path) -> str | None:
    """What is wrong with a checkpoint folder, by the names and sizes of its files."""
    manifest = read_manifest(path)
    if isinstance(manifest, str):
        return manifest
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != expected["bytes"]:
            size = file.stat().st_size
            return f"{name} is damaged: expected {expected['bytes']} bytes, got {size}"
    return None


def contents_problem(path: Path, share: int = 0, shares: int = 1) -> str | None:
    """What is wrong in the files of a checkpoint folder without a `folder_problem`.

    Args:
        path: The checkpoint.
        share: Which of the shares to read, from 0.
        shares: Number of shares that the files are divided into, for instance among ranks.
    """
    manifest = read_manifest(path)
    if isinstance(manifest, str):
        return manifest
    for name in sorted(manifest["files"])[share::shares]:
        if checksum(path / name) != manifest["files"][name]["crc32"]:
            return f"{name} is damaged: its checksum differs"
    return None
