"""The user stories of docs/doctor.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.configs.tiny_runs import SMALL, overlay
from tests.docs.blocks import ROOT, blocks, commands
from tests.docs.running import run_here

PAGE = ROOT / "docs" / "doctor.md"
BLOCKS = [block for block in blocks(PAGE) if block.language == "bash"]
STORY = [
    [command.words for command in commands(block) if command.words[0] == "lit_rlhf"]
    for block in BLOCKS
]
FINISHED = Path("runs/quickstart/ppo_checked/model.safetensors")


@pytest.fixture
def small(fresh_workspace: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Arguments that make a PPO run small."""
    monkeypatch.setenv("COLUMNS", "80")  # the width of the page's tables
    return "--config", str(overlay(fresh_workspace, "small_ppo", SMALL["ppo"]))


def test_run_on_other_text_does_not_start(
    small: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    (doctor,) = STORY[0]

    assert run_here(doctor, *small).status == 1

    shown = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    told = next(block.text for block in blocks(PAGE) if block.language == "text")
    assert told.rstrip() in "\n".join(shown)
    assert any(line.startswith("ok    clipping") for line in shown)


def test_sound_run_starts(small: tuple[str, str]) -> None:
    doctor, fit = STORY[1]

    assert run_here(doctor, *small).status == 0
    assert json.loads(Path("doctor.json").read_text())["failed"] is False
    assert not FINISHED.exists()  # the doctor saves nothing
    assert run_here(fit, *small).status == 0
    assert FINISHED.is_file()
