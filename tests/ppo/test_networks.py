"""The networks that PPO starts from."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_rlhf.forward import scalar_head_of
from lit_rlhf.models import ModelOptions, load_causal_lm, load_scalar_model, load_tokenizer
from lit_rlhf.ppo import PPOOptions, load_networks
from lit_rlhf.ppo.networks import CriticInit, load_critic
from tests.support.stages import write_models


@pytest.mark.parametrize("init", ["policy", "random"])
def test_head_of_a_new_critic_depends_on_the_seed(init: CriticInit, tmp_path: Path) -> None:
    path = str(write_models(tmp_path) / "policy")
    policy = load_causal_lm(path)
    critics = [
        load_critic(
            init, model_path=path, policy=policy, rewards=[], options=ModelOptions(), seed=seed
        )
        for seed in (1, 1, 2)
    ]
    heads = [scalar_head_of(critic).get_parameter("weight") for critic in critics]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_critic_of_an_earlier_run_is_loaded_and_one_of_other_tokens_refused(tmp_path: Path) -> None:
    path, folder = str(write_models(tmp_path) / "policy"), tmp_path / "reward"
    policy = load_causal_lm(path)
    given: dict[str, Any] = {
        "model_path": path,
        "policy": policy,
        "rewards": [],
        "options": ModelOptions(),
        "seed": 1,
    }
    critic = load_critic(str(folder), **given)
    for name, weight in load_scalar_model(folder).state_dict().items():
        assert torch.equal(critic.state_dict()[name], weight)
    policy.config.vocab_size += 1
    with pytest.raises(ValueError, match=r"critic_init: expected a critic of .*reward' of \d+"):
        load_critic(str(folder), **given)
    with pytest.raises(ValueError, match=r"critic_init: .* or a folder that exists, got 'no'"):
        load_critic("no", **given)


@pytest.mark.parametrize(
    ("critic_init", "folder"),
    [("reward", "reward"), ("policy", "policy"), ("random", "policy"), ("shared", "policy")],
)
def test_the_role_of_each_network_is_logged(
    critic_init: CriticInit, folder: str, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(root / "policy")
    with caplog.at_level(logging.INFO):
        load_networks(
            path,
            str(root / "reward"),
            options=PPOOptions(),
            network=ModelOptions(),
            tokenizer=load_tokenizer(path),
            critic_init=critic_init,
            seed=0,
        )
    networks = [line.partition(": packed forward")[0] for line in caplog.messages]
    assert networks == [
        f"policy: LlamaForCausalLM from {root}/policy",
        f"reference: LlamaForCausalLM from {root}/policy",
        f"reward model: LlamaForSequenceClassification from {root}/reward",
        f"critic: LlamaForSequenceClassification from {root}/{folder}",
    ]
