"""The examples of docs/extending.md, run from the command line."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from lit_callbacks import Level, Watch
from lit_rlhf.data import TextContract
from tests.support.docs_running import read_page_commands, run_small
from tests.support.tiny_runs import logged

COMMANDS = {words[words.index("--name") + 1]: words for words in read_page_commands("extending.md")}
LOGS = Path("runs/quickstart/logs")


class Ran(NamedTuple):
    """The saved configuration of a run and its metrics, with the quickstart's of the same stage."""

    settings: dict[str, Any]
    metrics: dict[str, list[float]]
    before: dict[str, list[float]]


@pytest.fixture
def train(fresh_workspace: Path) -> Callable[[str], Ran]:
    def run(name: str) -> Ran:
        run_small(COMMANDS[name], fresh_workspace)
        content = yaml.safe_load((LOGS / name / "config.yaml").read_text())
        before = logged(LOGS / ("sft" if name.startswith("sft") else "ppo_max"))
        return Ran(content, logged(LOGS / name), before)

    return run


def test_reward_function_adds_to_the_reward_model(train: Callable[[str], Ran]) -> None:
    ran = train("ppo_brevity")
    from my_rewards import brevity  # type: ignore[import-not-found]

    assert brevity(["", ""], ["a b", "a b c d"], [True, False]) == pytest.approx([0.9, -0.2])
    # the same first responses, scored otherwise
    assert ran.metrics["rollout/score"][0] != ran.before["rollout/score"][0]


def test_options_of_an_overlay_and_a_flag_leave_the_others(train: Callable[[str], Ran]) -> None:
    model = train("ppo_cooler").settings["model"]["init_args"]
    assert (model["sampling"]["temperature"], model["sampling"]["max_new_tokens"]) == (0.7, 4)
    assert (model["loss"]["value_clip"], model["loss"]["ratio_clip"]) == (None, 0.2)


def test_phase_of_a_subclass_takes_part_in_the_run(train: Callable[[str], Ran]) -> None:
    ran = train("ppo_frugal")
    cost = 0.02 * ran.before["rollout/response_length"][0]
    expected = ran.before["rollout/reward"][0] - cost
    assert ran.metrics["rollout/reward"][0] == pytest.approx(expected, abs=1e-5)


def test_estimator_of_a_subclass_takes_the_place_of_another(train: Callable[[str], Ran]) -> None:
    metrics = train("ppo_mean").metrics
    assert len(metrics["ppo/policy_loss"]) == 2  # without a phase for the critic alone
    assert "ppo/value_loss" not in metrics
    from my_estimator import MeanBaselinePPO  # type: ignore[import-not-found]

    mask = torch.tensor([[True, True], [True, False]])
    rewards = torch.tensor([[0.5, 0.5], [3.0, 0.0]])
    rollouts = SimpleNamespace(response_mask=mask)
    # the returns are 1 and 3
    advantages = MeanBaselinePPO.critic_free_advantages(None, rollouts, rewards, mask)
    assert advantages.tolist() == [[-1.0, -1.0], [1.0, 0.0]]


@pytest.mark.usefixtures("workspace")
def test_objective_of_a_subclass_weighs_tokens_by_capped_ratios() -> None:
    from my_objective import CappedWeightPPO  # type: ignore[import-not-found]

    logprobs = torch.tensor([[3.0, 0.5]]).log().requires_grad_()
    experience = SimpleNamespace(
        old_logprobs=torch.zeros(1, 2),
        advantages=torch.tensor([[1.0, -1.0]]),
        loss_mask=torch.tensor([[True, True]]),
    )
    loss = CappedWeightPPO.policy_objective(None, logprobs, experience, torch.tensor(2.0)).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)
    # -A min(ratio, 2) / 2 for the ratios 3 and 0.5
    assert gradient[0].tolist() == pytest.approx([-1.0, 0.25])


@pytest.mark.usefixtures("workspace")
def test_monitor_of_two_metrics_collapses_at_their_difference() -> None:
    from my_monitors import GoldGapMonitor  # type: ignore[import-not-found]

    watch = Watch([GoldGapMonitor(high=0.5)])
    gaps = (0.1, 0.6, 0.7)
    levels = [watch.step({"rollout/score": 1 + gap, "rollout/gold": 1.0}).level for gap in gaps]
    assert levels[-1] is Level.COLLAPSED
    assert levels[0] is Level.HEALTHY


def test_optimizer_of_a_subclass_trains(train: Callable[[str], Ran]) -> None:
    ran = train("sft_adafactor")
    # the first of two steps of the warm-up has length 0 for any optimizer
    losses = [metrics["val/sft/loss"][-1] for metrics in (ran.metrics, ran.before)]
    assert losses[0] != pytest.approx(losses[1], abs=1e-4)


def test_data_module_trains_a_model_that_keeps_its_contract(train: Callable[[str], Ran]) -> None:
    ran = train("sft_sums")
    assert ran.settings["data"]["class_path"] == "my_data.SumsDataModule"
    assert len(ran.metrics["sft/loss"]) == 2
    assert TextContract.load("runs/quickstart/sft_sums").max_length == 64


@pytest.mark.parametrize(("longest", "iterations"), [(40, 2), (1, 1)])
def test_callback_ends_a_run(train: Callable[[str], Ran], longest: int, iterations: int) -> None:
    watched = Path("watched.yaml")
    watched.write_text(watched.read_text().replace("longest: 40", f"longest: {longest}"))
    ran = train("ppo_watched")
    assert len(ran.metrics["rollout/score"]) == iterations
    callbacks = ran.settings["trainer"]["callbacks"]
    assert callbacks[-1]["class_path"] == "my_callbacks.LongAnswerWatch"
    assert len(callbacks) == 4  # the configuration's three stay


def test_commands_of_the_page_are_run_here() -> None:
    names = {"ppo_brevity", "ppo_cooler", "ppo_frugal", "ppo_mean", "ppo_watched"}
    names |= {"sft_adafactor", "sft_sums"}
    assert COMMANDS.keys() == names
