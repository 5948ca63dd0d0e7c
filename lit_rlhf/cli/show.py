"""`lit_rlhf show`: what models, checkpoints and evaluations were made from."""

from pathlib import Path
from typing import Any

import yaml

from lit_callbacks.files import read_json
from lit_rlhf.command import Command
from lit_rlhf.terminal import printable


def show(paths: list[str]) -> None:
    """Show what models, checkpoints or evaluations were made from, and whether they are whole.

    Args:
        paths: Folders of models and cached data, checkpoints, evaluations (.json), responses
            (.jsonl).
    """
    descriptions = {path: describe(Path(path)) for path in paths}
    text = yaml.safe_dump(descriptions, sort_keys=False, allow_unicode=True, width=100)
    print(printable(text), end="")


def describe(path: Path) -> dict[str, Any]:
    """Read the manifest of an artefact as plain data."""
    if not (path.is_file() or path.is_dir()):  # reading a pipe may not end
        raise ValueError(f"paths: expected a model, checkpoint or evaluation, got no file {path}")
    from lit_rlhf.files import lock_path, manifest_path
    from lit_rlhf.strategies import is_checkpoint_folder

    if path.suffix == ".ckpt" or is_checkpoint_folder(path):
        return describe_checkpoint(path)
    if manifest_path(path).exists():
        return {"finished": not lock_path(path).exists(), **describe_manifest(path)}
    if path.suffix == ".json":
        try:
            report = read_json(path, dict)
            origin = {name: report[name] for name in ("inputs", "versions")}
            return {"settings": report.get("settings", {}), **origin}
        except (ValueError, KeyError, TypeError) as error:
            expected = "paths: expected the JSON file of an evaluation"
            raise ValueError(f"{expected}, got {path}") from error
    raise ValueError(
        f"paths: expected what lit_rlhf has written, got {path} without {manifest_path(path)}"
    )


def describe_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a folder or file, with the files that have changed since."""
    from lit_rlhf.files import hash_files, listed_files, read_manifest

    listed = listed_files(path, strict=True)
    hashes = hash_files(path)
    changed = [name for name in {**listed, **hashes} if listed.get(name) != hashes.get(name)]
    manifest = read_manifest(path)
    origin = {name: value for name, value in manifest.get("made", {}).items() if value}
    return {
        **origin,
        "versions": manifest.get("versions", {}),
        "files": f"{len(listed)}, as they were saved" if not changed else {"changed": changed},
    }


def describe_checkpoint(path: Path) -> dict[str, Any]:
    """Description of a checkpoint: its run, and whether it is damaged."""
    from lit_rlhf.modules import SETTINGS_KEY, VERSIONS_KEY, plain_values
    from lit_rlhf.strategies import checkpoint_problem, read_lightning_state

    content = read_lightning_state(path)
    options = plain_values(content.get("hyper_parameters", {}))
    return {
        "problem": checkpoint_problem(path) or "none",
        "made_by": options.get("_class_path", "a script"),
        "epoch": content.get("epoch"),
        "updates": content.get("global_step"),
        "versions": content.get(VERSIONS_KEY, {}),
        "inputs": plain_values(content.get(SETTINGS_KEY, {})),
        "settings": {name: v for name, v in options.items() if not name.startswith("_")},
    }


COMMAND = Command(show, words=("paths",))
