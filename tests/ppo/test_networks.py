"""The networks that PPO starts from."""

from pathlib import Path

import pytest
import torch

from lit_rlhf.forward import scalar_head_of
from lit_rlhf.models import ModelOptions, load_causal_lm
from lit_rlhf.ppo.networks import CriticInit, load_critic
from tests.modules.stages import write_models


@pytest.mark.parametrize("init", ["policy", "random"])
def test_head_of_a_new_critic_depends_on_the_seed(init: CriticInit, tmp_path: Path) -> None:
    path = str(write_models(tmp_path) / "policy")
    policy = load_causal_lm(path)
    heads = [
        scalar_head_of(load_critic(init, path, policy, [], ModelOptions(), seed)).get_parameter(
            "weight"
        )
        for seed in (1, 1, 2)
    ]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
