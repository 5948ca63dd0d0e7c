"""Runs of all stages whose checkpoints are exported, for `tests/export` and `tests/cli`."""

from pathlib import Path

import pytest

from tests.export.folders import Runs
from tests.modules.saved_runs import SavedRun, saved_run


@pytest.fixture(scope="session")
def runs(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A run of a stage with full weights or adapters; each is made once."""
    made: dict[tuple[str, bool], SavedRun] = {}

    def of(stage: str, lora: bool = False) -> SavedRun:
        if (stage, lora) not in made:
            options = {"network": {"lora_rank": 2}} if lora else {}
            folder = tmp_path_factory.mktemp(stage)
            made[stage, lora] = saved_run(stage, root, folder, **options)
        return made[stage, lora]

    return of
