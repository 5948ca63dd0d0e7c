from pathlib import Path

import pytest

from tests.support.stages import write_data, write_models


@pytest.fixture
def own_root(tmp_path: Path) -> Path:
    """The same for a single test that breaks a folder."""
    (tmp_path / "own").mkdir()
    return write_models(write_data(tmp_path / "own"))
