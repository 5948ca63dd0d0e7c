"""The user stories of docs/generate.md, from a shell."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lit_rlhf.data import DataSource, load_records
from tests.docs.blocks import ROOT, blocks
from tests.docs.running import run_in_shell

PAGE = ROOT / "docs" / "generate.md"
ARGUMENT, CHAT, PIPE, FILE = (block.text for block in blocks(PAGE) if block.language == "bash")


def in_shell(text: str, folder: Path) -> str:
    """Run a block of the page; its standard output."""
    done = run_in_shell(text, folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow  # starts the command in a shell
def test_ask_models_side_by_side(workspace: Path) -> None:
    shown = in_shell(ARGUMENT, workspace)

    for number, prompt in enumerate(("name two metals.", "name three fruits, please.")):
        part = shown.split("user: ")[number + 1]
        assert part.startswith(f"{prompt}\nsft: ")
        assert "\nppo_max: " in part


@pytest.mark.slow  # starts the command in a shell, twice
def test_talk_with_models(workspace: Path) -> None:
    # its end of input comes at once; tests/cli/test_generate.py has the terminal
    assert in_shell(CHAT, workspace) == ""

    shown = in_shell(PIPE, workspace)

    first, second = shown.split("\nyou: ")[1:]
    assert first.startswith("name two metals.\nppo_max: ")
    assert second.startswith("and three fruits, please.\nppo_max: ")


@pytest.mark.slow  # starts the command in a shell
def test_responses_for_a_file(fresh_workspace: Path) -> None:
    assert in_shell(FILE, fresh_workspace) == "Responses: responses.jsonl\n"

    heldout = "runs/quickstart/world/prompts_heldout.jsonl"
    prompts = load_records("prompt", [DataSource(heldout)])
    lines = (fresh_workspace / "responses.jsonl").read_text("utf-8").splitlines()
    assert len(lines) == 2 * 2 * len(prompts)  # models and responses
    table = PAGE.read_text("utf-8").partition("| field |")[2].partition("\n\n")[0]
    described = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    assert described == list(json.loads(lines[0]))
    again = load_records("prompt", [DataSource("responses.jsonl")])
    assert len(again) == len(lines)
