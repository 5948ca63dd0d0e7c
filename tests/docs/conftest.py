from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.docs_workspace import make_workspace, standing_in


@pytest.fixture(scope="module")
def workspace(quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A workspace that the tests of a module share; it is the current folder."""
    folder = make_workspace(tmp_path_factory.mktemp("docs") / "workspace", quickstart)
    with standing_in(folder):
        yield folder


@pytest.fixture
def fresh_workspace(quickstart: Path, tmp_path: Path) -> Iterator[Path]:
    """A workspace for one test that writes to it; it is the current folder."""
    folder = make_workspace(tmp_path / "workspace", quickstart)
    with standing_in(folder):
        yield folder
