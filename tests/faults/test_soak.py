"""The soak and the fuzzer: what they draw and what they notice; whole runs are slow."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.fuzz import Fuzzer, change_bytes, change_json
from tests.faults.soak import plan_interruptions

ROOT = Path(__file__).resolve().parents[2]


def test_interruptions_of_a_seed_are_the_same_in_the_order_of_iterations() -> None:
    plan = plan_interruptions(seed=3, iterations=300, resumes=60)
    assert plan == plan_interruptions(seed=3, iterations=300, resumes=60)
    assert plan != plan_interruptions(seed=4, iterations=300, resumes=60)
    targets = [interruption.iteration for interruption in plan if interruption.iteration]
    assert targets == sorted(targets)
    assert len(plan) == 60
    assert 30 < len(targets) < 60
    assert {interruption.signal for interruption in plan} == {"KILL", "TERM"}


def test_changed_content_of_a_seed_is_the_same_and_mostly_differs_from_the_content() -> None:
    content = b'{"a": [1, 2, {"b": "c"}]}'
    for change in (change_bytes, change_json):
        changed = [change(content, random.Random(number)) for number in range(50)]
        assert changed == [change(content, random.Random(number)) for number in range(50)]
        assert len(set(changed) - {content}) > 25


def write_case(folder: Path, log: str) -> Fuzzer:
    """A fuzzer with a case whose process has said `log`."""
    for name in ("root", "case/temporary"):
        (folder / name).mkdir(parents=True)
    (folder / "case/log").write_text(log)
    fuzzer = Fuzzer.__new__(Fuzzer)  # without the models that it would make
    fuzzer.folder, fuzzer.before = folder, {}
    return fuzzer


@pytest.mark.parametrize(
    ("log", "status", "wrong"),
    [
        ("lit_rlhf fit: error: no", 2, ""),
        ("fine", 0, ""),
        ("Traceback (most recent call last):\nKeyError: 1", 1, "a traceback: KeyError: 1"),
        ("", 1, "status 1 without a word"),
        ("said", -11, "status -11: said"),
        ("a \x1b[2J", 1, "a raw control character"),
    ],
)
def test_fuzzer_names_what_is_wrong_with_a_case(
    tmp_path: Path, log: str, status: int, wrong: str
) -> None:
    fuzzer = write_case(tmp_path, log)
    assert fuzzer.find_wrong(tmp_path / "case", before={}, status=status) == wrong


def test_fuzzer_notices_what_a_case_has_left_or_changed(tmp_path: Path) -> None:
    fuzzer = write_case(tmp_path, "error")
    folder = tmp_path / "case"
    assert fuzzer.find_wrong(folder, before={"input/a": 1}, status=1) == "changed ['input/a']"
    (folder / ".a.partial").touch()
    assert "left behind" in fuzzer.find_wrong(folder, before={}, status=1)
    (folder / ".a.partial").rename(folder / "temporary/a")
    assert "temporary files" in fuzzer.find_wrong(folder, before={}, status=1)
    (folder / "temporary/a").rename(tmp_path / "root/a")
    assert fuzzer.find_wrong(folder, before={}, status=1) == "changed root/"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [("soak", "--iterations", "20", "--resumes", "6"), ("fuzz", "--seconds", "30")],
    ids=["soak", "fuzz"],
)
def test_short_soak_and_fuzzing_are_green(tmp_path: Path, options: tuple[str, ...]) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'callbacks'}"}
    command = [sys.executable, "-m", "tests.faults", *options, "--folder", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
