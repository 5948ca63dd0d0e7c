"""What the benchmark on HH-RLHF files keeps while it runs."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import hh_cpu


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for file in hh_cpu.FILES.values():
        with gzip.open(folder / file, "wt", encoding="utf-8") as packed:
            for number in range(30):
                question = f"\n\nHuman: {file} {number}?\n\nAssistant:"
                pair = {"chosen": f"{question} yes", "rejected": f"{question} oh no"}
                packed.write(json.dumps(pair) + "\n")
    return folder


def test_interrupted_run_continues_with_the_parts_that_are_missing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, ran = tmp_path / "hh", list[str]()

    def command(arguments: Sequence[str]) -> None:
        words = list(arguments)
        ran.append(words[0] if words[0] != "fit" else Path(words[2]).stem)
        if ran == ["init", "sft", "reward"]:
            raise KeyboardInterrupt
        made = {"init": "base", "report": "reward_report/report.json", "plot": "ppo.png"}
        (root / made.get(ran[-1], ran[-1])).mkdir(parents=True)

    monkeypatch.setattr(hh_cpu, "lit_rlhf", command)
    monkeypatch.setattr(hh_cpu, "read_first_and_last", lambda folder: {folder.name: 0.0})
    with pytest.raises(KeyboardInterrupt):
        hh_cpu.hh_cpu(str(data), str(root))
    hh_cpu.hh_cpu(str(data), str(root))
    assert ran[3:] == ["reward", "ppo", "report", "plot"]
    report = json.loads((root / "report.json").read_text("utf-8"))
    assert report["length baselines"]["helpful, shorter"] == 1.0

    hh_cpu.hh_cpu(str(data), str(root))
    assert len(ran) == 7
    with pytest.raises(ValueError, match="output_dir: expected a free name"):
        hh_cpu.hh_cpu(str(data), str(root), seed=1)
