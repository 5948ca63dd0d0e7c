"""`lit_rlhf completion`: what the shell offers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lit_rlhf.cli.completion import command_words, write_script

WORDS = {"fit": ["--model.seed", "--trainer.max_epochs"], "generate": ["--models"]}


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("lit_rlhf ge", ["generate"]),
        ("lit_rlhf fit --trainer.max_ep", ["--trainer.max_epochs"]),
        ("lit_rlhf fit --config quickstart/s", ["quickstart/sft"]),
        ("lit_rlhf configs copy quickstart/r", ["quickstart/reward"]),
        ("lit_rlhf generate --trainer", []),
    ],
)
def test_commands_options_and_configurations_are_offered(
    tmp_path: Path, line: str, offered: list[str]
) -> None:
    script = tmp_path / "completion.sh"
    script.write_text(write_script(WORDS), "utf-8")
    ask = (
        f"source {script}; COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); "
        'COMP_TYPE=9; _lit_rlhf; echo "${COMPREPLY[@]}"'
    )
    ran = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == offered


@pytest.mark.parametrize(
    ("command", "some"),
    [
        ("fit", {"--model.optimizer.learning_rate", "--data.batch_size", "--trainer.max_epochs"}),
        ("plot", {"--runs", "--keys"}),
        ("lab", {"world", "preferences", "--pairs"}),
    ],
)
def test_the_options_of_a_command_are_those_of_its_help(command: str, some: set[str]) -> None:
    assert some <= set(command_words(command))
