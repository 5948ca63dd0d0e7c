"""The report of a GPU's first run, with parts that stand in for those that need one."""

from pathlib import Path

import pytest

from benchmarks.gpu.wheels import missing_packages
from benchmarks.gpu_report import PARTS, Part, write_report

ROOT = Path(__file__).resolve().parents[2]
STUBS = (
    Part("fails", ("-c", "print('before'); raise SystemExit(3)"), 30),
    Part("hangs", ("-c", "import time; print('started'); time.sleep(60)"), 0.5),
    Part("two", ("-c", "print('never')"), 30, gpus=2),
    Part("works", ("-c", "import os; print(os.environ['DS_ACCELERATOR'], 7 * 6)"), 30),
)


def test_every_part_is_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    path = tmp_path / "runs" / "report.md"
    results = write_report(STUBS, path, n_gpus=1)
    skipped = "skipped: needs 2 GPUs, there are 1"
    assert [r.outcome for r in results] == ["failed (3)", "over its limit", skipped, "ok"]
    report = path.read_text("utf-8")
    assert "before" in report
    assert "cuda 42" in report
    assert "\nnever\n" not in report
    assert "- torch 2." in report
    assert (path.parent / "report_fails.log").read_text("utf-8") == "before\n"


def test_parts_are_files_of_the_project_and_take_eight_minutes_a_call() -> None:
    words = [a for part in PARTS for a in part.arguments if a.endswith(".py") or "benchmarks." in a]
    files = [word if word.endswith(".py") else f"{word.replace('.', '/')}.py" for word in words]
    assert [file for file in files if not (ROOT / file).is_file()] == []
    for call in (1, 2):
        assert 0 < sum(p.limit for p in PARTS if (p.call, p.gpus) == (call, 1)) <= 480


def test_wheels_that_a_machine_lacks() -> None:
    here = {"trl": "1.12.0", "torch": "2.11.0", "docstring-parser": "0.18", "pydantic-core": "2"}
    there = "Docstring_Parser==0.17\npydantic @ file:///somewhere\n"
    assert missing_packages(here, there) == {"pydantic-core": "2", "trl": "1.12.0"}
