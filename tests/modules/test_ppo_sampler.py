"""PPO with a sampler that draws from another distribution than the policy."""

from pathlib import Path
from typing import Any

import torch

from lit_rlhf.modules import PPOModule
from tests.support.nucleus import Nucleus
from tests.support.stages import first_batch, fit_module, ppo_options, prompts


def run(root: Path, folder: Path, cap: float | None) -> tuple[PPOModule, dict[str, Any]]:
    options = ppo_options(root, sampler=Nucleus(), **{"loss.importance_cap": cap})
    module = PPOModule(**options)
    trainer = fit_module(module, prompts(root), folder, limit_val_batches=1)
    return module, dict(trainer.logged_metrics)


def test_a_sampler_draws_measured_and_weighted_rollouts(root: Path, tmp_path: Path) -> None:
    Nucleus.calls = 0
    module, logged = run(root, tmp_path / "weighted", 2.0)
    assert Nucleus.calls == 3  # in training, and at validation for the policy and for its start
    assert logged["rollout/sampler_kl"] > 0.01
    assert logged["val/rollout/sampler_kl"] > 0.01
    plain, _ = run(root, tmp_path / "plain", None)
    weights = [torch.cat([p.flatten() for p in m.policy.parameters()]) for m in (module, plain)]
    assert not torch.equal(*weights)
    critics = [torch.cat([p.flatten() for p in m.critic.parameters()]) for m in (module, plain)]
    assert torch.equal(*critics)


def test_start_of_an_adapted_policy_is_sampled_without_its_sampler(root: Path) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("this sampler would take the weights with the adapters")

    module = PPOModule(**ppo_options(root, network={"lora_rank": 2}, sampler=refuse))
    batch = first_batch(prompts(root), root)
    assert module.ppo.score_start(batch, seed=1).shape == (8,)
