"""The user stories of the tools, run from a shell as they stand in the documents."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, blocks, commands


def stories(document: str) -> list[list[str]]:
    """The commands of a document, in order."""
    found = [c for block in blocks(ROOT / "docs" / document) for c in commands(block)]
    return [c.words for c in found if c.words[0] == "lit_rlhf"]


def shell(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "callbacks")]),
        "OMP_NUM_THREADS": "1",
    }
    program = [sys.executable, "-m", "lit_rlhf.cli.main", *words[1:]]
    return subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("number", [0, 1])
def test_the_reward_report(number: int, fresh_workspace: Path) -> None:
    done = shell(stories("reward_report.md")[number], fresh_workspace)

    assert done.returncode == 0, done.stderr
    assert "right [95 % interval]" in done.stdout
    folder = fresh_workspace / "runs/reward_report"
    assert (folder / "report.html").read_text("utf-8").startswith("<!doctype html>")
    report = json.loads((folder / "report.json").read_text("utf-8"))
    assert report["accuracy"]["pairs"] == 24
    # the folder has the output layer of its own, the other one is read along
    assert list(report["perplexity"]) == ["reward model", "language model"][: number + 1]


def test_the_reward_report_says_which_line_is_bad(fresh_workspace: Path) -> None:
    words = stories("reward_report.md")[0]
    file = fresh_workspace / words[words.index("--preferences") + 1]
    lines = file.read_text("utf-8").splitlines()
    lines[2] = json.dumps({"chosen": json.loads(lines[2])["chosen"]})
    file.write_text("\n".join(lines), "utf-8")

    done = shell(words, fresh_workspace)

    assert done.returncode == 1
    assert "preferences.jsonl:3: field 'rejected': missing" in done.stderr
    assert "--on_bad_record skip" in done.stderr
    assert "Traceback" not in done.stderr


def test_multiple_choice_before_and_after(fresh_workspace: Path) -> None:
    done = shell(stories("benchmarks.md")[0], fresh_workspace)

    assert done.returncode == 0, done.stderr
    assert "questions.jsonl (acc)" in done.stdout
    report = json.loads((fresh_workspace / "tax.json").read_text("utf-8"))
    assert list(report["benchmarks"]["models"]) == ["sft", "ppo_max"]
    assert report["benchmarks"]["rows"][0]["questions"] == 3
