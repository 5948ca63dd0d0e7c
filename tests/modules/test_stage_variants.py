"""LoRA, bf16 and gradient checkpointing in all three stages."""

import copy
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback

from lit_rlhf.forward import unwrap_model
from lit_rlhf.models import load_scalar_model, save_model_folder
from lit_rlhf.modules import PPOModule
from tests.support import stages

LOSSES = {"sft": "sft/loss", "reward": "reward/loss", "ppo": "ppo/value_loss"}
STAGES = tuple(LOSSES)


def stage(name: str, root: Path, **options: Any) -> tuple[LightningModule, LightningDataModule]:
    rate = {"learning_rate": 1e-2}
    usual: dict[str, Any] = {"optimizer": rate | {"warmup_ratio": 0.0}}
    if name == "ppo":  # one minibatch: what is logged does not depend on a step
        usual = {"minibatches": {"minibatch_size": 8, "ppo_epochs": 1}}
        usual |= {"policy_optimizer": rate, "critic_optimizer": rate}
    return stages.stage(name, root, 8, **usual, **options)


def networks(module: LightningModule) -> list[torch.nn.Module]:
    if isinstance(module, PPOModule):
        return [module.policy, module.critic]
    return [module.model]  # type: ignore[list-item]


@pytest.mark.parametrize("name", STAGES)
def test_lora_trains_adapters_and_heads_alone(root: Path, tmp_path: Path, name: str) -> None:
    module, data = stage(name, root, network={"lora_rank": 2})
    before = stages.copy_state(module)
    kls: list[float] = []

    def note(run: Trainer, *_: object) -> None:
        kls.append(float(run.callback_metrics.get("rollout/kl", 0.0)))

    noting = LambdaCallback(on_train_batch_end=note)
    run = stages.fit_module(module, data, tmp_path, max_epochs=2, callbacks=[noting])
    moved = {key for key, v in stages.copy_state(module).items() if not torch.equal(v, before[key])}
    weights = {key for key in moved if key in dict(module.named_parameters())}
    assert weights
    assert all(".lora_" in key or "score.modules_to_save" in key for key in weights)
    for network in networks(module):
        assert any(".lora_B" in key for key, _ in network.named_parameters())
    assert torch.isfinite(run.callback_metrics[LOSSES[name]])
    if isinstance(module, PPOModule):
        assert module.reference is None
        assert {key.partition(".")[0] for key in weights} == {"policy", "critic"}
        # the reference is where the policy started
        assert abs(kls[0]) < 1e-4 < abs(float(run.callback_metrics["rollout/kl"]))
        assert any("score" in key for key in weights)


@pytest.mark.parametrize("init", ["policy", "reward"])
def test_weights_below_adapters_are_held_once(root: Path, tmp_path: Path, init: str) -> None:
    """The same run as with copies, and every frozen weight of critic and base is one tensor."""
    runs = []
    for separate in (False, True):
        module, data = stage("ppo", root, network={"lora_rank": 2}, critic_init=init)
        base = module.policy if init == "policy" else module.reward
        base_weights = {id(p) for p in base.parameters()}
        new_names = [n for n, p in module.critic.named_parameters() if id(p) not in base_weights]
        assert all(".lora_" in name or ".score." in name for name in new_names)
        if separate:
            module.critic = copy.deepcopy(module.critic)
            module.ppo.networks = module.ppo.networks._replace(critic=module.critic)
        run = stages.fit_module(module, data, tmp_path / str(separate))
        run.save_checkpoint(tmp_path / f"{separate}.ckpt")
        runs.append(stages.copy_state(module))
    stages.assert_equal_states(*runs)
    if init == "policy":  # a checkpoint has no reward model
        sizes = [(tmp_path / f"{separate}.ckpt").stat().st_size for separate in (False, True)]
        assert sizes[0] < sizes[1]

    again = PPOModule.load_from_checkpoint(tmp_path / "False.ckpt")
    stages.assert_equal_states(stages.copy_state(again), runs[0])


