"""Tests rely on processes that raise, and folders outside the tree and the user's cache."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import datasets
import pytest
from torch.multiprocessing.spawn import ProcessRaisedException

from tests.support.ranks import run_on_ranks

ROOT = Path(__file__).resolve().parents[2]


def fails(rank: int, reason: str) -> None:
    raise RuntimeError(f"{reason} on rank {rank}")


def test_exception_on_a_rank_is_raised(tmp_path: Path) -> None:
    with pytest.raises(ProcessRaisedException, match="RuntimeError: no more paper on rank 0"):
        run_on_ranks(fails, 1, tmp_path, "no more paper")


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
