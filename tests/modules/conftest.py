from pathlib import Path

import pytest

from tests.modules.stages import write_data, write_models


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with tiny models and data files; read only."""
    return write_models(write_data(tmp_path_factory.mktemp("stages")))


@pytest.fixture(scope="session")
def pad_is_eos_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, with a tokenizer that pads with EOS; read only."""
    folder = write_data(tmp_path_factory.mktemp("pad_is_eos"))
    return write_models(folder, pad_is_eos=True)
