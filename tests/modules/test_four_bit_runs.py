"""The three stages with weights in 4 bits."""

from pathlib import Path

import pytest
import torch

from lit_rlhf.export import load_checkpoint_model
from lit_rlhf.models import load_causal_lm, load_scalar_model
from lit_rlhf.modules import PPOModule, RewardModule, SFTModule
from tests.support import stages
from tests.support.tiny_models import four_bit_config

QLORA = {"lora_rank": 2, "load_in_4bit": True, "gradient_checkpointing": True}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stages of networks that are wide enough for bitsandbytes; read only."""
    pytest.importorskip("bitsandbytes", reason="the extra `bitsandbytes` is not installed")
    root = stages.write_models(tmp_path_factory.mktemp("wide"), four_bit_config())
    return stages.write_data(root)


def ppo(root: Path, **options: object) -> PPOModule:
    return PPOModule(**stages.ppo_options(root, network=QLORA, **options))


def test_4_bit_weights_are_not_trained(root: Path) -> None:
    with pytest.raises(ValueError, match=r"network\.load_in_4bit: expected network\.lora_rank > 0"):
        SFTModule(str(root / "policy"), network={"load_in_4bit": True})


@pytest.mark.slow  # three runs
@pytest.mark.parametrize("init", ["policy", "reward"])
def test_ppo_resumes_and_is_exported_as_it_was(wide: Path, tmp_path: Path, init: str) -> None:
    module = ppo(wide, critic_init=init)
    before = stages.copy_state(module)
    assert not any("proj.base_layer" in name for name in before)
    run = stages.fit_module(module, stages.prompts(wide), tmp_path / "first")
    run.save_checkpoint(tmp_path / "first.ckpt")
    assert stages.distance(stages.copy_state(module), before) > 0

    resumed, whole = ppo(wide, critic_init=init), ppo(wide, critic_init=init)
    start = {"ckpt_path": tmp_path / "first.ckpt"}
    run = stages.fit_module(
        resumed, stages.prompts(wide), tmp_path / "resumed", max_epochs=2, **start
    )
    stages.fit_module(whole, stages.prompts(wide), tmp_path / "whole", max_epochs=2)
    stages.assert_equal_states(stages.copy_state(resumed), stages.copy_state(whole))
    run.save_checkpoint(tmp_path / "last.ckpt")

    load_checkpoint_model(tmp_path / "last.ckpt", "critic").save(tmp_path / "critic")
    load = load_scalar_model
    whole = tmp_path / "whole" / "model" / "critic"
    stages.assert_equal_states(
        stages.copy_state(load(tmp_path / "critic")), stages.copy_state(load(whole))
    )
    with pytest.raises(ValueError, match="critic_init: expected 'policy' or 'reward'"):
        ppo(wide, critic_init="random")


def test_offloaded_networks_are_whole(wide: Path, tmp_path: Path) -> None:
    module = ppo(wide, memory={"offload_frozen": True}, critic_init="policy")
    assert {p.dtype for p in module.reward.models[0].model.network.parameters()} == {torch.float32}
    run = stages.fit_module(module, stages.prompts(wide), tmp_path)
    assert run.callback_metrics["rollout/score"].isfinite()


def test_sft_and_reward_models_train_below_4_bit_weights(wide: Path, tmp_path: Path) -> None:
    optimizer = {"learning_rate": 1e-2}
    for kind, data, name in (
        (SFTModule, stages.demonstrations, "sft"),
        (RewardModule, stages.preferences, "reward"),
    ):
        module = kind(str(wide / "policy"), network=QLORA, optimizer=optimizer)
        run = stages.fit_module(module, data(wide), tmp_path / name, max_epochs=3)
        assert run.callback_metrics[f"{name}/loss"].isfinite()
    whole = load_causal_lm(tmp_path / "sft" / "model")  # a folder without bitsandbytes
    assert not hasattr(whole.config, "quantization_config")
