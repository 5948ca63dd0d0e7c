"""Runs commands of the documents, in this process or in a shell."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.docs_blocks import ROOT, blocks, commands
from tests.support.tiny_runs import SMALL, overlay, run


def read_page_commands(page: str) -> list[list[str]]:
    """The `lit_rlhf` commands of a page of `docs`, in order, without the program's name."""
    page_commands = [c.words for block in blocks(ROOT / "docs" / page) for c in commands(block)]
    return [words[1:] for words in page_commands if words[0] == "lit_rlhf"]


def run_small(words: Sequence[str], folder: Path) -> None:
    """Run a command with the configuration of a stage, made small by an overlay after it."""
    end = words.index("--config") + 2
    stem = Path(words[end - 1]).stem
    stage = stem if stem in SMALL else "ppo"
    small = overlay(folder, f"small_{stage}", SMALL[stage])
    run(*words[:end], "--config", str(small), *words[end:])


def refusal(*words: str) -> str:
    """Run a command that must fail, and return its error."""
    with pytest.raises(SystemExit) as ended:
        run(*words)
    return str(ended.value)


def run_in_shell(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a block in bash, where `lit_rlhf` is a function."""
    command = shlex.join([sys.executable, "-W", "ignore", "-m", "lit_rlhf.cli.main"])
    words = ["bash", "-e", "-o", "pipefail", "-c", f'lit_rlhf() {{ {command} "$@"; }}\n{text}']
    return run_process(words, folder, COLUMNS="80")


def run_process(
    words: Sequence[str], folder: Path, tree: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command that finds the packages of a tree."""
    environment["PYTHONPATH"] = os.pathsep.join([str(tree), str(tree / "callbacks")])
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    return subprocess.run(words, cwd=folder, env=os.environ | environment, **options)
