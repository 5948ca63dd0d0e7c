import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lit_rlhf import cores
from lit_rlhf.cli.main import main
from lit_rlhf.cores import OWN_CHOICES, SpinLimit, share_cores, waiting_seconds


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in OWN_CHOICES:
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


SPINNING = """
import time, torch
from lit_rlhf.cores import SpinLimit

torch.set_num_threads(2)
limit, tensor = SpinLimit(), torch.ones(2**20)
for on in (False, True) * 2:
    limit.set(on)
    before = time.process_time()
    for _ in range(10):
        tensor.add(1)
        time.sleep(0.01)  # the other thread waits for work meanwhile
    print(time.process_time() - before)
"""


def test_threads_spin_less_while_the_limit_is_on() -> None:
    # Fails where libgomp no longer spins briefly with more threads than processors.
    free = {k: v for k, v in os.environ.items() if k not in (*OWN_CHOICES, "OMP_NUM_THREADS")}
    environment = {**free, "PYTHONPATH": str(Path(cores.__file__).parents[1])}
    command = [sys.executable, "-c", SPINNING]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    seconds = [float(line) for line in run.stdout.split()]  # of the processors, not of the wall
    assert max(seconds[1::2]) < 0.5 * min(seconds[::2])


@pytest.mark.usefixtures("two_threads")
def test_limit_follows(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Ended(Exception): ...

    clock = iter([*range(6)])
    # 1 s of clock each: idle, waits 0.3 s, idle, waits 0.3 s, and then the test ends the watch
    waited = iter([0.0, 0.1, 0.4, 0.5, 0.8])
    monkeypatch.setattr(cores, "waiting_seconds", lambda: next(waited))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(cores, "TOLD_AFTER", 1)
    states, limit = [], SpinLimit()

    def pause(_: float) -> None:
        states.append(limit.is_on)
        if len(states) == 5:
            raise Ended

    monkeypatch.setattr(time, "sleep", pause)
    with caplog.at_level(logging.WARNING), pytest.raises(Ended):
        cores._watch(limit)
    limit.set(False)

    assert states == [False, False, True, False, True]
    told = "other processes use the cores: threads that wait sleep at once"
    assert [record.message for record in caplog.records] == [told]


def test_waiting_is_what_scheduler_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"1": "7 1500000000 3", "2": "9 500000000 4"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text(f"{text}\n")
    (tmp_path / "3").mkdir()  # of a thread that has ended
    monkeypatch.setattr(cores, "_TASKS", tmp_path)
    assert waiting_seconds() == 2.0


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("own", [*OWN_CHOICES, "one thread", "no libgomp", "nothing"])
def test_watch_leaves_what_the_user_has_chosen(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(cores, "_watch", started.append)
    if own == "one thread":
        torch.set_num_threads(1)
    elif own == "no libgomp":
        monkeypatch.setattr(cores.ctypes, "CDLL", lambda _: object())
    elif own != "nothing":
        monkeypatch.setenv(own, "1")
    share_cores()
    assert len(started) == (own == "nothing")


def test_each_command_shares_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = []
    monkeypatch.setattr(cores, "share_cores", lambda: shared.append(True))
    main(["configs", "list"])
    assert shared == [True]
