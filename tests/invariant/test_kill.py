"""A run that is killed at any moment and resumed ends bit by bit as if nothing had happened."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.invariant.kill_runs import MOMENTS

ROOT = Path(__file__).resolve().parents[2]


class Runs:
    """The runs of a scenario: what was seen of them, and the folders with what they left."""

    def __init__(self, folder: Path, scenario: str) -> None:
        quiet = {"JSONARGPARSE_DEPRECATION_WARNINGS": "off", "TOKENIZERS_PARALLELISM": "false"}
        environment = {**os.environ, **quiet, "PYTHONPATH": ".:callbacks"}
        command = [sys.executable, "-m", "tests.invariant.kill_runs", str(folder), scenario]
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        self.folder = folder
        self.seen: dict[str, dict[str, Any]] = json.loads((folder / "results.json").read_text())

    def of(self, word: str) -> dict[str, dict[str, Any]]:
        return {name: seen for name, seen in self.seen.items() if word in name}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("kill"), "ten")


def differences(actual: Any, expected: Any, where: str = "") -> list[str]:
    """Places in two nested structures of plain values and tensors that are not equal to the bit."""
    if type(actual) is not type(expected):
        return [where]
    if isinstance(expected, dict):
        if actual.keys() != expected.keys():
            return [f"{where}: {actual.keys() ^ expected.keys()}"]
        items = [(actual[key], value, f"{where}/{key}") for key, value in expected.items()]
    elif isinstance(expected, list | tuple):
        if len(actual) != len(expected):
            return [where]
        items = [(a, e, f"{where}/{n}") for n, (a, e) in enumerate(zip(actual, expected))]  # noqa: B905
    else:
        same = torch.equal if isinstance(expected, torch.Tensor) else lambda a, b: bool(a == b)
        return [] if same(actual, expected) else [where]
    return [place for item in items for place in differences(*item)]


def check_end(folder: Path, run: str) -> None:
    """A run has ended as the uninterrupted one: all that its last checkpoint and model hold."""
    paths = (folder / name / "checkpoints/batch=6.ckpt" for name in ("whole", run))
    whole, resumed = (torch.load(path, weights_only=True) for path in paths)
    for name, content in (("whole", whole), (run, resumed)):
        assert content.pop("run") == str((folder / name / "model").resolve())
    assert differences(resumed, whole) == []
    assert {"state_dict", "optimizer_states", "lr_schedulers", "random_state"} <= whole.keys()
    left = sorted(path.name for path in (folder / run / "checkpoints").iterdir())
    assert left == ["batch=5.ckpt", "batch=6.ckpt"]
    for file in ("model.safetensors", "critic/model.safetensors"):
        expected = (folder / "whole/model" / file).read_bytes()
        assert (folder / run / "model" / file).read_bytes() == expected


def test_differences_are_found() -> None:
    one = {"a": [torch.ones(2), (1, None)], "b": 0.5}
    assert differences(one, {"a": [torch.ones(2), (1, None)], "b": 0.5}) == []
    other = {"a": [torch.ones(2) + 1e-7, (1, 2)], "b": 0.25}
    assert differences(one, other) == ["/a/0", "/a/1/1", "/b"]
    assert differences(one, {"a": [], "b": 0.5}) == ["/a"]
    assert differences(one, {"b": 0.5}) == [": {'a'}"]


@pytest.mark.slow
def test_runs_are_killed_in_rollout_update_and_saving(runs: Runs) -> None:
    kills = runs.of("kill")
    kinds = [seen["kind"] for seen in kills.values()]
    assert {kind: kinds.count(kind) for kind in MOMENTS} == MOMENTS
    assert [seen["statuses"] for seen in kills.values()] == len(kills) * [[-9]]
    writing = [seen["left"] for seen in kills.values() if seen["kind"] == "write"]
    assert all(any(name.endswith(".partial") for name in left) for left in writing)
    # they stood at different places of the run
    assert len({tuple(seen["left"]) for seen in kills.values()}) > 5


@pytest.mark.slow
def test_every_killed_run_resumes_and_ends_bit_by_bit_as_the_whole_one(runs: Runs) -> None:
    for name, seen in runs.of("kill").items():
        assert seen["resumed"] == 0, (runs.folder / name / "resumed.log").read_text()
        check_end(runs.folder, name)


@pytest.mark.slow
def test_sigterm_saves_and_the_run_resumes_as_if_nothing_had_happened(runs: Runs) -> None:
    terminated = runs.of("term")
    assert len(terminated) == 2
    for name, seen in terminated.items():
        assert seen["statuses"] == [143]
        newest = max(seen["left"], key=lambda name: int(name[len("batch=") : -len(".ckpt")]))
        log = (runs.folder / name / "resumed.log").read_text()
        assert f"Restoring states from the checkpoint path at checkpoints/{newest}" in log
        assert seen["resumed"] == 0, log
        check_end(runs.folder, name)


@pytest.mark.slow
def test_runs_killed_at_many_moments_and_again_and_again(tmp_path: Path) -> None:
    runs = Runs(tmp_path, "many")
    assert len(runs.seen) == 3 * (sum(MOMENTS.values()) + 2) + 3
    for name, seen in runs.seen.items():
        expected = {"kill": [-9], "term": [143], "again": 5 * [-9]}
        assert seen["statuses"] == expected[next(word for word in expected if word in name)]
        assert seen["resumed"] == 0, (tmp_path / name / "resumed.log").read_text()
        check_end(tmp_path, name)
