"""docs/first_run.md, command by command, on real preference pairs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, blocks, commands
from tests.docs.running import run_in_shell

PAGE = ROOT / "docs" / "first_run.md"
PAIRS = 170


@pytest.mark.slow  # starts six commands in a shell
def test_ten_commands_lead_from_pairs_to_an_evaluated_policy(
    shared_data: Path, tmp_path: Path
) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    pairs = shared_data / "hh_rlhf/helpful_base_test.jsonl.gz"
    with gzip.open(pairs, "rt", encoding="utf-8") as file:
        (tmp_path / "pairs.jsonl").write_text("".join(next(file) for _ in range(PAIRS)), "utf-8")
    for block in blocks(PAGE):
        if block.title:
            (tmp_path / block.title).write_text(block.text, "utf-8")
    shell = [block for block in blocks(PAGE) if block.language == "bash"]
    assert sum(len(list(commands(block))) for block in shell) <= 10
    script = "\n".join(block.text for block in shell[1:])  # the package is installed
    assert script.count(" 640\n") == 1
    script = script.replace(" 640\n", " 384\n")  # six iterations
    done = run_in_shell(script, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "runs/hh/evaluation.json").read_text("utf-8"))
    assert list(found["policies"]) == ["sft", "ppo"]
    assert found["n_prompts"] >= 90  # of 100; some are bad records
    assert "against sft" in done.stdout
    assert "PPO-max 6/6 100%" in done.stderr
    assert (tmp_path / "runs/hh/report.html").is_file()
