"""Commands of the documents, run in this process or, as a reader types them, in a shell."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.configs.tiny_runs import run
from tests.docs.blocks import ROOT


class Ended(NamedTuple):
    """How a command ended: its exit status, and the message of an error."""

    status: int
    message: str


def run_here(words: Sequence[str], *more: str) -> Ended:
    """Run `lit_rlhf` in this process, which saves the seconds that its imports take.

    Args:
        words: The command as on the page, with `lit_rlhf`.
        *more: Arguments behind those of the page.
    """
    assert words[0] == "lit_rlhf"
    try:
        run(*words[1:], *more)
    except SystemExit as ended:
        # as the interpreter does: a text goes to standard error, with status 1
        if isinstance(ended.code, str):
            return Ended(1, ended.code)
        return Ended(ended.code or 0, "")
    return Ended(0, "")


def run_in_shell(text: str, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run a block in bash, where `lit_rlhf` is a function.

    Args:
        text: The block.
        folder: Current folder.
        *more: Arguments behind those of every command.
    """
    command = shlex.join([sys.executable, "-W", "ignore", "-m", "lit_rlhf.cli.main"])
    function = f'lit_rlhf() {{ {command} "$@" {shlex.join(more)}; }}'
    return subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", f"{function}\n{text}"],
        cwd=folder,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "callbacks")]),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "80",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
