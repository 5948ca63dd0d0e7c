"""The user stories of docs/reward_report.md and docs/benchmarks.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, blocks, commands
from tests.docs.running import run_here


def stories(document: str) -> list[list[str]]:
    """The commands of a document, in order."""
    found = [c for block in blocks(ROOT / "docs" / document) for c in commands(block)]
    return [c.words for c in found if c.words[0] == "lit_rlhf"]


@pytest.mark.parametrize("number", [0, 1])
def test_reward_report(
    number: int, fresh_workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(stories("reward_report.md")[number]).status == 0

    assert "right [95 % interval]" in capsys.readouterr().out
    folder = fresh_workspace / "runs/reward_report"
    assert (folder / "report.html").read_text("utf-8").startswith("<!doctype html>")
    report = json.loads((folder / "report.json").read_text("utf-8"))
    assert report["accuracy"]["pairs"] == 24
    # the folder has the output layer of its own, the other one is read along
    assert list(report["perplexity"]) == ["reward model", "language model"][: number + 1]


def test_reward_report_says_which_line_is_bad(fresh_workspace: Path) -> None:
    words = stories("reward_report.md")[0]
    file = Path(words[words.index("--preferences") + 1])
    lines = file.read_text("utf-8").splitlines()
    lines[2] = json.dumps({"chosen": json.loads(lines[2])["chosen"]})
    file.write_text("\n".join(lines), "utf-8")

    ended = run_here(words)

    assert ended.status == 1
    assert "preferences.jsonl:3: field 'rejected': missing" in ended.message
    assert "--on_bad_record skip" in ended.message


def test_multiple_choice_before_and_after(
    fresh_workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # lm-evaluation-harness asks pip for all packages after every run, which takes seconds
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)

    assert run_here(stories("benchmarks.md")[0]).status == 0

    assert "questions.jsonl (acc)" in capsys.readouterr().out
    report = json.loads((fresh_workspace / "tax.json").read_text("utf-8"))
    assert list(report["benchmarks"]["models"]) == ["sft", "ppo_max"]
    assert report["benchmarks"]["rows"][0]["questions"] == 3
