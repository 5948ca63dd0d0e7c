"""Checkpoints have the keys that earlier versions wrote, so that runs continue from them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_rlhf.modules import PPOModule
from tests.support.stages import copy_state, fit_module, ppo_options, prompts

# Dtype and shape by key of the state dict, from checkpoints that were written when `PPOModule` was
# itself the algorithm.
EARLIER: dict[str, dict[str, str]] = json.loads(
    Path(__file__).with_name("checkpoint_layout.json").read_text("utf-8")
)
REWARD = {"weight": 1.0, "normalize": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "ppo_max": {},
    "shared": {"critic_init": "shared"},
    "ensemble": {
        "rewards": {"reward": REWARD, "tests.support.reward_functions:ended": REWARD},
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_checkpoint_has_the_keys_of_earlier_versions(root: Path, tmp_path: Path, name: str) -> None:
    options = ppo_options(root, **OPTIONS[name])
    if name == "ensemble":
        options["rewards"] = {
            str(root / key) if key == "reward" else key: value
            for key, value in options["rewards"].items()
        }
    module = PPOModule(**options)
    run = fit_module(module, prompts(root), tmp_path, limit_train_batches=1)
    run.save_checkpoint(tmp_path / "run.ckpt")
    state = torch.load(tmp_path / "run.ckpt", weights_only=True)["state_dict"]
    written = {
        key: f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        for key, value in state.items()
    }
    assert written == EARLIER[name]
    rewards = options["rewards"]
    loaded = PPOModule.load_from_checkpoint(tmp_path / "run.ckpt", rewards=rewards)
    for key, value in copy_state(module.ppo).items():
        assert torch.equal(loaded.ppo.state_dict()[key], value), key
