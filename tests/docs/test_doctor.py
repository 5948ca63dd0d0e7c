"""The user story of docs/doctor.md, from the shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lit_rlhf.doctor import CHECKS_BEFORE, CHECKS_DURING, START
from tests.configs.tiny_runs import SMALL, overlay
from tests.docs.blocks import ROOT, blocks

PAGE = ROOT / "docs" / "doctor.md"
STORY = [block.text for block in blocks(PAGE) if block.language == "bash"]


def in_the_shell(block: str, small: Path) -> subprocess.CompletedProcess[str]:
    """Run a block; an overlay behind each command makes it small."""
    command = f'"{sys.executable}" -W ignore -m lit_rlhf.cli.main "$@" --config "{small}"'
    path = os.pathsep.join([str(ROOT), str(ROOT / "callbacks")])
    return subprocess.run(
        ["bash", "-c", f"lit_rlhf() {{ {command}; }}\n{block}"],
        env=os.environ | {"PYTHONPATH": path, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def small(fresh_workspace: Path) -> Path:
    """An overlay that makes a PPO run small, in the current folder."""
    return overlay(fresh_workspace, "small_ppo", SMALL["ppo"])


def test_a_run_on_other_text_does_not_start(fresh_workspace: Path, small: Path) -> None:
    found = in_the_shell(STORY[0], small)

    assert found.returncode == 1, found.stderr
    shown = [line.rstrip() for line in found.stdout.splitlines()]
    told = next(block.text for block in blocks(PAGE) if block.language == "text")
    assert told.rstrip() in "\n".join(shown)
    assert any(line.startswith("ok    clipping") for line in shown)


def test_a_sound_run_starts(fresh_workspace: Path, small: Path) -> None:
    finished = fresh_workspace / "runs" / "quickstart" / "ppo_max" / "model.safetensors"
    finished.unlink()

    done = in_the_shell(STORY[1], small)

    assert done.returncode == 0, done.stderr
    assert json.loads((fresh_workspace / "doctor.json").read_text())["failed"] is False
    assert finished.is_file()


def test_the_page_tells_of_every_check() -> None:
    text = PAGE.read_text("utf-8")
    names = [START, *(check.name for check in (*CHECKS_BEFORE, *CHECKS_DURING))]

    assert [name for name in names if f"\n| {name} |" not in text] == []
    sound = [block.text for block in blocks(PAGE) if block.language == "text"][1]
    assert [name for name in names if f"ok    {name} " not in sound] == []
