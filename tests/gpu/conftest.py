from pathlib import Path

import pytest

from tests.configs.tiny_runs import world_root
from tests.modules.stages import write_data, write_models


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with tiny models and data files; read only."""
    return write_models(write_data(tmp_path_factory.mktemp("stages")))


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the lab's world, an SFT model and a reward model; read only."""
    return world_root(tmp_path_factory.getbasetemp())
