from pathlib import Path

import pytest

from tests.modules.stages import write_data, write_models


@pytest.fixture
def own_root(tmp_path: Path) -> Path:
    """The same for a single test that breaks a folder."""
    return write_models(write_data(_made(tmp_path / "own")))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
