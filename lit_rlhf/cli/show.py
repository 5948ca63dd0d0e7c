"""`lit_rlhf show`: what models, checkpoints and evaluations were made from."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lit_rlhf.command import Command

PATHS_HELP = (
    "Folders of models and cached data, checkpoints, evaluations (.json), responses (.jsonl)."
)
_OF_RESPONSES = ("model", "policy", "seed", "settings")


def show(paths: list[str]) -> None:
    """Show what models, checkpoints or evaluations were made from, and whether they are whole.

    Args:
        paths: Folders of models and cached data, checkpoints, evaluations and files of responses.
    """
    found = {path: describe(Path(path)) for path in paths}
    print(yaml.safe_dump(found, sort_keys=False, allow_unicode=True, width=100), end="")


def describe(path: Path) -> dict[str, Any]:
    """Read the manifest of an artefact as plain data."""
    from lit_rlhf.files import MANIFEST, lock_path
    from lit_rlhf.strategies import is_checkpoint_folder

    if not path.exists():
        raise ValueError(f"paths: expected a model, checkpoint or evaluation, got no file {path}")
    if path.suffix == ".json":
        return describe_evaluation(path)
    if path.suffix == ".jsonl":
        return describe_responses(path)
    if path.is_file() or is_checkpoint_folder(path):
        return describe_checkpoint(path)
    if not (path / MANIFEST).exists():
        raise ValueError(
            f"paths: expected a folder that lit_rlhf has written, got {path} without {MANIFEST}"
        )
    return {"finished": not lock_path(path).exists(), **describe_folder(path)}


def describe_folder(folder: Path) -> dict[str, Any]:
    """The manifest of a model's folder, with the files that have changed since."""
    from lit_rlhf.files import hash_files, listed_files, read_manifest

    listed, found = listed_files(folder), hash_files(folder)
    changed = [name for name in {**listed, **found} if listed.get(name) != found.get(name)]
    manifest = read_manifest(folder)
    made = {name: value for name, value in manifest.get("made", {}).items() if value}
    return {
        **made,
        "versions": manifest.get("versions", {}),
        "files": f"{len(listed)}, as they were saved" if not changed else {"changed": changed},
    }


def describe_checkpoint(path: Path) -> dict[str, Any]:
    """Description of a checkpoint: its run, and whether it is damaged."""
    from lit_rlhf.modules import SETTINGS_KEY, VERSION_KEY
    from lit_rlhf.strategies import checkpoint_problem, read_lightning_state

    content = read_lightning_state(path)
    options = plain(content.get("hyper_parameters", {}))
    return {
        "problem": checkpoint_problem(path) or "none",
        "made_by": options.get("_class_path", "a script"),
        "epoch": content.get("epoch"),
        "updates": content.get("global_step"),
        "lit_rlhf": content.get(VERSION_KEY, "0.1.0 or older"),
        "inputs": plain(content.get(SETTINGS_KEY, {})),
        "settings": {name: v for name, v in options.items() if not name.startswith("_")},
    }


def describe_evaluation(path: Path) -> dict[str, Any]:
    """Settings, inputs and versions of an evaluation."""
    try:
        report = json.loads(path.read_text("utf-8"))
        return {name: report[name] for name in ("settings", "inputs", "versions")}
    except (ValueError, KeyError, TypeError) as error:
        expected = "paths: expected the JSON file of an evaluation with responses"
        raise ValueError(f"{expected}, got {path}") from error


def describe_responses(path: Path) -> dict[str, Any]:
    """Whose responses a file has, and how they were sampled, as far as the file says so."""
    try:
        records = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        told = [{key: r[key] for key in _OF_RESPONSES if key in r} for r in records]
        different = list({json.dumps(t): t for t in told}.values())
        return {"responses": sum("response" in r for r in records), "of": different}
    except (ValueError, TypeError) as error:
        raise ValueError(f"paths: expected a file of responses, got {path}: {error}") from error


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as YAML has them."""
    result: dict[str, Any] = json.loads(json.dumps(dict(values), default=str))
    return result


COMMAND = Command(show, words={"paths": PATHS_HELP})
