"""B1: a language model has no scores, and is refused wherever a reward model is used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_rlhf.forward import scalar_head_of
from lit_rlhf.models import ModelOptions, load_causal_lm, load_scalar_model
from lit_rlhf.modules import PPOModule, RewardModule
from lit_rlhf.rewards import ModelReward
from tests.support.stages import ppo_options, write_models

REFUSAL = r"^path: expected a reward model, got the language model in .*policy, whose scores"

ENTRANCES: dict[str, Callable[[Path, str], object]] = {
    "loader": lambda root, folder: load_scalar_model(folder),
    "loader with LoRA": lambda root, folder: load_scalar_model(folder, ModelOptions(lora_rank=2)),
    "loader of an ensemble": lambda root, folder: load_scalar_model(folder, heads=None),
    "shared weights": lambda root, folder: load_scalar_model(
        folder,
        ModelOptions(lora_rank=2),
        base=load_causal_lm(folder, ModelOptions(lora_rank=2)),
    ),
    "reward": lambda root, folder: ModelReward(folder, ModelOptions()),
    "PPO's reward": lambda root, folder: PPOModule(**ppo_options(root, rewards={folder: 1.0})),
    "one of PPO's rewards": lambda root, folder: PPOModule(
        **ppo_options(root, rewards={str(root / "reward"): 1.0, folder: 0.5})
    ),
    "PPO's critic": lambda root, folder: PPOModule(**ppo_options(root, critic_init=folder)),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `policy` and `reward`; read only."""
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_language_model_is_refused_where_scores_are_used(root: Path, entrance: str) -> None:
    with pytest.raises(ValueError, match=REFUSAL) as error:
        ENTRANCES[entrance](root, str(root / "policy"))
    assert "\n" not in str(error.value)


def test_language_model_starts_a_reward_model_and_a_critic_with_new_heads(root: Path) -> None:
    def head_of(model: Any) -> torch.Tensor:
        return scalar_head_of(model).get_parameter("weight")

    trained = RewardModule(str(root / "policy"), head_seed=1)
    critic = PPOModule(**ppo_options(root, critic_init="policy", seed=1)).critic
    new = load_scalar_model(root / "policy", head_seed=1)
    assert torch.equal(head_of(trained.model), head_of(new))
    assert torch.equal(head_of(critic), head_of(new))
    other = load_scalar_model(root / "policy", head_seed=2)
    assert not torch.equal(head_of(other), head_of(new))


def test_reward_model_keeps_its_head_for_any_seed(root: Path) -> None:
    stored = load_scalar_model(root / "reward").score.weight
    for seed in (None, 5):
        assert torch.equal(load_scalar_model(root / "reward", head_seed=seed).score.weight, stored)
