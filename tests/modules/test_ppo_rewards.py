"""PPO with a reward model, rules and a remote scorer: logged, normalized, resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lit_rlhf.modules import PPOModule
from lit_rlhf.rewards import remote
from lit_rlhf.rollout import RolloutBatch, TokenStatistics
from tests.modules.stages import assert_equal_states, copied, fitted, ppo_options, prompts
from tests.rewards.said import service

BREVITY = {"rule": "length", "weight": 0.5, "longest": 3, "normalize": True}
LETTERS = {"rule": "regex", "pattern": "[a-z]", "normalize": True}


def module(root: Path, **rewards: Any) -> PPOModule:
    sources = {str(root / "reward"): {"weight": 2.0, "normalize": True}, **rewards}
    return PPOModule(**ppo_options(root, rewards=sources, minibatches={"minibatch_size": 2}))


class Watching(Callback):
    """What is logged in each iteration, and a checkpoint after the second."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "second.ckpt"
        self.logged: list[dict[str, float]] = []
        self.scores: list[Tensor] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: object
    ) -> None:
        self.logged.append({k: float(v) for k, v in trainer.callback_metrics.items()})
        self.scores.append(outputs["scores"])
        if len(self.logged) == 2:
            trainer.save_checkpoint(self.path)


def test_a_run_goes_on_from_its_sources_moments(root: Path, tmp_path: Path) -> None:
    data = {"batch_size": 2}  # four iterations
    whole, seen = module(root, brevity=BREVITY, letters=LETTERS), Watching(tmp_path)
    fitted(whole, prompts(root, **data), tmp_path / "whole", callbacks=[seen])
    assert [float(m.count) for m in whole.reward.moments.values()] == [8.0, 8.0, 8.0]
    for logged, scores in zip(seen.logged, seen.scores, strict=True):
        assert logged["rollout/score"] == pytest.approx(float(scores.mean()), abs=1e-5)
        assert logged["rollout/score/brevity"] <= 0.0
        assert 0.0 <= logged["rollout/score/letters"] <= 1.0
        assert "rollout/score/reward" in logged

    checkpoint = torch.load(seen.path, weights_only=True)
    assert checkpoint["hyper_parameters"]["rewards"]["brevity"] == BREVITY
    kept = {key for key in checkpoint["state_dict"] if key.startswith("reward.")}
    names = ("0_reward", "1_brevity", "2_letters")
    assert kept == {f"reward.moments.{n}.{b}" for n in names for b in ("mean", "m2", "count")}

    resumed = module(root, brevity=BREVITY, letters=LETTERS)
    fitted(resumed, prompts(root, **data), tmp_path / "resumed", ckpt_path=seen.path)
    assert_equal_states(copied(resumed), copied(whole))


class BrokenEstimates(PPOModule):
    """The critic is broken in the second iteration."""

    def estimate(self, rollouts: RolloutBatch) -> TokenStatistics:
        estimates = super().estimate(rollouts)
        return (
            estimates._replace(values=estimates.values * torch.nan)
            if self.iteration == 1
            else (estimates)
        )


@pytest.mark.filterwarnings("ignore:update of policy and critic skipped")
def test_a_skipped_iteration_leaves_the_moments_of_the_sources(root: Path, tmp_path: Path) -> None:
    options = ppo_options(
        root,
        rewards={"brevity": BREVITY},
        critic_init="policy",
        minibatches={"minibatch_size": 2},
    )
    stage = BrokenEstimates(**options)
    fitted(stage, prompts(root, batch_size=2), tmp_path)
    (moments,) = stage.reward.moments.values()
    assert float(moments.count) == 6.0  # of four iterations, one was skipped
    assert float(stage.score_moments.count) == 6.0


def test_validation_learns_nothing(root: Path, tmp_path: Path) -> None:
    stage = module(root, brevity=BREVITY)
    run = fitted(stage, prompts(root), tmp_path, limit_val_batches=1)
    assert [float(m.count) for m in stage.reward.moments.values()] == [8.0, 8.0]
    assert "val/rollout/score/brevity" in run.callback_metrics
    stage.sample(["hi"])


def test_a_remote_scorer_beside_a_reward_model(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(remote, "sleep", lambda seconds: None)
    busy = [True]

    def answer(request: dict[str, Any]) -> tuple[int, bytes]:
        if busy:
            busy.clear()
            return 503, b""
        return 200, json.dumps({"scores": [7.0] * len(request["responses"])}).encode()

    with service(answer) as (url, requests):
        stage = module(root, remote={"rule": "http", "url": url, "weight": 0.1, "batch_size": 3})
        with pytest.warns(UserWarning, match="status 503 and no body in attempt 1 of 5"):
            run = fitted(stage, prompts(root), tmp_path)
    assert float(run.callback_metrics["rollout/score/remote"]) == 7.0
    assert [len(request["responses"]) for request in requests] == [3, 3, 3, 2]
    assert all("Human: " in prompt for request in requests for prompt in request["prompts"])


def test_the_critic_starts_from_the_reward_model_and_not_from_a_rules_name(root: Path) -> None:
    first = {"brevity": BREVITY, str(root / "reward"): 1.0}
    PPOModule(**ppo_options(root, rewards=first))
    with pytest.raises(ValueError, match="holds functions and rules only; use critic_init: policy"):
        PPOModule(**ppo_options(root, rewards={"brevity": BREVITY}))
