"""What a benchmark of several seeds keeps while it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import five_seeds

RESULTS = Path(five_seeds.__file__).parent / "results/five_seeds.json"


def test_seeds_are_written_as_they_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {row["seed"]: row for row in json.loads(RESULTS.read_text("utf-8"))}

    def run_seed(root: Path, seed: int) -> dict[str, Any]:
        if seed == 3:
            raise RuntimeError("a seed that fails")
        return rows[seed]

    monkeypatch.setattr(five_seeds, "run_seed", run_seed)
    monkeypatch.setattr(five_seeds, "summarize_seed", lambda _, row: row)

    with pytest.raises(RuntimeError, match="a seed that fails"):
        five_seeds.five_seeds(str(tmp_path), seeds=(2, 3, 1), parallel=1)

    kept = json.loads((tmp_path / "five_seeds.json").read_text("utf-8"))
    assert [row["seed"] for row in kept] == [2, 1]
    assert "In 2 of 2 seeds" in (tmp_path / "five_seeds.md").read_text("utf-8")
    assert "2 of 3" in capsys.readouterr().err
