"""PPO with a sampler that draws from another distribution than the policy."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_rlhf.forward import LanguageModel
from lit_rlhf.modules import PPOModule
from lit_rlhf.rollout import RolloutBatch, SamplingOptions, generate_responses
from tests.support.stages import fitted, ppo_options, prompts


class Nucleus:
    """Draws from a nucleus, whatever the options say."""

    calls = 0

    def __init__(self, top_p: float = 0.6) -> None:
        self.top_p = top_p

    def __call__(
        self,
        model: LanguageModel,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        options: SamplingOptions,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        seed: int,
        batch_size: int | None = None,
    ) -> RolloutBatch:
        Nucleus.calls += 1
        options = replace(options, top_p=self.top_p)
        prompts = (prompt_ids, prompt_mask)
        rest = (eos_token_ids, pad_token_id, seed, batch_size)
        return generate_responses(model, *prompts, options, *rest)


def run(root: Path, folder: Path, cap: float | None) -> tuple[PPOModule, dict[str, Any]]:
    options = ppo_options(root, sampler=Nucleus(), **{"loss.importance_cap": cap})
    module = PPOModule(**options)
    trainer = fitted(module, prompts(root), folder, limit_val_batches=1)
    return module, dict(trainer.logged_metrics)


def test_a_sampler_draws_measured_and_weighted_rollouts(root: Path, tmp_path: Path) -> None:
    Nucleus.calls = 0
    module, logged = run(root, tmp_path / "weighted", 2.0)
    assert Nucleus.calls == 2  # training and validation
    assert logged["rollout/sampler_kl"] > 0.01
    assert logged["val/rollout/sampler_kl"] > 0.01
    plain, _ = run(root, tmp_path / "plain", None)
    weights = [torch.cat([p.flatten() for p in m.policy.parameters()]) for m in (module, plain)]
    assert not torch.equal(*weights)
    critics = [torch.cat([p.flatten() for p in m.critic.parameters()]) for m in (module, plain)]
    assert torch.equal(*critics)
