"""`PPO.update`: which steps it makes, with a Trainer and without."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lit_rlhf.data import PromptBatch
from lit_rlhf.finite import NotFiniteError
from lit_rlhf.micro_batches import LossShare, NetworkUpdate, accumulate
from lit_rlhf.models import ModelOptions
from lit_rlhf.modules import PPOModule
from lit_rlhf.ppo import (
    PPO,
    CriticPretrainingOptions,
    NetworkName,
    OptimizerStepper,
    PPOOptions,
    iteration_draws,
    load_networks,
)
from tests.support.stages import assert_equal_states, copy_state, fit_module, ppo_options, prompts


class Batches(Callback):
    """The prompts of each iteration."""

    def __init__(self) -> None:
        self.seen: list[PromptBatch] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: object) -> None:
        self.seen.append(batch)


class CountingStepper:
    """Makes no step, and counts what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def update(self, network: NetworkName, shares: Any) -> NetworkUpdate:
        metrics = accumulate(shares, lambda loss: None)
        self.calls.append(network)
        return NetworkUpdate(metrics, grad_norm=torch.tensor(1.0), applied=network == "policy")

    def end_minibatch(self, trains_policy: bool) -> None:
        self.calls.append("policy too" if trains_policy else "critic only")


def algorithm(root: Path, module: PPOModule, **changes: Any) -> PPO:
    """The algorithm of a module again, with networks of its own."""
    options = PPOOptions(
        sampling=module.sampling,
        reward_shaping=module.reward_shaping,
        advantages=module.advantages,
        loss=module.loss,
        minibatches=module.minibatches,
        critic_pretraining=module.critic_pretraining,
    )
    options = options._replace(**changes)
    networks = load_networks(
        str(root / "policy"),
        {str(root / "reward"): 1.0},
        options=options,
        network=ModelOptions(),
        tokenizer=module.tokenizer,
        critic_init="reward",
        seed=0,
    )
    return PPO(networks, options)


def test_loop_without_a_trainer_ends_with_the_weights_of_one(root: Path, tmp_path: Path) -> None:
    options = {"loss.ptx_coef": 0.3, "reward_shaping": {"kl_target": 0.5, "kl_horizon": 50}}
    module, batches = PPOModule(**ppo_options(root, **options)), Batches()
    ppo = algorithm(root, module)
    fit_module(module, prompts(root, ptx=True, batch_size=4), tmp_path, callbacks=[batches])
    policy, critic = ppo.networks.policy, ppo.networks.critic
    assert critic is not None
    stepper = OptimizerStepper(
        {
            "policy": module.build_optimizer(policy, module.policy_optimizer),
            "critic": module.build_optimizer(critic, module.critic_optimizer),
        },
        grad_clip=1.0,
    )
    assert len(batches.seen) == 2
    for iteration, batch in enumerate(batches.seen):
        draws = iteration_draws(seed=0, iteration=iteration, rank=0)
        collected = ppo.collect(batch, draws.rollout_seed)
        metrics = ppo.measure(collected).compute()
        lesson = ppo.learn_from(collected)
        ppo.adapt_kl_coef(kl=float(metrics["rollout/kl"]), n_rollouts=len(batch.texts))
        ppo.update(lesson.experience, stepper, draws.generator, batch.ptx)
    assert_equal_states(copy_state(ppo), copy_state(module.ppo))
    assert_equal_states(copy_state(policy), copy_state(module.policy))
    assert_equal_states(copy_state(critic), copy_state(module.critic))


def test_update_steps_the_policy_after_critic_pretraining(root: Path, tmp_path: Path) -> None:
    module, batches = PPOModule(**ppo_options(root)), Batches()
    fit_module(module, prompts(root), tmp_path, callbacks=[batches])
    phase = CriticPretrainingOptions(iterations=1)
    ppo, stepper = algorithm(root, module, critic_pretraining=phase), CountingStepper()
    collected = ppo.collect(batches.seen[0], seed=1)
    experience = ppo.learn_from(collected).experience
    generator = torch.Generator().manual_seed(0)
    assert ppo.in_critic_pretraining()
    first = ppo.update(experience, stepper, generator)
    # two passes of two minibatches each
    assert stepper.calls == ["critic", "critic only"] * 4
    assert not ppo.in_critic_pretraining()
    stepper.calls = []
    second = ppo.update(experience, stepper, generator)
    assert stepper.calls == ["critic", "policy", "policy too"] * 4
    assert (int(ppo.iteration), int(ppo.ppo_step), int(ppo.pretraining_length)) == (2, 4, 1)
    # this stepper skips the critic's updates
    assert torch.isnan(first["ppo/value_loss"])
    assert "ppo/policy_loss" not in first
    assert float(second["ppo/policy_grad_norm"]) == 1.0


def test_numbers_that_are_not_finite_change_nothing(root: Path, tmp_path: Path) -> None:
    module, batches = PPOModule(**ppo_options(root)), Batches()
    fit_module(module, prompts(root), tmp_path, callbacks=[batches])
    ppo = algorithm(root, module)
    collected = ppo.collect(batches.seen[0], seed=1)
    before = copy_state(ppo)
    collected.estimates.values[0, 0] = torch.nan
    with pytest.raises(NotFiniteError, match=r"NaN or infinity in values of the critic$") as error:
        ppo.learn_from(collected)
    assert error.value.names == ["values of the critic"]
    assert_equal_states(copy_state(ppo), before)
    with torch.no_grad():
        next(ppo.networks.policy.parameters())[0, 0] = torch.inf
    with pytest.raises(NotFiniteError, match=r"weights of the policy \("):
        ppo.require_finite_policy()


def test_plain_stepper_clips_each_network_and_skips_what_is_not_finite() -> None:
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    stepper = OptimizerStepper({"policy": torch.optim.SGD([weight], lr=1.0)}, grad_clip=1.0)

    def shares(factor: float) -> Iterator[LossShare]:
        for _ in range(2):
            # the gradient of both together is the weight itself
            loss = factor * weight.square().sum() / 4
            yield LossShare(loss, {"x/loss": loss})

    update = stepper.update("policy", shares(1.0))
    assert update.applied
    assert float(update.grad_norm) == pytest.approx(5.0)
    assert float(update.metrics["x/loss"]) == pytest.approx(12.5)
    assert weight.tolist() == pytest.approx([3.0 - 0.6, 4.0 - 0.8])
    update = stepper.update("policy", shares(torch.nan))
    assert not update.applied
    assert weight.tolist() == pytest.approx([2.4, 3.2])
    assert weight.grad is None


def test_plain_stepper_clips_nothing_without_a_bound() -> None:
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    stepper = OptimizerStepper({"policy": torch.optim.SGD([weight], lr=0.5)}, grad_clip=None)
    loss = weight.square().sum() / 2
    stepper.update("policy", [LossShare(loss, {"x/loss": loss})])
    assert weight.tolist() == [1.5, 2.0]


def test_phase_overridden_in_the_module_is_refused_with_its_place() -> None:
    with pytest.raises(TypeError, match=r"Wrong\.shape_rewards: expected on a subclass of .*PPO"):

        class Wrong(PPOModule):
            def shape_rewards(self, *arguments: Any) -> Any:
                return None
