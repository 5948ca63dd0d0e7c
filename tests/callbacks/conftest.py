"""Runs on disk that tests of the reader and of the report share."""

from pathlib import Path

import pytest

from tests.callbacks.reports import calm_run, watched_run


@pytest.fixture
def watched(tmp_path: Path) -> str:
    return watched_run(tmp_path / "watched")


@pytest.fixture
def calm(tmp_path: Path) -> str:
    return calm_run(tmp_path / "calm")
