"""The file that keeps the results of a benchmark, and the processes of its runs."""

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CalledProcessError

import pytest

from experiments.processes import Job, run_jobs
from experiments.results_file import compare_by_seed, read_run, read_runs, write_run


def test_run_is_added_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    assert read_runs(path) == {}
    assert read_run(path, "b") is None
    write_run(path, "b", {"gold": 0.1 + 0.2, "text": "\u2028"})
    write_run(path, "a", {"gold": None})
    write_run(path, "b", {"gold": 1 / 3})
    assert list(read_runs(path).items()) == [("a", {"gold": None}), ("b", {"gold": 1 / 3})]
    assert read_run(path, "b") == {"gold": 1 / 3}
    assert [file.name for file in path.parent.iterdir()] == ["results.jsonl"]


def test_writers_at_the_same_time_keep_each_others_runs(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    names = [f"seed_{number:02}" for number in range(20)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: write_run(path, name, {"name": name}), names))
    assert list(read_runs(path)) == names


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.2, 0.3, 0.11], "better"),
        ([0.2, 0.3, 0.05], "no difference shown"),
        ([-0.2, -0.3, -0.11], "worse"),
        ([0.2, -0.3, 0.2], "no difference shown"),
        ([0.2, 0.3, 1.1 - 1.0], "no difference shown"),  # 0.10000000000000009
        ([0.2, 0.3, math.nan], "not comparable"),
        ([0.2, 0.3], "open"),
    ],
)
def test_an_arm_differs_if_it_does_with_each_seed(differences: list[float], verdict: str) -> None:
    assert compare_by_seed(differences, 0.1, seeds=3) == verdict


def test_jobs_keep_their_output_and_a_failure_is_raised(tmp_path: Path) -> None:
    jobs = [Job(["platform"], tmp_path / "a" / "log.txt"), Job(["no_such_module"], tmp_path / "b")]
    with pytest.raises(CalledProcessError):
        run_jobs(jobs, parallel=2)
    assert (tmp_path / "a" / "log.txt").read_text("utf-8").strip()
    assert "no_such_module" in (tmp_path / "b").read_text("utf-8")
