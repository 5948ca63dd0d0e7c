"""Several responses to each prompt of an iteration."""

from pathlib import Path
from typing import Any

import pytest

from lit_rlhf.data import PromptBatch
from lit_rlhf.modules import PPOModule
from lit_rlhf.ppo import PPO
from lit_rlhf.rollout import RolloutBatch
from tests.support.stages import fit_module, ppo_options, prompts

N = 3


class KeptPPO(PPO):
    """Keeps prompts, rollouts and ptx examples of its iterations."""

    def rollout(self, batch: PromptBatch, seed: int) -> RolloutBatch:
        rollouts = super().rollout(batch, seed)
        self.seen = [*getattr(self, "seen", []), (batch, rollouts)]
        return rollouts


class Kept(PPOModule):
    """A run of which all iterations are kept."""

    ppo_class = KeptPPO
    ppo: KeptPPO


def stage(root: Path, **options: Any) -> Kept:
    usual: dict[str, Any] = {"responses_per_prompt": N, "minibatches": {"minibatch_size": 2}}
    return Kept(**ppo_options(root, **(usual | options)))


def test_every_prompt_gets_responses_with_draws_of_their_own(root: Path, tmp_path: Path) -> None:
    linear = {"learning_rate": 1e-3, "lr_scheduler": "linear"}
    options: dict[str, Any] = {"policy_optimizer": linear, "loss.ptx_coef": 0.1}
    whole = stage(root, **options)
    run = fit_module(whole, prompts(root, ptx=True, batch_size=4), tmp_path)

    (batch, rollouts), _ = whole.ppo.seen
    assert len(set(batch.texts)) == 4
    assert batch.texts == [text for text in batch.texts[::N] for _ in range(N)]
    assert len(batch.ptx.input_ids) == 4 * N
    assert len(rollouts.response_ids) == int(whole.ppo.score_moments.count) / 2 == 4 * N
    for row in range(0, 4 * N, N):
        assert len({tuple(ids.tolist()) for ids in rollouts.response_ids[row : row + N]}) > 1
    # two iterations of six minibatches and two epochs
    assert int(whole.ppo.ppo_step) == 2 * 6 * 2
    schedule = whole.trained_networks()["policy"].schedule
    assert schedule.get_last_lr()[0] == pytest.approx(0.0, abs=1e-3 / 20)
    assert "rollout/kl" in run.callback_metrics


def test_a_held_out_prompt_gets_one_response(root: Path, tmp_path: Path) -> None:
    module = stage(root)
    fit_module(module, prompts(root), tmp_path, limit_val_batches=1)
    # an iteration, and a validation of the policy and of the start
    assert [len(batch.texts) for batch, _ in module.ppo.seen] == [8 * N, 8, 8]


def test_minibatches_divide_all_responses_of_an_iteration(root: Path, tmp_path: Path) -> None:
    module = stage(root, minibatches={"minibatch_size": 7})
    with pytest.raises(ValueError, match=r"divisor of the 24 rollouts .* times responses_per_prom"):
        fit_module(module, prompts(root), tmp_path)
