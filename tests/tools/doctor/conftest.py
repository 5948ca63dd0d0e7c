from pathlib import Path

import pytest

from tests.support.stages import write_data, write_models


@pytest.fixture
def own_root(tmp_path: Path) -> Path:
    """The same for a single test that breaks a folder, without manifests, as others save models."""
    (tmp_path / "own").mkdir()
    root = write_models(write_data(tmp_path / "own"))
    for manifest in root.rglob("lit_rlhf.json"):
        manifest.unlink()
    return root
