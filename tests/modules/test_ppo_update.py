"""PPO's update: ratios, ptx, clip norms, critic pre-training."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from lit_rlhf.modules import PPOModule
from lit_rlhf.ppo import PPO, LossShare
from lit_rlhf.rollout import Experience, RolloutBatch
from tests.support.stages import (
    StepRecorder,
    assert_equal_states,
    copy_state,
    distance,
    fit_module,
    ppo_options,
    prompts,
    write_data,
    write_models,
)
from tests.support.tiny_models import with_dropout


class RecordingPPO(PPO):
    """Keeps what each minibatch's first policy loss reported, and the iterations' metrics."""

    policy_losses: list[dict[str, float]]
    updates: list[dict[str, float]]

    def policy_loss(self, experience: Experience, tokens: Tensor) -> LossShare:
        share = super().policy_loss(experience, tokens)
        self.policy_losses.append({key: float(v.detach()) for key, v in share.metrics.items()})
        return share

    def update(self, *arguments: Any) -> dict[str, Tensor]:
        means = super().update(*arguments)
        self.updates.append({key: float(value) for key, value in means.items()})
        return means


class Recording(PPOModule):
    """A run of `RecordingPPO`."""

    ppo_class = RecordingPPO
    ppo: RecordingPPO

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.ppo.policy_losses = []
        self.ppo.updates = []


@pytest.fixture(scope="module", params=["gpt2", "llama", "opt"])
def dropout_root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(write_data(tmp_path_factory.mktemp("dropout")), with_dropout(request.param))


COOLER = {"sampling.temperature": 0.7}
ADAPTED = {"network.lora_rank": 2, "network.lora_dropout": 0.5}
ADAPTED |= {"network.gradient_checkpointing": True}


@pytest.mark.parametrize("options", [{}, COOLER, COOLER | ADAPTED])
def test_first_ratio_is_one(dropout_root: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    module = Recording(**ppo_options(dropout_root, **options))
    logged = fit_module(module, prompts(dropout_root), tmp_path).callback_metrics
    first, later = module.ppo.policy_losses[0], module.ppo.policy_losses[-1]
    assert first["ppo/ratio"] == pytest.approx(1.0, abs=1e-5)
    # exp(x) - 1 - x of every token's log ratio x: not an average that cancels
    assert first["ppo/approx_kl"] < 1e-9
    assert later["ppo/approx_kl"] > 1e-7
    of_first = float(logged["ppo/ratio_first"])
    assert of_first == pytest.approx(float(first["ppo/ratio"]), abs=1e-7)
    assert abs(float(logged["rollout/kl"])) < 1e-4


def test_critic_pretraining_keeps_the_policy_and_ends(root: Path, tmp_path: Path) -> None:
    module = Recording(**ppo_options(root, critic_pretraining={"iterations": 2}))
    start = copy_state(module.policy)
    policies, states, steps, critics = [], [], [], []

    class Watch(StepRecorder):
        def on_train_batch_end(self, trainer: Any, *_: object) -> None:
            policies.append(copy_state(module.policy))
            critics.append(copy_state(module.critic))
            states.append(len(trainer.optimizers[0].state))
            steps.append(int(module.ppo.ppo_step))

    watch = Watch()
    fit_module(module, prompts(root, batch_size=4), tmp_path, max_epochs=2, callbacks=[watch])
    assert len(policies) == 4
    for policy in policies[:2]:
        assert_equal_states(policy, start)
    assert states[:2] == [0, 0]  # no moments and no step counts
    assert (steps, len(watch.steps["policy"])) == ([0, 0, 2, 4], 4)
    assert distance(policies[2], start) > 0
    assert distance(critics[1], critics[0]) > 0
    assert len(watch.steps["critic"]) == 8
    # what is not trained is not reported
    assert "ppo/policy_loss" not in module.ppo.updates[0]
    assert "ppo/policy_loss" in module.ppo.updates[2]


def test_critic_pretraining_ends_at_a_value_loss(root: Path, tmp_path: Path) -> None:
    def run(target: float | None) -> Recording:
        phase = {"iterations": 4, "target_value_loss": target}
        options = {"critic_optimizer.learning_rate": 1e-2, "loss.value_clip": None}
        module = Recording(**ppo_options(root, critic_pretraining=phase, **options))
        fit_module(module, prompts(root), tmp_path / str(target), max_epochs=5)
        return module

    slow = run(None)
    assert [("ppo/policy_loss" in update) for update in slow.ppo.updates] == [False] * 4 + [True]
    losses = [update["ppo/value_loss"] for update in slow.ppo.updates]
    assert losses[2] < min(losses[:2])
    quick = run(losses[2])  # at most the target is enough
    assert [("ppo/policy_loss" in update) for update in quick.ppo.updates] == [False] * 3 + [
        True
    ] * 2


def test_iteration_without_anything_to_learn_from_moves_nothing(root: Path, tmp_path: Path) -> None:
    class NothingEnds(RecordingPPO):
        def rollout(self, *arguments: Any, **options: Any) -> RolloutBatch:
            rollouts = super().rollout(*arguments, **options)
            return rollouts._replace(terminated=torch.zeros_like(rollouts.terminated))

    class Unending(Recording):
        ppo_class = NothingEnds

    module = Unending(**ppo_options(root, advantages={"truncation": "mask"}))
    start = copy_state(module.policy)
    with pytest.warns(
        UserWarning, match="truncation: mask leaves nothing to learn from, because all"
    ):
        run = fit_module(module, prompts(root), tmp_path)
    assert_equal_states(copy_state(module.policy), start)
    (update,) = module.ppo.updates
    assert update == {}
    assert "ppo/ratio_first" not in run.callback_metrics
    assert all(torch.isfinite(value) for value in run.callback_metrics.values())


def test_rollouts_are_divided(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = PPOModule(**ppo_options(root, minibatches={"minibatch_size": 3, "ppo_epochs": 2}))
    rollout = Mock(side_effect=AssertionError("refused only after a rollout"))
    monkeypatch.setattr(module.ppo, "rollout", rollout)
    with pytest.raises(ValueError, match=r"minibatch_size: expected a divisor of the 8 rollouts"):
        fit_module(module, prompts(root), tmp_path)
    # a loader's last batch may be shorter than a minibatch
    assert [module.minibatches.updates_per_iteration(n) for n in (9, 3, 2)] == [6, 2, 2]
