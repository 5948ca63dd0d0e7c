"""The file that keeps the results of an experiment."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from experiments.results_file import read_run, read_runs, write_run


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
