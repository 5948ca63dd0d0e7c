"""What PPO refuses or warns of before it trains."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_rlhf.modules import PPOModule
from tests.modules.stages import fitted, ppo_options, prompts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy_optimizer.learning_rate": 0.0}, "learning_rate: expected a value > 0, got 0.0"),
        ({"reward_shaping.clip": -1.0}, "clip: expected a value > 0, got -1.0"),
        ({"reward_shaping.kl_coef": -0.1}, "kl_coef: expected a value >= 0, got -0.1"),
        ({"loss.ptx_coef": -0.1}, "ptx_coef: expected a value >= 0, got -0.1"),
        ({"advantages.gamma": 1.1}, r"gamma: expected a value in \[0, 1\], got 1.1"),
        ({"advantages.lam": -0.1}, r"lam: expected a value in \[0, 1\], got -0.1"),
        ({"minibatches.minibatch_size": 0}, "minibatch_size: expected a value > 0, got 0"),
        (
            {"network.dtype": "int8"},
            "dtype: expected one of float32, bfloat16, float16, got 'int8'",
        ),
        ({"rewards": {}}, "rewards: expected at least one entry"),
        ({"critic_init": "nothing"}, "critic_init: expected one of .* got 'nothing'"),
        (
            {"rewards": {"tests.rewards.reward_functions:length": 1.0}},
            "critic_init: 'reward' needs a reward model among `rewards`",
        ),
    ],
)
def test_an_option_out_of_range_is_named(root: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PPOModule(**ppo_options(root, **options))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sampling.top_p": 0.9}, "top_p=0.9"),
        ({"sampling.top_k": 5}, "top_k=5"),
        ({"sampling.repetition_penalty": 1.2}, "repetition_penalty=1.2"),
        ({"sampling.top_k": 5, "sampling.top_p": 0.9}, "top_p=0.9, top_k=5"),
    ],
)
def test_off_policy_sampling_is_declared(root: Path, options: dict[str, Any], named: str) -> None:
    with pytest.warns(UserWarning, match=f"^{named}: rollouts are sampled from a changed") as seen:
        module = PPOModule(**ppo_options(root, **options))
    assert "biased" in str(seen[0].message)
    for name, value in options.items():
        assert attrgetter(name)(module) == value


def test_on_policy_sampling_is_the_default_and_silent(root: Path) -> None:
    assert PPOModule(**ppo_options(root)).sampling.off_policy_options == ()


def test_a_reward_model_of_another_template_is_refused_with_both_renderings(
    root: Path, tmp_path: Path
) -> None:
    module = PPOModule(**ppo_options(root))
    start = {name: weight.clone() for name, weight in module.policy.state_dict().items()}
    with pytest.raises(ValueError, match="does not read what the policy writes") as refused:
        fitted(module, prompts(root, chat_template="paper-en"), tmp_path)
    message = str(refused.value)
    assert str(root / "reward") in message
    assert r"\n\nHuman: first question\n\nAssistant: first answer" in message
    assert "Human:first question</s>Assistant:first answer</s>" in message
    assert all(torch.equal(module.policy.state_dict()[k], v) for k, v in start.items())


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_the_contract_is_checked_whatever_the_model_is_used_for(
    root: Path, tmp_path: Path, command: str
) -> None:
    from tests.modules.stages import source, trainer

    data = prompts(root, chat_template="paper-en", test_sources=source(root, "prompts"))
    run = trainer(tmp_path, limit_val_batches=None)
    with pytest.raises(ValueError, match="does not read what the policy writes"):
        getattr(run, command)(PPOModule(**ppo_options(root)), datamodule=data)


def test_defaults_are_ppo_max_with_the_papers_values(root: Path) -> None:
    module = PPOModule(str(root / "policy"), {str(root / "reward"): 1.0})
    expected = {
        "policy_optimizer.learning_rate": 5e-7,
        "critic_optimizer.learning_rate": 1.65e-6,
        "policy_optimizer.warmup_ratio": 0.1,
        "critic_optimizer.warmup_ratio": 0.1,
        "advantages.gamma": 1.0,
        "advantages.lam": 0.95,
        "minibatches.minibatch_size": 32,
        "minibatches.ppo_epochs": 1,
        "reward_shaping.kl_coef": 0.05,
        "loss.ratio_clip": 0.2,
        "loss.value_clip": 0.2,
        "reward_shaping.clip": 0.8,
        "reward_shaping.normalization": True,
        "reward_shaping.scaling": False,
        "advantages.normalization": True,
        "loss.policy_objective": "clip",
        "policy_optimizer.grad_clip": 1.0,
        "critic_optimizer.grad_clip": 1.0,
        "loss.entropy_coef": 0.0,
        "loss.old_policy": "rollout",
        "advantages.truncation": "terminal",
    }
    assert {name: attrgetter(name)(module) for name in expected} == expected
