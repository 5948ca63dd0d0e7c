"""PPO without a Trainer: the phases of an iteration from two tiny models."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from lit_rlhf.data import PromptBatch
from lit_rlhf.forward import freeze, optimize_forward
from lit_rlhf.models import ModelOptions
from lit_rlhf.models.heads import build_scalar_model
from lit_rlhf.ppo import PPO, AdvantageOptions, PPONetworks, PPOOptions, RewardShapingOptions
from lit_rlhf.rewards import WeightedReward
from lit_rlhf.rollout import SamplingOptions
from tests.support.tiny_models import EOS_ID, optimized_causal_lm, tiny_causal_lm, tiny_tokenizer

LENGTH = 5


def count_tokens(prompts: list[str], responses: list[str], lengths: list[int]) -> list[float]:
    return [float(length) for length in lengths]


@pytest.fixture
def ppo() -> PPO:
    tokenizer = tiny_tokenizer()
    networks = PPONetworks(
        policy=optimized_causal_lm("llama"),
        reference=freeze(optimized_causal_lm("llama")),
        critic=optimize_forward(build_scalar_model(tiny_causal_lm("llama"))),
        reward=WeightedReward(count_tokens, ModelOptions(), tokenizer),
        tokenizer=tokenizer,
    )
    shaping = RewardShapingOptions(normalization=False, clip=None, kl_coef=0.05)
    sampling = SamplingOptions(max_new_tokens=LENGTH)
    options = PPOOptions(sampling=sampling, reward_shaping=shaping, responses_per_prompt=2)
    return PPO(networks, options)


@pytest.fixture
def prompts() -> PromptBatch:
    ids = torch.tensor([[5, 6, 7], [0, 8, 9]])
    mask = torch.tensor([[True] * 3, [False, True, True]])
    return PromptBatch(ids, mask, ["a", "b"], torch.arange(2), [{}, {}])


def test_phases_run_without_a_trainer(ppo: PPO, prompts: PromptBatch) -> None:
    batch = ppo.repeat_prompts(prompts)
    assert batch.texts == ["a", "a", "b", "b"]
    rollouts = ppo.rollout(batch, seed=1)
    scores = ppo.score(rollouts, batch)
    assert scores.tolist() == rollouts.response_mask.sum(1).tolist()
    estimates = ppo.estimate(rollouts)
    # policy and reference are equal: no KL, so the reward of a response is its score
    rewards = ppo.shape_rewards(rollouts, scores, estimates)
    torch.testing.assert_close(rewards.sum(1), scores, rtol=0, atol=1e-5)
    experience = ppo.experience(rollouts, rewards, estimates)
    tokens = experience.loss_mask.sum()
    loss, metrics = ppo.policy_loss(experience, tokens)
    assert float(metrics["ppo/ratio"]) == pytest.approx(1.0, abs=1e-5)
    (loss + ppo.critic_loss(experience, tokens)[0]).backward()
    for network in (ppo.policy, ppo.critic):
        assert any(p.grad is not None and bool(p.grad.any()) for p in network.parameters())


def test_spread_costs(ppo: PPO, prompts: PromptBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = ppo.rollout(prompts, seed=1)
    monkeypatch.setattr(ppo.reward, "spread", lambda: torch.tensor([0.5, 0.0]))
    ppo.reward_shaping = replace(ppo.reward_shaping, kl_coef=0.0, spread_coef=2.0)
    rewards = ppo.shape_rewards(rollouts, torch.tensor([3.0, -9.0]), ppo.estimate(rollouts))
    assert rewards.sum(1).tolist() == pytest.approx([3.0 - 2.0 * 0.5, -9.0], abs=1e-5)
    networks = PPONetworks(ppo.policy, ppo.reference, ppo.critic, ppo.reward, ppo.tokenizer)
    with pytest.raises(ValueError, match=r"spread_coef=2\.0: expected at least two reward models"):
        PPO(networks, PPOOptions(reward_shaping=ppo.reward_shaping))


def test_long_responses_are_penalized_gradually(ppo: PPO, prompts: PromptBatch) -> None:
    rollouts = ppo.rollout(prompts, seed=1)
    scores, estimates = torch.zeros(2), ppo.estimate(rollouts)
    penalty = {"missing_eos_penalty": 0.5, "overlong_buffer": 4}
    ppo.reward_shaping = replace(ppo.reward_shaping, kl_coef=0.0, **penalty)
    ppo.sampling = replace(ppo.sampling, max_new_tokens=LENGTH + 2)  # so none has the whole penalty
    rewards = ppo.shape_rewards(rollouts, scores, estimates).sum(1).tolist()
    expected = [-0.5 * max(n - (LENGTH - 2), 0) / 4 for n in rollouts.lengths.tolist()]
    assert rewards == pytest.approx(expected, abs=1e-5)
    assert min(expected) < 0


def test_a_critic_comes_with_the_estimator_that_uses_it(ppo: PPO) -> None:
    networks = PPONetworks(ppo.policy, ppo.reference, None, ppo.reward, ppo.tokenizer)
    with pytest.raises(ValueError, match=r"networks\.critic: expected a critic with .*: gae"):
        PPO(networks)
    free = PPOOptions(advantages=AdvantageOptions(estimator="rloo"), responses_per_prompt=2)
    assert PPO(networks, free).critic is None
    with pytest.raises(ValueError, match=r"networks\.critic: expected no critic with .*: rloo"):
        PPO(networks._replace(critic=ppo.critic), free)


def test_override_of_a_phase_acts(ppo: PPO, prompts: PromptBatch) -> None:
    class Doubled(PPO):
        def score(self, *arguments: Any) -> torch.Tensor:
            return 2 * super().score(*arguments)

    rollouts = ppo.rollout(prompts, seed=1)
    once = ppo.score(rollouts, prompts)
    ppo.__class__ = Doubled
    assert torch.equal(ppo.score(rollouts, prompts), 2 * once)


def test_rollouts_stop_at_every_stop_token_of_a_chat_model(ppo: PPO, prompts: PromptBatch) -> None:
    other = int(ppo.rollout(prompts, seed=1).response_ids[0, 0])
    assert other != EOS_ID
    ppo.policy.generation_config = GenerationConfig(eos_token_id=[EOS_ID, other])
    stopped = ppo.rollout(prompts, seed=1)
    assert stopped.response_mask[0].sum() == 1
    assert bool(stopped.terminated[0])


def test_kl_coefficient_keeps_its_dtype_in_a_cast(ppo: PPO) -> None:
    assert ppo.bfloat16().kl_coef.dtype == torch.float64
