"""`lit_rlhf completion`: words that the shell offers."""

import subprocess
from pathlib import Path

import pytest

from lit_rlhf.cli.completion import COMMAND

pytestmark = pytest.mark.slow  # builds the parsers of all commands


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "completion.sh"
    with pytest.MonkeyPatch.context() as patch, path.open("w") as file:
        patch.setattr("sys.stdout", file)
        with pytest.raises(SystemExit) as ended:
            COMMAND.run([], "lit_rlhf completion")
    assert ended.value.code == 0
    return path


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("ge", "generate"),
        ("fit --trainer.max_ep", "--trainer.max_epochs"),
        ("fit --model.optimizer.le", "--model.optimizer.learning_rate"),
        ("fit --config quickstart/s", "quickstart/sft"),
        ("doctor --model.critic_i", "--model.critic_init"),
        ("configs copy quickstart/r", "quickstart/reward"),
        ("lab preferences --pa", "--pairs"),
        ("report reward --pref", "--preferences"),
        ("generate --dtype f", "float32 float16"),
        ("generate --trainer", ""),
    ],
)
def test_words_of_every_kind_are_offered(script: Path, line: str, offered: str) -> None:
    ask = (
        f"source {script}; COMP_WORDS=(lit_rlhf {line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); "
        'COMP_TYPE=9; _shtab_lit_rlhf; echo "${COMPREPLY[@]}"'
    )
    ran = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == offered
