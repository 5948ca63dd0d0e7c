"""Damaged models, rewards that fail, limits and Ctrl-C: each command ends with one clear line."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from lit_rlhf.cli.main import main
from tests.tools.evaluation.folders import Sampling, write_policy, write_prompts

WEIGHTS = "model.safetensors"
DOWN = "model.layers.0.mlp.down_proj.weight"
LEAVING = "tests.tools.commands.test_faults:leave"


def leave(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """A reward function that ends the process."""
    sys.exit(3)


def put_nan(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    weights[DOWN][0, 0] = torch.nan
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


def cut_off(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def configure(**changes: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


def message_of(*argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*argv, "--device", "cpu", "--max_new_tokens", "4"])
    message = str(ended.value.code)
    assert message.count("\n") == 0
    return message


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (put_nan, f"got NaN or infinity in {DOWN}"),
        (cut_off, "expected whole weights and a valid configuration"),
        (configure(num_attention_heads=0), "got a size of 0"),
        (configure(intermediate_size=99), "expected weights of the sizes in the configuration"),
    ],
)
def test_damaged_model(tmp_path: Path, damage: Callable[[Path], None], expected: str) -> None:
    policy = write_policy(tmp_path / "sft")
    (tmp_path / "sft" / "lit_rlhf.json").unlink()  # else it says that the weights are others
    damage(tmp_path / "sft")
    message = message_of("generate", "hi", "--models", policy)
    assert message.startswith("lit_rlhf generate: ")
    assert expected in message
    assert policy in message


def test_a_reward_that_ends_the_process_is_named(tmp_path: Path) -> None:
    policy, prompts = write_policy(tmp_path / "sft"), write_prompts(tmp_path / "prompts.jsonl")
    rewards = ("--rewards", json.dumps({LEAVING: 1.0}))
    message = message_of("evaluate", "--policies", policy, "--prompts", prompts, *rewards)
    assert message.startswith("lit_rlhf evaluate: reward function")
    assert "raised SystemExit: 3. Called with prompt" in message


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")])
def test_a_limit_on_memory_is_named(tmp_path: Path, error: Exception) -> None:
    policy = write_policy(tmp_path / "sft")
    with patch("lit_rlhf.tools.evaluation.sampling.load_policy", side_effect=error):
        message = message_of("generate", "hi", "--models", policy)
    assert message.startswith("lit_rlhf generate: out of memory, or at a limit (`ulimit -v`")


def test_a_defect_keeps_its_traceback(tmp_path: Path) -> None:
    policy = write_policy(tmp_path / "sft")
    oops = RuntimeError("oops")
    fails = patch("lit_rlhf.tools.evaluation.sampling.load_policy", side_effect=oops)
    with fails, pytest.raises(RuntimeError, match="oops"):
        message_of("generate", "hi", "--models", policy)


def test_ctrl_c_says_how_to_continue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy, output = write_policy(tmp_path / "sft"), tmp_path / "out.jsonl"
    argv = ["generate", "a", "b", "--models", policy, "--batch_size", "1", "--device", "cpu"]
    stops = patch("lit_rlhf.tools.evaluation.sampling.generate_responses", Sampling(last=1))
    with stops, pytest.raises(SystemExit) as ended:
        main([*argv, "--max_new_tokens", "4", "--output", str(output)])
    assert ended.value.code == 130
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"lit_rlhf generate: interrupted; {output}.partial has what is finished; the same command "
        "continues from it"
    )


def test_error_after_ctrl_c_is_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise TimeoutError from None  # as a pool of workers does

    policy = write_policy(tmp_path / "sft")
    loads = patch("lit_rlhf.tools.evaluation.sampling.load_policy", interrupted)
    with loads, pytest.raises(SystemExit) as ended:
        main(["generate", "hi", "--models", policy, "--device", "cpu", "--max_new_tokens", "4"])
    assert ended.value.code == 130
    assert capsys.readouterr().err.splitlines()[-1] == "lit_rlhf generate: interrupted"
