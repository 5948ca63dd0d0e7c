"""docs/first_run.md, command by command, on real preference pairs in a CSV file."""

import csv
import gzip
import json
from pathlib import Path

import pytest

from lit_rlhf.data.formats import split_dialogue
from tests.docs.blocks import ROOT, blocks, commands
from tests.docs.running import run_in_shell

PAGE = ROOT / "docs" / "first_run.md"
PAIRS = 170


def write_pairs(source: Path, path: Path) -> None:
    with gzip.open(source, "rt", encoding="utf-8") as lines, path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["prompt", "chosen", "rejected"])
        rows = (json.loads(next(lines)) for _ in range(3 * PAIRS))
        dialogues = ([split_dialogue(row[side]) for side in ("chosen", "rejected")] for row in rows)
        for chosen, rejected in dialogues:
            if chosen and rejected and len(chosen) == 2 and chosen[-1] != rejected[-1]:
                table.writerow([chosen[0].content, chosen[1].content, rejected[1].content])


@pytest.mark.slow  # starts five commands in a shell
def test_commands_lead_from_pairs_to_an_evaluated_policy(shared_data: Path, tmp_path: Path) -> None:
    write_pairs(shared_data / "hh_rlhf/helpful_base_test.jsonl.gz", tmp_path / "pairs.csv")
    (shell,) = (block for block in blocks(PAGE) if block.language == "bash")
    assert len(list(commands(shell))) == 5
    script = shell.text.replace("ppo.yaml", "ppo.yaml --data.samples_per_epoch 256")
    done = run_in_shell(script, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "runs/pairs/evaluation.json").read_text("utf-8"))
    assert list(found["policies"]) == ["sft", "ppo"]
    assert "against sft" in done.stdout
    assert "PPO-max 4/4 100%" in done.stderr
