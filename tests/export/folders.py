"""What the tests of exported folders share."""

import filecmp
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from safetensors.torch import load_file
from torch import Tensor

from tests.modules.saved_runs import SavedRun

Runs: TypeAlias = Callable[..., SavedRun]


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
