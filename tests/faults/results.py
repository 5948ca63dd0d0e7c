"""What a command has left, in a form that can be compared with an undisturbed run."""

import json
from pathlib import Path
from typing import Any

import torch

from tests.support.run_results import files_of, logged


def contents(folder: Path) -> dict[str, int]:
    """Sizes and times of all files, which tell whether anything was changed."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in files}


def results(command: str, folder: Path) -> dict[str, Any]:
    """What a command has made, apart from times of writing."""
    if command in ("fit", "rollback", "dated"):
        return results_of_fit(folder, last_batch=6)
    files = files_of(folder / "out")
    for path in folder.glob("*out.jsonl*"):
        files[path.name] = path.read_bytes()
    if (folder / "out.json").exists():
        files["report"] = json.loads((folder / "out.json").read_text(), object_hook=without_cost)
    return files


def results_of_fit(folder: Path, last_batch: int) -> dict[str, Any]:
    """The model, the names of the checkpoints, the state in the newest one, and the logs.

    Args:
        folder: The folder of the run.
        last_batch: Number of the run's last batch, which the newest checkpoint has in its name.
    """
    newest = folder / f"checkpoints/batch={last_batch}.ckpt"
    files = files_of(folder / "model")
    files["checkpoints"] = sorted(path.name for path in newest.parent.iterdir())
    files |= logged(folder / "logs/run")
    if newest.is_file():  # DeepSpeed's are folders
        saved = torch.load(newest, weights_only=True)
        parts = ("state_dict", "optimizer_states", "lr_schedulers", "random_state")
        files |= {name: plain(saved[name]) for name in parts}
    return files


def without_cost(report: dict[str, Any]) -> dict[str, Any]:
    """A part of a report without requests and tokens, of which a second run needs fewer."""
    cost = ("from_cache", "requests", "prompt_tokens", "completion_tokens")
    return {key: value for key, value in report.items() if key not in cost}


def plain(value: object) -> object:
    """Nested values with lists in place of tensors, which `==` compares."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
