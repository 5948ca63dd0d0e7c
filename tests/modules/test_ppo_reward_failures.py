"""A reward function that fails ends a run with its name and the sample, and loses nothing."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer

from lit_rlhf.modules import PPOModule
from tests.modules.stages import assert_equal_states, copied, fitted, ppo_options, prompts
from tests.rewards import reward_functions

FUNCTIONS = "tests.rewards.reward_functions"


class Saving(Callback):
    """Leaves the newest checkpoint as `last.ckpt`, and counts them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "last.ckpt"
        self.count = 0

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        trainer.save_checkpoint(self.path)
        self.count += 1


def module(root: Path, function: str, **options: Any) -> PPOModule:
    rewards = {f"{FUNCTIONS}:{function}": 1.0}
    options = {"critic_init": "policy", "minibatches.minibatch_size": 2, **options}
    return PPOModule(**ppo_options(root, rewards=rewards, **options))


def test_failure_costs_batch(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"batch_size": 2}  # four iterations
    monkeypatch.setattr(reward_functions, "calls", -100)
    whole = module(root, "fails_from_the_third_call")
    fitted(whole, prompts(root, **data), tmp_path / "whole")

    monkeypatch.setattr(reward_functions, "calls", 0)
    saving, broken = Saving(tmp_path), module(root, "fails_from_the_third_call")
    with pytest.raises(RuntimeError) as error:
        fitted(broken, prompts(root, **data), tmp_path / "broken", callbacks=[saving])
    message = str(error.value)
    assert message.startswith(
        f"reward function '{FUNCTIONS}:fails_from_the_third_call' raised ConnectionError: the "
        "scoring service is gone. Called with prompt '"
    )
    assert "Human: " in message
    assert saving.count == 2
    assert not (tmp_path / "broken" / "model").exists()

    monkeypatch.setattr(reward_functions, "calls", -100)  # the service is back
    resumed = module(root, "fails_from_the_third_call")
    fitted(resumed, prompts(root, **data), tmp_path / "resumed", ckpt_path=saving.path)
    assert_equal_states(copied(resumed), copied(whole))


@pytest.mark.parametrize("source", ["rewards", "gold_reward"])
def test_a_wrong_shape_ends_the_run(root: Path, tmp_path: Path, source: str) -> None:
    wrong = f"{FUNCTIONS}:a_column"
    options: dict[str, Any] = {"gold_reward": wrong} if source == "gold_reward" else {}
    stage = module(root, "length" if source == "gold_reward" else "a_column", **options)
    expected = r"a_column': expected 8 scores, one for each response, got shape \(8, 1\); called "
    with pytest.raises(ValueError, match=expected + "with 8 responses, the first: prompt '.*Human"):
        fitted(stage, prompts(root), tmp_path)


@pytest.mark.parametrize("source", ["rewards", "gold_reward"])
def test_the_time_limit_holds_for_every_function(root: Path, tmp_path: Path, source: str) -> None:
    reward_functions.released.clear()
    slow = f"{FUNCTIONS}:waits"
    options: dict[str, Any] = {"gold_reward": slow} if source == "gold_reward" else {}
    name = "length" if source == "gold_reward" else "waits"
    stage = module(root, name, reward_timeout=2.0, **options)
    try:
        with pytest.raises(TimeoutError, match=r"waits': no scores after 2 seconds .reward_time"):
            fitted(stage, prompts(root), tmp_path)
    finally:
        reward_functions.released.set()
