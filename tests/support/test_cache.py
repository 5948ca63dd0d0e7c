"""Tests leave the user's cache of data sets alone."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import datasets


def test_datasets_writes_into_a_folder_that_goes_with_the_tests() -> None:
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    assert cache == Path(os.environ["HF_DATASETS_CACHE"])
    assert cache.parent == Path(tempfile.gettempdir())
