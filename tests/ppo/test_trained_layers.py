"""Only the top layers trained, and a critic on the policy's trunk: as the plain way computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_rlhf import forward
from lit_rlhf.forward.lower import decoder_layers
from lit_rlhf.functional import surrogate_loss, value_loss
from lit_rlhf.models import ModelOptions, load_causal_lm, load_scalar_model
from lit_rlhf.modules import PPOModule
from lit_rlhf.rewards import Scores
from lit_rlhf.rollout import Experience
from lit_rlhf.tools.doctor.memory import estimate_memory
from tests.support import doctor_runs, stages
from tests.support.doctor_runs import findings, not_ok
from tests.support.stages import copy_state, distance, fit_module, ppo_options, prompts
from tests.support.tiny_models import FAMILIES, tiny_config

LAYERS = 3
SEPARATE, SHARED = {"critic_init": "reward"}, {"critic_init": "shared"}
LORA = {"network.lora_rank": 2}


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of three layers, by family."""
    folders = {}
    for family in FAMILIES:
        config = tiny_config(family)
        config.num_hidden_layers = LAYERS
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:1] * LAYERS
        folders[family] = stages.write_models(
            stages.write_data(tmp_path_factory.mktemp(family)), config
        )
    return folders


def module_of(root: Path, **options: Any) -> PPOModule:
    return PPOModule(**ppo_options(root, **{"network.trained_layers": 1, **options}))


def experienced(module: PPOModule, root: Path) -> Experience:
    """Scored rollouts, with advantages and returns that are not zero."""
    batch = stages.first_batch(prompts(root), root)
    rollouts = module.ppo.rollout(batch, seed=3)
    scores = Scores(torch.linspace(-1, 1, len(batch.texts), dtype=torch.float64))
    estimates = module.ppo.estimate(rollouts)
    rewards = module.ppo.shape_rewards(rollouts, scores, estimates)
    return module.ppo.experience(rollouts, rewards, estimates).select(torch.tensor([5, 0, 2]))


def gradients(module: PPOModule, loss: Tensor) -> dict[str, Tensor]:
    networks = {"policy": module.policy, "critic": module.critic}
    named = {f"{n}.{k}": p for n, net in networks.items() for k, p in net.named_parameters()}
    module.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in named.items() if p.grad is not None}


