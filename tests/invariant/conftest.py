from pathlib import Path

import pytest

from tests.modules.stages import write_data, write_models


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with tiny models and data files; read only."""
    return write_models(write_data(tmp_path_factory.mktemp("stages")))
