"""`lit_rlhf reward probe`: its files, its exit status, and its mistakes in one line."""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lit_rlhf.tools.commands.reward import COMMANDS
from tests.support.evaluation_folders import CHARACTERS, Folders, write_lines

probe = partial(COMMANDS["probe"].run, prog="lit_rlhf reward probe")
ANSWERS = ["a bc", "de", "fghij k", "l", "mn op qr", "s", "tuv", "wx y z", "a", "so it is"]


@pytest.fixture
def data(tmp_path: Path) -> str:
    rows = [{"prompt": f"{n}?", "chosen": a, "rejected": "no"} for n, a in enumerate(ANSWERS)]
    return write_lines(tmp_path / "pairs.jsonl", rows)


def test_probe_names_what_gains_and_ends_with_1(
    folders: Folders, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--rewards", json.dumps({CHARACTERS: 2.0}), "--data", data, "--policy", folders.sft]
    with pytest.raises(SystemExit) as ended:
        probe([*words, "--max_prompts", "9", "--output", str(tmp_path / "out")])
    assert ended.value.code == 1
    printed = capsys.readouterr().out
    assert "said twice: the honest answer, and again" in printed
    assert "PPO raises this score, so expect it to find them." in printed
    report = json.loads((tmp_path / "out" / "probe.json").read_text("utf-8"))
    verdicts = {row["name"]: row["verdict"] for row in report["results"]}
    assert (verdicts["said twice"], verdicts["empty"]) == ("gains", "costs")
    assert report["n_prompts"] == 9
    assert report["settings"] == {
        "rewards": {CHARACTERS: 2.0},
        "data": [data],
        "policy": folders.sft,
        "seed": 0,
        "max_new_tokens": None,
        "dtype": "float32",
    }
    assert (tmp_path / "out" / "probe.svg").read_text("utf-8").startswith("<?xml")


def test_probe_ends_well_where_nothing_gains(
    folders: Folders, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = {"right": {"rule": "equals", "field": "chosen"}}
    words = ["--rewards", json.dumps(rewards), "--data", data, "--policy", folders.sft]
    probe([*words, "--output", str(tmp_path / "out")])
    assert "None of " in capsys.readouterr().out


def test_probe_reads_the_first_reward_models_tokenizer(
    folders: Folders, data: str, tmp_path: Path
) -> None:
    words = ["--rewards", json.dumps({folders.reward: 1.0}), "--data", data]
    with suppress(SystemExit):  # a random reward model may like a cheat
        probe([*words, "--output", str(tmp_path / "out")])
    report = json.loads((tmp_path / "out" / "probe.json").read_text("utf-8"))
    assert report["n_prompts"] == len(ANSWERS)


Refuse = Callable[[dict[str, Any], str, list[str]], str]


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Runs a probe that ends with status 2, and gives its last line."""

    def run(rewards: dict[str, Any], data: str, words: list[str]) -> str:
        with pytest.raises(SystemExit) as ended:
            probe(["--rewards", json.dumps(rewards), "--data", data, *words])
        assert ended.value.code == 2
        return capsys.readouterr().err.splitlines()[-1]

    return run


def test_a_language_model_is_refused_as_a_reward(
    folders: Folders, data: str, refuse: Refuse
) -> None:
    message = refuse({folders.sft: 1.0}, data, [])
    assert message.startswith("lit_rlhf reward probe: ")
    assert "language model" in message


def test_rules_alone_need_a_policy(data: str, refuse: Refuse) -> None:
    message = refuse({"length": {"rule": "length", "longest": 3}}, data, [])
    assert message.startswith("lit_rlhf reward probe: policy: expected the folder or hub id of a ")


def test_prompts_without_answers_are_refused(
    folders: Folders, tmp_path: Path, refuse: Refuse
) -> None:
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"prompt": "why?"}] * 9)
    assert "prompts.jsonl:1: " in refuse({folders.reward: 1.0}, prompts, [])


def test_too_few_prompts_are_refused(folders: Folders, data: str, refuse: Refuse) -> None:
    message = refuse({folders.reward: 1.0}, data, ["--max_prompts", "3"])
    assert message.endswith("data: expected at least 8 prompts with an honest answer, got 3")