def test_critic_keeps_its_weights_when_reward_model_is_another(root: Path, tmp_path: Path) -> None:
    module, data = stage("ppo", root, network={"lora_rank": 2})
    stages.fit_module(module, data, tmp_path).save_checkpoint(tmp_path / "ppo.ckpt")
    other = load_scalar_model(root / "reward")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    save_model_folder(other, module.tokenizer, tmp_path / "other")

    rewards = {str(tmp_path / "other"): 1.0}
    changed = PPOModule.load_from_checkpoint(tmp_path / "ppo.ckpt", rewards=rewards)

    before, after = stages.copy_state(module), stages.copy_state(changed)
    unlike = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert {name.partition(".")[0] for name in unlike} == {"reward"}
    assert len([n for n in unlike if n.startswith("reward.functions.")]) == len(other.state_dict())


@pytest.mark.parametrize("name", STAGES)
def test_gradient_checkpointing_changes_memory_alone(root: Path, tmp_path: Path, name: str) -> None:
    runs = []
    for on in (False, True):
        module, data = stage(name, root, network={"gradient_checkpointing": on})
        for network in networks(module):
            modules = unwrap_model(network).modules()
            assert any(getattr(m, "gradient_checkpointing", False) for m in modules) is on
            assert network.training
        stages.fit_module(module, data, tmp_path / str(on))
        runs.append(stages.copy_state(module))
        for network in networks(module):
            assert network.training  # rollouts put the mode back: it acts in training mode only
    assert stages.distance(*runs) < 1e-6


@pytest.mark.parametrize("name", STAGES)
def test_bf16_mixed_follows_fp32(root: Path, tmp_path: Path, name: str) -> None:
    losses = []
    for precision in ("32-true", "bf16-mixed"):
        module, data = stage(name, root)
        run = stages.fit_module(module, data, tmp_path / precision, precision=precision)
        losses.append(float(run.callback_metrics[LOSSES[name]]))
        assert all(p.dtype == torch.float32 for p in module.parameters())
        if isinstance(module, PPOModule):
            assert module.ppo.score_moments.count.dtype == torch.float64
            assert float(run.callback_metrics["ppo/ratio_first"]) == pytest.approx(1.0, abs=0.02)
    # rollouts of bf16 are other draws: PPO's loss is of the same size only
    assert losses[1] == pytest.approx(losses[0], rel=0.5 if name == "ppo" else 0.02)


@pytest.mark.filterwarnings("ignore:.* rounded back to what they were:UserWarning")
@pytest.mark.parametrize("name", STAGES)
def test_weights_in_bf16_train(root: Path, tmp_path: Path, name: str) -> None:
    module, data = stage(name, root, network={"dtype": "bfloat16"})
    before, run = stages.copy_state(module), stages.fit_module(module, data, tmp_path)
    for network in networks(module):
        assert {p.dtype for p in network.parameters()} == {torch.bfloat16}
    assert stages.distance(stages.copy_state(module), before) > 0
    assert torch.isfinite(run.callback_metrics[LOSSES[name]])


@pytest.mark.filterwarnings("ignore:.* rounded back to what they were:UserWarning")
def test_true_bf16_rounds_weights_and_no_state_of_ppo(root: Path, tmp_path: Path) -> None:
    shaping = {"kl_coef": 0.1, "kl_target": 0.5, "kl_horizon": 10_000}
    module = PPOModule(**stages.ppo_options(root, reward_shaping=shaping))
    module.ppo.iteration.fill_(256)  # bf16 goes on with 258
    run = stages.fit_module(module, stages.prompts(root), tmp_path, precision="bf16-true")
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert int(module.ppo.iteration) == 257
    # eight rollouts move it by at most 20 % * 8 / 10,000; the next number of bf16 is 0.5 % away
    assert 1e-12 < abs(float(module.ppo.kl_coef) / 0.1 - 1) < 0.2 * 8 / 10_000 + 1e-12

    run.save_checkpoint(tmp_path / "ppo.ckpt")
    again = PPOModule.load_from_checkpoint(tmp_path / "ppo.ckpt", weights_only=True)
    assert again.state_dict()["kl_coef"].dtype == torch.float64
    assert float(again.ppo.kl_coef) == float(module.ppo.kl_coef)


def test_half_precision_with_a_loss_scale_is_refused(root: Path, tmp_path: Path) -> None:
    module, data = stage("sft", root)
    scaler = patch.object(Trainer, "scaler", PropertyMock(return_value=object()))
    with scaler, pytest.raises(ValueError, match="precision: expected 32-true, bf16-mixed"):
        stages.fit_module(module, data, tmp_path)
