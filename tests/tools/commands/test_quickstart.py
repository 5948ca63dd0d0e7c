"""`lit_rlhf quickstart` from end to end, with two steps of each stage."""

import json
import os
import re
import shlex
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from lit_rlhf.cli import main as cli
from lit_rlhf.tools.commands import quickstart as cli_quickstart
from lit_rlhf.tools.commands.quickstart import COMMAND, read_outcome
from tests.support.quickstart_outcome import EXPECTED_OUTCOME
from tests.support.tiny_runs import QUICKSTART, SMALL, overlay

main = partial(COMMAND.run, prog="lit_rlhf quickstart")

SEED = "3"
SMALL_TOOLS = {
    "world": "--n_demonstrations 48 --n_train_prompts 48 --n_heldout_prompts 8 --n_texts 8",
    "evaluate": "--max_prompts 6",
}
"""Flags that make the tools' commands small; the quickstart itself has none for these sizes."""


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that a quickstart gives, which do nothing but write an evaluation."""
    given: list[list[str]] = []
    scores = {name: {"mean": 0.5, "std": 1.0} for name in ("gold_reward", "reward", "well_formed")}
    policies = {name: {"rewards": scores} for name in ("sft", "ppo_vanilla", "ppo_max")}

    def command(argv: Sequence[str]) -> None:
        given.append(list(argv))
        if argv[0] == "evaluate":
            output = Path(argv[argv.index("--output") + 1])
            output.write_text(json.dumps({"policies": policies}), "utf-8")

    monkeypatch.setattr(cli, "main", command)
    for name in ("run_figure", "save_figure"):  # no run is logged
        monkeypatch.setattr(f"lit_rlhf.tools.evaluation.{name}", lambda *_: None)
    return given


@pytest.mark.slow  # trains all stages
def test_quickstart_trains_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, command = tmp_path / "run with a space", cli.main

    def small_command(argv: Sequence[str]) -> None:
        small = [flags.split() for name, flags in SMALL_TOOLS.items() if name in argv[:2]]
        if argv[0] == "fit":
            stage = Path(argv[2]).stem.partition("_")[0]
            small = [["--config", str(overlay(tmp_path, stage, SMALL[stage]))]]
        command([*argv, *(flag for flags in small for flag in flags)])

    arguments = [*("--output_dir", str(root), "--configs", str(QUICKSTART)), *("--seed", SEED)]
    with (
        patch.object(cli, "main", small_command),
        # as the console script has it: LightningCLI looks at it
        patch.object(sys, "argv", ["lit_rlhf", "quickstart", *arguments]),
        # Lightning 2.6.6 makes classes in a way that jsonargparse 4.53 deprecates
        patch.dict(os.environ, {"JSONARGPARSE_DEPRECATION_WARNINGS": "off"}),
        warnings.catch_warnings(),
    ):
        # reference and reward model are frozen in evaluation mode, which Lightning warns about
        warnings.filterwarnings("ignore", ".*in eval mode at the start of training")
        main([*arguments, "--pairs", "8"])
    for name in ("world/base", "sft", "reward", "ppo_max", "ppo_max/critic", "ppo_vanilla"):
        files = {path.name for path in (root / name).iterdir()}
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= files
    report = json.loads((root / "evaluation.json").read_text("utf-8"))
    assert list(report["policies"]) == ["sft", "ppo_vanilla", "ppo_max"]
    assert (report["n_prompts"], report["settings"]["seed"]) == (6, int(SEED))
    assert len((root / "world" / "preferences.jsonl").read_text("utf-8").splitlines()) == 8
    assert (root / "collapse.png").read_bytes().startswith(b"\x89PNG")
    assert "rollout/kl" in (root / "report.html").read_text("utf-8")
    last = capsys.readouterr().out.strip().split("\n\n")[-1]
    assert last.replace("\n", " ") == read_outcome(report).sentence()


def test_outcome_takes_each_of_nine_numbers_from_its_place_in_the_report() -> None:
    def rewards(gold: float, std: float, score: float, well_formed: float) -> dict[str, Any]:
        return {
            "rewards": {
                "gold_reward": {"mean": gold, "std": std},
                "reward": {"mean": score, "std": -1.0},
                "well_formed": {"mean": well_formed, "std": -1.0},
            }
        }

    evaluation = {
        "policies": {
            "sft": rewards(gold=1.0, std=2.0, score=-1.0, well_formed=7.0),
            "ppo_vanilla": rewards(gold=3.0, std=-1.0, score=5.0, well_formed=8.0),
            "ppo_max": rewards(gold=4.0, std=-1.0, score=6.0, well_formed=9.0),
        }
    }
    assert read_outcome(evaluation)._asdict() == {
        "sft_gold": 1.0,
        "sft_std": 2.0,
        "vanilla_gold": 3.0,
        "max_gold": 4.0,
        "vanilla_score": 5.0,
        "max_score": 6.0,
        "sft_well_formed": 7.0,
        "vanilla_well_formed": 8.0,
        "max_well_formed": 9.0,
    }


@pytest.mark.parametrize(
    ("changes", "vanilla", "max_"),
    [
        ({}, "vanilla PPO exploited", "improved the policy: "),
        # the bounds themselves count: 0.5 - 0.5 * 1.4 and 0.5 + 0.3
        ({"vanilla_gold": 0.5 - 0.5 * 1.4, "max_gold": 0.5 + 0.3}, "exploited", "the policy: "),
        ({"vanilla_score": 0.5}, "its score under the reward model did not end above", "improved"),
        ({"vanilla_gold": -0.19}, "which is less than expected (0.70)", "PPO-max improved"),
        ({"vanilla_gold": 0.9}, "unexpectedly, did not collapse: its gold reward went", "improved"),
        ({"max_gold": 0.79}, "vanilla PPO exploited", "improved the policy by less than expected"),
        ({"max_gold": 0.5}, "vanilla PPO exploited", "unexpectedly, did not improve the policy: "),
    ],
)
def test_sentence_tells_what_happened(changes: dict[str, float], vanilla: str, max_: str) -> None:
    outcome = EXPECTED_OUTCOME._replace(**changes)
    first, second = outcome.sentence().split("; ")
    assert first.startswith("In this run, vanilla PPO")
    assert vanilla in first
    assert f"{outcome.vanilla_gold:.2f}" in first
    assert "0.50 (SFT)" in first
    assert max_ in second
    gain = outcome.max_gold - outcome.sft_gold
    assert second.endswith(f"its gold reward ended at {outcome.max_gold:.2f}, {gain:+.2f} to SFT.")


def test_the_printed_commands_are_those_that_run_with_seed_and_copied_configurations(
    commands: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "run with a space"
    main(["--output_dir", str(root), "--seed", SEED])
    printed = capsys.readouterr().out
    # as a shell reads them
    shown = [shlex.split(line)[2:] for line in printed.splitlines() if line.startswith("$ ")]
    assert shown == commands
    order = "lab fit lab fit fit fit report evaluate"
    assert [words[0] for words in commands] == order.split()
    for words in commands:
        seeds = [i + 1 for i, word in enumerate(words) if re.search(r"seed(_everything)?$", word)]
        seeded = words[0] != "report"
        assert {words[i] for i in seeds} == ({SEED} if seeded else set())
    used = {word for words in commands for word in words if word.endswith(".yaml")}
    assert {Path(file).parent for file in used} == {root / "configs"}
    assert "runs/quickstart" not in "".join(Path(file).read_text("utf-8") for file in used)


def option(words: Sequence[str], name: str) -> str:
    return words[words.index(f"--{name}") + 1]


def test_each_command_gets_the_folders_and_settings_that_belong_to_it(
    commands: list[list[str]],
) -> None:
    settings = ["--world", "extrapolation", "--language", "zh", "--pairs", "7", "--seed", SEED]
    main(["--output_dir", "q", *settings])
    world, _, preferences, *_, report, evaluate = commands
    assert world[:2] == ["lab", "world"]
    names = ("output_dir", "world", "language", "n_heldout_prompts")
    assert [option(world, name) for name in names] == ["q/world", "extrapolation", "zh", "512"]
    assert preferences[:2] == ["lab", "preferences"]
    assert option(preferences, "policy") == "q/sft"
    assert option(preferences, "world") == "q/world"
    assert option(preferences, "output") == "q/world/preferences.jsonl"
    assert option(preferences, "pairs") == "7"
    assert report[1:3] == ["vanilla=q/logs/ppo_vanilla", "PPO-max=q/logs/ppo_max"]
    place = evaluate.index("--policies") + 1
    assert evaluate[place : place + 3] == ["q/sft", "q/ppo_vanilla", "q/ppo_max"]
    assert option(evaluate, "prompts") == "q/world/prompts_heldout.jsonl"
    # the first reward decides who wins: the gold one
    sources = re.findall(r"[{ ]([^ ]+): 1\.0", option(evaluate, "rewards"))
    assert [source.rpartition(":")[2] for source in sources] == [
        *("gold_reward", "q/reward", "well_formed")
    ]
    sampling = ("max_new_tokens", "temperature", "top_p", "repetition_penalty")
    assert [option(evaluate, name) for name in sampling] == ["48", "1", "1", "1"]


def test_steps_continue_after_an_interruption(commands: list[list[str]]) -> None:
    def interrupted(argv: Sequence[str]) -> None:
        commands.append(list(argv))
        if len(commands) == 4:  # the command of the reward model
            raise SystemExit(130)

    with patch.object(cli, "main", interrupted), pytest.raises(SystemExit, match="130"):
        main(["--output_dir", "q"])
    n_commands = len(commands)
    for _ in ("without a model", "with one"):
        with pytest.raises(SystemExit, match="holds an earlier quickstart with other seed, pairs"):
            main(["--output_dir", "q", "--seed", "1", "--pairs", "3"])
        Path("q/sft").mkdir(exist_ok=True)
    assert len(commands) == n_commands  # its world is not replaced either
    main(["--output_dir", "q"])
    # it is finished, and its evaluation is not replaced
    with pytest.raises(SystemExit, match=r"holds an earlier quickstart\. Take .*--overwrite"):
        main(["--output_dir", "q"])
    order = "lab fit lab fit fit fit fit report evaluate"
    assert [words[0] for words in commands] == order.split()
    again = [words for words in commands if "--ckpt_path" in words]
    assert again == [[*commands[3], "--ckpt_path", "last"]]


def test_interrupted_quickstart_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = cli_quickstart.Steps(Path("q.json"), {"overwrite": False})
    for step in ("world", "sft"):
        steps.begin(step)
    again = cli_quickstart.Steps(Path("q.json"), {"overwrite": True})
    assert again.begin("world") is cli_quickstart.Progress.NEW
    continued = cli_quickstart.Steps(Path("q.json"), {"overwrite": True})
    assert continued.begin("world") is cli_quickstart.Progress.INTERRUPTED


def test_a_folder_without_its_configurations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"configs: expected a folder with sft\.yaml, got"):
        main(["--configs", str(tmp_path)])


def test_default_folders_commands_work_anywhere(commands: list[list[str]]) -> None:
    cli_quickstart.Quickstart(Path(cli_quickstart.DEFAULT_DIR)).fit_ppo(["ppo_max.yaml"])
    assert commands[0][:3] == ["fit", "--config", "quickstart/ppo_max"]


@pytest.mark.parametrize("name", ["logs/mine/checkpoints/a.ckpt", "configs/sft.yaml", "sft/a"])
def test_folder_of_other_runs_is_refused(name: str) -> None:
    file = Path("project", name)
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    with pytest.raises(SystemExit, match=r"project holds .*Take another folder"):
        main(["--output_dir", "project"])
    assert [path for path in Path("project").rglob("*") if path.is_file()] == [file]


def test_only_checkpoints_of_its_own_stages_are_replaced(commands: list[list[str]]) -> None:
    files = [Path(f"q/logs/{run}/checkpoints/a.ckpt") for run in ("sft", "ppo_max", "mine")]
    for file in files:
        file.parent.mkdir(parents=True)
        file.touch()
    main(["--output_dir", "q", "--overwrite"])
    assert [file.exists() for file in files] == [False, False, True]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"settings": 1, "steps": []}'])
def test_file_that_has_no_steps_is_refused_by_name(content: str) -> None:
    Path("q").mkdir()
    Path("q/quickstart.json").write_text(content)
    with pytest.raises(SystemExit, match=r"q/quickstart\.json: expected"):
        main(["--output_dir", "q"])


def test_number_of_pairs_is_checked_before_the_first_step() -> None:
    with pytest.raises(SystemExit, match="pairs: expected an integer >= 1, got 0"):
        main(["--output_dir", "q", "--pairs", "0"])
    assert not Path("q").exists()