def plain_losses(module: PPOModule, part: Experience, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Both losses by whole padded forwards of transformers."""
    ids, mask = part.rollouts.sequence_ids, part.rollouts.sequence_mask
    length = part.loss_mask.shape[1]
    logits = forward.response_logits(module.policy, ids, mask, length)
    logprobs = logits.log_softmax(-1).gather(2, part.rollouts.response_ids[..., None])[..., 0]
    positions, trunk = (mask.cumsum(1) - 1).clamp(min=0), forward.trunk_of(module.critic)
    arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": mask.long()}
    if "opt" not in type(trunk).__name__.lower():
        arguments["position_ids"] = positions
    hidden = trunk(**arguments, use_cache=False).last_hidden_state
    values = forward.scalar_head_of(module.critic)(hidden)[:, -length - 1 : -1, 0]
    policy_loss = surrogate_loss(
        logprobs=logprobs,
        old_logprobs=part.old_logprobs,
        advantages=part.advantages,
        mask=part.loss_mask,
        ratio_clip=module.loss.ratio_clip,
        denominator=tokens,
    ).loss
    critic_loss = value_loss(
        values=values,
        old_values=part.old_values,
        returns=part.returns,
        mask=part.loss_mask,
        value_clip=module.loss.value_clip,
        denominator=tokens,
    ).loss
    return policy_loss, critic_loss


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, SEPARATE) for family in FAMILIES),
        *((family, SHARED) for family in ("llama", "qwen3", "gpt2")),
        ("llama", SEPARATE | LORA),
        ("llama", SHARED | LORA),
        ("llama", SEPARATE | {"network.gradient_checkpointing": True}),
        ("llama", SHARED | {"network.trained_layers": None}),
    ],
)
def test_gradients_of_trained_layers_equal_those_of_whole_networks(
    roots: dict[str, Path], family: str, options: dict[str, Any]
) -> None:
    root = roots[family]
    module = module_of(root, **options)
    module.double()
    experience = experienced(module, root)
    tokens = experience.loss_mask.sum()
    lower_states = [experience.policy_lower, experience.critic_lower]
    n_lower = LAYERS - 1 if module.network.trained_layers else 0
    assert forward.forward_plan(module.policy).lower_layers == n_lower
    # float64 is scored by a forward of its own, and the critic's are the policy's where shared
    expected = [n_lower > 0 and not module.ppo.shares_trunk, n_lower > 0]
    assert [states is not None for states in lower_states] == expected
    module.train()
    policy, critic = plain_losses(module, experience, tokens)
    coef = module.loss.value_coef if module.ppo.shares_trunk else 1.0
    plain = gradients(module, policy + coef * critic)
    assert not any(".layers.0." in name or ".h.0." in name for name in plain) or not n_lower
    ours = []
    for part in (experience, replace(experience, policy_lower=None, critic_lower=None)):
        if module.ppo.shares_trunk:
            loss, metrics = module.ppo.joint_loss(part, tokens)
            assert metrics["ppo/policy_loss"].item() == pytest.approx(policy.item())
            assert metrics["ppo/value_loss"].item() == pytest.approx(critic.item())
        else:
            loss = module.ppo.policy_loss(part, tokens).loss
            loss = loss + module.ppo.critic_loss(part, tokens).loss
        actual = gradients(module, loss)
        assert actual.keys() == plain.keys()
        # log-probs are float32: from 4 nats on, one unit in the last place is 4.8e-7
        for name, gradient in plain.items():
            assert (actual[name] - gradient).norm() <= 5e-6 * gradient.norm() + 1e-12, name
        ours.append(actual)
    for name, gradient in ours[0].items():
        assert (ours[1][name] - gradient).norm() <= 1e-12 * gradient.norm() + 1e-15, name


def test_only_the_top_layers_move_and_what_is_kept_changes_nothing(
    roots: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, ends = roots["llama"], []
    for keeps_lower in (True, False):
        monkeypatch.setattr(forward.lower, "MAX_LOWER_BYTES", 2**30 if keeps_lower else 0)
        module = module_of(root, **{"minibatches.micro_batch_size": 3})
        before = copy_state(module)
        fit_module(module, prompts(root), tmp_path / str(keeps_lower))
        ends.append(copy_state(module))
        moved = {name for name, weight in ends[-1].items() if not torch.equal(weight, before[name])}
        assert {n for n in moved if n.startswith(("policy.model", "critic.model"))} == {
            f"{network}.model.{name}"
            for network in ("policy", "critic")
            for name, _ in forward.trunk_of(module.policy).named_parameters()
            if name.startswith(("layers.2.", "norm."))
        }
    assert distance(*ends) < 1e-5
    policy, reference = forward.trunk_of(module.policy), forward.trunk_of(module.reference)
    assert reference.embed_tokens.weight is policy.embed_tokens.weight
    assert reference.layers[1].mlp.up_proj.weight is policy.layers[1].mlp.up_proj.weight


def test_sampling_in_float32_takes_the_states_of_the_reference(roots: dict[str, Path]) -> None:
    module = module_of(roots["llama"])
    experience = experienced(module, roots["llama"])
    mask = experience.rollouts.sequence_mask
    inputs = {"attention_mask": mask.long(), "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    network, ids = forward.unwrap_model(module.policy), experience.rollouts.sequence_ids
    hidden = network(ids, **inputs, output_hidden_states=True).hidden_states[LAYERS - 1]
    torch.testing.assert_close(experience.policy_lower[mask], hidden[mask], rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        layers = [network.model.layers[0].mlp for network in (module.policy, module.reference)]
        layers[1].up_proj.weight = torch.nn.Parameter(layers[0].up_proj.weight * 2)
    assert experienced(module, roots["llama"]).policy_lower is None


@pytest.mark.parametrize("extra", [{}, LORA])
def test_shared_critic_is_saved_and_resumed(
    roots: dict[str, Path], tmp_path: Path, extra: dict[str, Any]
) -> None:
    root, arguments = roots["llama"], {"max_epochs": 2}
    ends = []
    for name, path in (("whole", None), ("resumed", tmp_path / "first.ckpt")):
        module = module_of(root, **SHARED, **extra)
        run = fit_module(module, prompts(root), tmp_path / name, ckpt_path=path, **arguments)
        ends.append(copy_state(module))
        if path is None:
            first = module_of(root, **SHARED, **extra)
            one = fit_module(
                first, prompts(root), tmp_path / "one", **{**arguments, "max_epochs": 1}
            )
            one.save_checkpoint(tmp_path / "first.ckpt")
    assert (distance(*ends), len(run.optimizers)) == (0, 1)
    assert len(run.optimizers[0].param_groups) >= 2
    folder = tmp_path / "whole" / "model"
    policy, critic = load_causal_lm(folder), load_scalar_model(folder / "critic")
    ids = torch.arange(5, 13)[None]
    mask = torch.ones_like(ids, dtype=torch.bool)
    with torch.no_grad():
        logits = forward.token_logits(policy, ids, mask)
        torch.testing.assert_close(logits, forward.token_logits(module.policy, ids, mask))
    head = module.policy.state_dict()
    (weight,) = (value for name, value in head.items() if name.endswith("value_head.weight"))
    assert torch.equal(forward.scalar_head_of(critic).weight, weight)


def test_trained_layers_that_cannot_be_are_refused(roots: dict[str, Path]) -> None:
    root = roots["llama"]
    with pytest.raises(ValueError, match="trained_layers: expected at most the 3 layers"):
        module_of(root, **{"network.trained_layers": 4})
    with pytest.raises(ValueError, match=r"critic_pretraining.iterations: expected 0 with"):
        module_of(root, **SHARED, **{"critic_pretraining.iterations": 1})
    with pytest.raises(ValueError, match="trained_layers"):
        ModelOptions(trained_layers=0)
    assert len(decoder_layers(forward.trunk_of(module_of(root).policy))) == LAYERS


@pytest.mark.parametrize("options", [SEPARATE, SHARED])
def test_doctor_finds_nothing_but_missing_ends_with_trained_layers(
    roots: dict[str, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    root, options = roots["llama"], {"network.trained_layers": 1, **options}
    # the tiny model of three layers rarely ends
    assert not_ok(findings(root, tmp_path, doctor_runs.module_of(root, **options))).keys() <= {
        "EOS"
    }
    case = doctor_runs.case_of(root, tmp_path, **options)
    module = case.module
    networks = [module.policy, *([] if module.ppo.shares_trunk else [module.critic])]
    n_weights = sum(p.numel() for network in networks for p in network.parameters())
    n_trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    # without an engine, each trained weight has two moments
    assert estimate_memory(case).trained == 4 * (n_weights + 2 * n_trained)
