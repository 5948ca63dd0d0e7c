"""A rank that dies or stands still ends the run on the other, with real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.nodes import free_port
from tests.support.stages import write_data, write_models

ROOT = Path(__file__).resolve().parents[2]

DIED = ("Connection closed by peer", "Connection reset by peer")
TIMED_OUT = ("Timed out waiting", "Application timeout")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(write_data(tmp_path_factory.mktemp("dying")))


@pytest.mark.slow
@pytest.mark.timeout(180)  # half an hour is what a rank would wait by default
@pytest.mark.parametrize("end", ["dies", "stands still"])
@pytest.mark.parametrize("strategy", ["ddp", "deepspeed"])
def test_the_other_rank_ends_with_an_error(folder: Path, strategy: str, end: str) -> None:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "callbacks")])
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", **meeting, "PYTHONPATH": paths}
    command = [sys.executable, "-m", "tests.support.dying_run", str(folder), strategy, end]
    logs, ranks = [folder / f"{strategy} {end} {rank}.log" for rank in range(2)], []
    for rank, path in enumerate(logs):
        with path.open("wb") as log:
            rank_environment = {**environment, "LOCAL_RANK": str(rank)}
            output = {"stdout": log, "stderr": subprocess.STDOUT}
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=rank_environment, **output))
    try:
        ranks[0].wait()
    finally:
        for process in ranks:
            process.kill()  # also one that stands still
            process.wait()
    output = logs[0].read_text("utf-8")
    assert ranks[0].returncode == 1, output[-4000:]
    message = TIMED_OUT if end == "stands still" else DIED
    assert any(words in output for words in message), output[-4000:]
