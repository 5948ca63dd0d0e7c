"""Manifests: what a folder or file was made from, by which code, and the hashes of its files.

A folder's is the file `lit_rlhf.json` in it, a file's the hidden `.NAME.lit_rlhf.json` beside it.
A model's card is rendered from its manifest, so that it cannot say what did not happen.
"""

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any

from lit_callbacks.files import LARGEST_TEXT, check_file, parse_json, write_text

MANIFEST = "lit_rlhf.json"
PACKAGES = ("lit-rlhf", "torch", "lightning", "transformers", "peft")
GIT_TIMEOUT = 5.0  # seconds
_HASHED = (".safetensors", ".json", ".jinja", ".model", ".txt")  # suffixes of a model's files


@cache
def code_versions() -> dict[str, str]:
    """Versions of Python and of the packages that numbers depend on, and the commit, if known."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    root = Path(__file__).resolve().parents[2]
    if (root / ".git").exists():
        git = ("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40")
        with suppress(OSError, subprocess.SubprocessError):
            output = subprocess.check_output(git, stderr=subprocess.DEVNULL, timeout=GIT_TIMEOUT)
            versions["commit"] = output.decode().strip()
    return versions


def manifest_path(path: str | Path) -> Path:
    """Where the manifest of a folder or file is; a file's is hidden from readers of its folder."""
    path = Path(path)
    return path.with_name(f".{path.name}.{MANIFEST}") if path.is_file() else path / MANIFEST


def read_manifest(path: str | Path, strict: bool = False) -> dict[str, Any]:
    """Read the manifest of a folder or file; empty if there is none, or one of another program.

    With `strict`, a manifest that is not JSON is a ValueError: its files are to be compared.
    """
    file = manifest_path(path)
    try:
        check_file(file, LARGEST_TEXT)
        manifest = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        if strict and not isinstance(error, OSError):
            message = (
                f"path: expected JSON in {file}, got a damaged file; delete it to go on without"
            )
            raise ValueError(message) from error
        return {}
    items = manifest.items() if isinstance(manifest, dict) else ()
    groups = ("made", "versions", "files")
    return {k: v for k, v in items if k not in groups or isinstance(v, dict)}


def write_manifest(path: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest of a folder or file, with the hashes of the files that are there."""
    manifest = {**read_manifest(path), **content, "files": hash_files(path)}
    write_text(manifest_path(path), json.dumps(manifest, indent=1, default=str))


def listed_files(path: Path, strict: bool = False) -> dict[str, list[Any]]:
    """Size and SHA-256 by name of the files that the manifest of `path` lists.

    `strict` refuses a damaged manifest, see `read_manifest`.
    """
    listed = read_manifest(path, strict).get("files", {}).items()
    return {name: entry for name, entry in listed if isinstance(entry, list)}


def hash_files(folder: Path) -> dict[str, list[Any]]:
    """Size and SHA-256 by name, of a file or of all files in a folder but its manifest.

    What is neither a file nor a folder, such as a broken link, gets an empty list.
    """
    if folder.is_file():
        return {folder.name: _size_and_hash(folder)}
    names = sorted(_list_files(folder), key=PurePosixPath)
    return {name: _hash_entry(folder / name) for name in names}


def find_changed_files(folder: Path) -> Iterator[str]:
    """Names of the files in a folder that its manifest does not list as they are.

    They come one by one, so that a caller need not walk through all of a large folder, and no file
    is read that is not listed.

    Args:
        folder: The folder.
    """
    listed = listed_files(folder)
    for name in _list_files(folder):
        if name not in listed or listed[name] != _hash_entry(folder / name):
            yield name


def _list_files(folder: Path) -> Iterator[str]:
    """Names of all files and links in a folder but its manifest, in the order of their folders."""
    for place, folders, files in os.walk(folder):
        folders.sort()
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        for file in sorted(files + links):
            name = (Path(place) / file).relative_to(folder).as_posix()
            if name != MANIFEST:
                yield name


def _hash_entry(path: Path) -> list[Any]:
    """Size and SHA-256 of a file; nothing for a pipe, a broken link and the like."""
    return _size_and_hash(path) if path.is_file() else []


def hash_model(folder: str | Path) -> str | None:
    """SHA-256 over a model's weights, configurations, tokenizer and template, but not its card.

    Returns:
        The hash; `None` without a folder with safetensors files, for instance for a hub id.
    """
    if not any(Path(folder).glob("*.safetensors")):
        return None
    files = (f for f in sorted(Path(folder).iterdir()) if f.suffix in _HASHED and f.is_file())
    hashes = [f"{f.name} {_size_and_hash(f)[1]}" for f in files if f.name != MANIFEST]
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def check_model_files(folder: Path) -> None:
    """Compare the files that `hash_model` covers with a folder's manifest, if it has one.

    The same weights under another configuration or tokenizer are another model. The card may be
    edited.

    Raises:
        ValueError: If a file is damaged, is gone or was replaced.
    """
    for name, expected in listed_files(folder, strict=True).items():
        if "/" not in name and name.endswith(_HASHED):
            _check_file(folder / name, expected, "path", "files", folder)


def check_responses(path: Path) -> dict[str, Any]:
    """Compare a file of responses with its manifest, if it has one.

    Returns:
        What they were made from, and their size and hash.

    Raises:
        ValueError: If the file is damaged or was changed.
    """
    for expected in listed_files(path, strict=True).values():
        _check_file(path, expected, "policies", "responses", path)
    return {**read_manifest(path).get("made", {}), "file": _size_and_hash(path)}


def _check_file(
    file: Path, expected: object, argument: str, content: str, listed_path: Path
) -> None:
    entry = _size_and_hash(file) if file.is_file() else None
    if entry != expected:
        raise ValueError(
            f"{argument}: expected the {content} that {manifest_path(listed_path)} lists, got "
            f"another {file}: it is damaged or was replaced. To keep these {content}, delete the "
            "list"
        )


def _size_and_hash(path: Path) -> list[Any]:
    status = path.stat()
    return [status.st_size, _hash_file(path.resolve(), status.st_size, status.st_mtime_ns)]


@cache
def _hash_file(path: Path, size: int, changed: int) -> str:
    """SHA-256 of a file. A model is loaded for several networks, but read for its hash once."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
