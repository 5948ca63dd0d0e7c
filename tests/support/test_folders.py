"""Tests see nothing of what runs have left in the tree."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def shared() -> Path:
    """The folder in which fixtures that tests share are made."""
    return Path.cwd()


def test_tests_and_shared_fixtures_run_outside_the_tree(shared: Path, tmp_path: Path) -> None:
    assert Path.cwd() == tmp_path
    assert not shared.is_relative_to(ROOT)
