"""The commands of docs/judging.md, with a rule as judge instead of a model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lit_rlhf.tools.commands.evaluate import main
from lit_rlhf.tools.evaluation import Responses
from lit_rlhf.tools.evaluation.judge import JudgeOptions, judge_policies
from tests.docs.blocks import ROOT, blocks, commands
from tests.support.judge_server import judge_server, longer_wins

PAGE = ROOT / "docs" / "judging.md"
COMMANDS = [
    command.words[2:]
    for block in blocks(PAGE)
    for command in commands(block)
    if command.words[:2] == ["lit_rlhf", "evaluate"]
]


@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_command_judges(fresh_workspace: Path, number: int) -> None:
    for name, text in {"sft": "four", "chatgpt": "longer", "ppo": "a"}.items():
        Path(f"{name}.jsonl").write_text(json.dumps({"prompt": "hi", "response": text}) + "\n")
    for name in ("helpful", "harmless"):
        pair = {"prompt": "hi", "chosen": "longer", "rejected": "short"}
        Path(f"{name}_pairs.jsonl").write_text(json.dumps(pair) + "\n")

    with judge_server(longer_wins) as server:
        own = ["--judge.base_url", server.base_url, "--max_prompts", "1"]
        report = main([*COMMANDS[number], *own])

    assert len(report["judge"]["policies"]) == 2  # helpful and harmless
    assert {path.name for path in Path("runs/judge").iterdir()} >= {
        "answers.jsonl",
        "verdicts.jsonl",
    }


def test_python_block_judges(tmp_path: Path) -> None:
    (block,) = (block for block in blocks(PAGE) if block.language == "python")
    made: dict[str, Any] = {}
    exec(block.text, made)
    responses, options = made["responses"], made["options"]
    assert isinstance(responses, Responses)

    with judge_server(longer_wins) as server:
        own = JudgeOptions(options.model, server.base_url, folder=str(tmp_path))
        judged = judge_policies(responses, own)

    assert [row.by for row in judged.head_to_heads] == ["helpful", "harmless"]


def test_every_setting_of_the_page_exists() -> None:
    named = set(re.findall(r"judge\.([a-z_]+)", PAGE.read_text("utf-8"))) - {"judge_policies"}
    assert named <= set(JudgeOptions.__dataclass_fields__)
