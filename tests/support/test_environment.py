"""Tests write outside the tree and outside the user's cache."""

import os
import tempfile
from pathlib import Path

import datasets
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def shared() -> Path:
    """The folder in which fixtures that tests share are made."""
    return Path.cwd()


def test_tests_and_shared_fixtures_run_outside_the_tree(shared: Path, tmp_path: Path) -> None:
    assert Path.cwd() == tmp_path
    assert not shared.is_relative_to(ROOT)


def test_datasets_writes_into_a_folder_that_goes_with_the_tests() -> None:
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    assert cache == Path(os.environ["HF_DATASETS_CACHE"])
    assert cache.parent == Path(tempfile.gettempdir())
