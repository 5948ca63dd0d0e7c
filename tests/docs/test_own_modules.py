"""The script of docs/own_modules.md trains under every strategy that the page names."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import ROOT, blocks
from tests.docs.running import run_process

PAGE = ROOT / "docs" / "own_modules.md"
WEIGHTS = "{'0.weight': (32, 4), '0.bias': (32,), '2.weight': (2, 32), '2.bias': (2,)}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the scripts of the page."""
    for block in blocks(PAGE):
        if block.title:
            (tmp_path / block.title).write_text(block.text, "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_script_trains_alone(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["gan.py", "auto", "1"])
    runpy.run_path("gan.py", run_name="__main__")
    capsys.readouterr()
    runpy.run_path("read_gan.py", run_name="__main__")
    assert capsys.readouterr().out.strip() == WEIGHTS


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "multi_deepspeed_stage_2"])
def test_script_trains_in_two_processes(folder: Path, strategy: str) -> None:
    env = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    for command in (["gan.py", strategy, "2"], ["read_gan.py"]):
        done = run_process([sys.executable, *command], folder, **env)
        assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == WEIGHTS
    assert (folder / "checkpoints/gan.ckpt").is_dir() == (strategy != "ddp")
