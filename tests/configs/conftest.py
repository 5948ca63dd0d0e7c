from pathlib import Path

import pytest

from tests.configs.tiny_runs import full_root, world_root


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with world, SFT model and reward model; read only."""
    return world_root(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with all models of a quickstart; read only."""
    return full_root(tmp_path_factory.getbasetemp())
