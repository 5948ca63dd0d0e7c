"""Faults in single commands: a part of `make faults`, all of which is slow."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOME = (
    "fit_update_30_TERM_one",
    "fit_update_30_memory_one",
    "fit_place_2_KILL_one",
    "fit_write_2000_ENOSPC_one",
    "fit_rollout_20_STOP_one",
    "generate_forward_8_KILL_one",
)


def faults(folder: Path, *options: str) -> None:
    """Run cells; fail with the table if one is red."""
    quiet = {"JSONARGPARSE_DEPRECATION_WARNINGS": "off", "TOKENIZERS_PARALLELISM": "false"}
    environment = {**os.environ, **quiet, "PYTHONPATH": f"{ROOT}:{ROOT / 'callbacks'}"}
    command = [sys.executable, "-m", "tests.faults", "--folder", str(folder), *options]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.slow
def test_some_cells_of_the_matrix_are_green(tmp_path: Path) -> None:
    faults(tmp_path, "--lanes", "1", "--cells", *SOME)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_cells_of_the_matrix_are_green(tmp_path: Path) -> None:
    faults(tmp_path)
