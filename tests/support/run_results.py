"""What a run has left, in a form that can be compared with another run."""

from pathlib import Path
from typing import Any

from lit_callbacks import read_run

Scalars = dict[str, list[tuple[int, str]]]
"""Points of step and value by key of a run's events."""


def files_of(folder: Path) -> dict[str, Any]:
    """All files of a model: weights, tokenizer, contract, card and manifest."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def logged(folder: Path) -> dict[str, Any]:
    """Scalars of a run's events that do not measure time or memory, and its samples."""
    curves = read_run("run", folder).curves
    measured = ("time/", "memory/", "throughput/")
    scalars: Scalars = {
        key: [(point.step, repr(point.value)) for point in curve.points]
        for key, curve in curves.items()
        if not key.startswith(measured)
    }
    samples = folder / "samples.jsonl"
    return {"scalars": scalars, "samples": samples.read_bytes() if samples.exists() else b""}
