"""The report of a GPU's first run, with parts that stand in for those that need one."""

from pathlib import Path

import pytest

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
    assert results[1].seconds < 10


def test_parts_are_files_of_the_project_and_take_ten_minutes_on_one_gpu() -> None:
    files = [a for part in PARTS for a in part.arguments if a.endswith(".py")]
    modules = [a for part in PARTS for a in part.arguments if a.startswith("benchmarks.")]
    files += [f"{module.replace('.', '/')}.py" for module in modules]
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert sum(part.limit for part in PARTS if part.gpus == 1) <= 600
