"""What the tests of exported folders share."""

import filecmp
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.support.saved_runs import SavedRun, saved_run

Runs: TypeAlias = Callable[..., SavedRun]


@pytest.fixture(scope="session")
def runs(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A run of a stage with full weights or adapters; each is made once."""
    made: dict[tuple[str, bool], SavedRun] = {}

    def of(stage: str, lora: bool = False) -> SavedRun:
        if (stage, lora) not in made:
            options = {"network": {"lora_rank": 2}} if lora else {}
            folder = tmp_path_factory.mktemp(stage)
            made[stage, lora] = saved_run(stage, root, folder, **options)
        return made[stage, lora]

    return of


def weights(folder: Path) -> dict[str, Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def assert_same_model(actual: Path, expected: Path) -> None:
    """The same files with the same content.

    Cards differ in what they say of metrics, and so does their checksum in the list of files.
    """
    names = {path.name for path in expected.iterdir() if path.is_file()}
    assert {path.name for path in actual.iterdir()} == names
    compared = names - {"README.md", "lit_rlhf.json"}
    same = [*filecmp.cmpfiles(actual, expected, compared, shallow=False)]
    assert same[1:] == [[], []]
