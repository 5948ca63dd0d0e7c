"""The examples of docs/extending.md, run from the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from lit_rlhf.data import TextContract
from tests.configs.tiny_runs import SMALL, logged, overlay, run
from tests.docs.blocks import ROOT, blocks, commands

Train = Callable[[str], None]
PAGE = ROOT / "docs" / "extending.md"
COMMANDS = [c.words for block in blocks(PAGE) for c in commands(block) if c.words[0] == "lit_rlhf"]


def command_with(word: str) -> list[str]:
    """The command of the page that contains a word, without the name of the program."""
    (words,) = (words for words in COMMANDS if word in words)
    return words[1:]


@pytest.fixture
def train(fresh_workspace: Path) -> Train:
    """Run the page's `fit` command with a word, made small by an overlay after its base."""

    def run_small(word: str) -> None:
        words = command_with(word)
        base = words.index("--config") + 2
        stage = "sft" if words[base - 1].endswith("sft.yaml") else "ppo"
        small = overlay(fresh_workspace, f"small_{stage}", SMALL[stage])
        run(*words[:base], "--config", str(small), *words[base:])

    return run_small


def settings(run_folder: Path) -> dict[str, dict[str, object]]:
    """The configuration that a run has saved."""
    content: dict[str, dict[str, object]] = yaml.safe_load((run_folder / "config.yaml").read_text())
    return content


@pytest.fixture
def logs(fresh_workspace: Path) -> Path:
    """The log folder of the quickstart."""
    return fresh_workspace / "runs" / "quickstart" / "logs"


def test_all_commands_of_the_page_are_tested_here() -> None:
    words = ("brevity.yaml", "cooler.yaml", "frugal.yaml", "sums.yaml", "watched.yaml")

    assert len(COMMANDS) == len(
        [command_with(word) for word in (*words, "my_optimizers.AdafactorSFT")]
    )


def test_function_adds_to_the_reward_models_score(
    train: Train, logs: Path, quickstart: Path
) -> None:
    train("brevity.yaml")

    from my_rewards import brevity  # type: ignore[import-not-found]

    assert brevity(["", ""], ["a b", "a b c d"], [True, False]) == pytest.approx([0.9, -0.2])
    rewards = settings(logs / "ppo_brevity")["model"]["init_args"]["rewards"]  # type: ignore[index]
    assert rewards == {"runs/quickstart/reward": 1.0, "my_rewards:brevity": 0.5}
    # the same first responses, scored otherwise
    before = logged(quickstart / "logs" / "ppo_max")["rollout/score"]
    assert logged(logs / "ppo_brevity")["rollout/score"][0] != before[0]


def test_overlay_and_a_flag_leave_the_other_options_of_their_groups(
    train: Train, logs: Path
) -> None:
    train("cooler.yaml")

    model = settings(logs / "ppo_cooler")["model"]["init_args"]
    assert model["sampling"]["temperature"] == 0.7  # type: ignore[index]
    assert model["sampling"]["max_new_tokens"] == 4  # type: ignore[index]
    assert model["loss"]["value_clip"] is None  # type: ignore[index]
    assert model["loss"]["ratio_clip"] == 0.2  # type: ignore[index]


def test_overridden_phase_takes_part_in_the_run(train: Train, logs: Path, quickstart: Path) -> None:
    train("frugal.yaml")

    assert settings(logs / "ppo_frugal")["model"]["class_path"] == "my_ppo.FrugalPPO"
    base = quickstart / "logs" / "ppo_max"
    length = logged(base)["rollout/response_length"][0]
    expected = logged(base)["rollout/reward"][0] - 0.02 * length
    assert logged(logs / "ppo_frugal")["rollout/reward"][0] == pytest.approx(expected, abs=1e-5)


def test_own_optimizer_trains_with_the_stages_schedule(
    train: Train, logs: Path, quickstart: Path
) -> None:
    train("my_optimizers.AdafactorSFT")

    # the first of two steps of the warm-up has length 0 for any optimizer
    losses = [logged(logs / name)["val/sft/loss"][-1] for name in ("sft_adafactor", "sft")]
    assert losses[0] != pytest.approx(losses[1], abs=1e-4)


def test_own_data_train_a_model_that_keeps_their_contract(train: Train, logs: Path) -> None:
    train("sums.yaml")

    data = settings(logs / "sft_sums")["data"]
    assert data == {
        "class_path": "my_data.SumsDataModule",
        "init_args": {"largest": 12, "batch_size": 4},
    }
    assert len(logged(logs / "sft_sums")["sft/loss"]) == 2
    assert TextContract.load("runs/quickstart/sft_sums").max_length == 64


@pytest.mark.parametrize(("longest", "iterations"), [(40, 2), (1, 1)])
def test_own_callback_ends_a_run(
    fresh_workspace: Path, train: Train, logs: Path, longest: int, iterations: int
) -> None:
    watched = fresh_workspace / "watched.yaml"
    watched.write_text(watched.read_text().replace("longest: 40", f"longest: {longest}"))

    train("watched.yaml")

    assert len(logged(logs / "ppo_watched")["rollout/score"]) == iterations
    callbacks = settings(logs / "ppo_watched")["trainer"]["callbacks"]
    assert [callback["class_path"].rpartition(".")[2] for callback in callbacks] == [  # type: ignore[attr-defined]
        "StageProgressBar",
        "CollapseDetector",
        "SampleTimeline",
        "LongAnswerWatch",
    ]
