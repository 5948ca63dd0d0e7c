"""PPO without a Trainer: the phases of an iteration from two tiny models."""

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import GenerationConfig

from lit_rlhf.data import PromptBatch
from lit_rlhf.forward import Offloaded
from lit_rlhf.ppo import (
    PPO,
    AdvantageOptions,
    Collected,
    PPOOptions,
    RewardShapingOptions,
    algorithm,
    iteration_draws,
)
from lit_rlhf.ppo.algorithm import advantages_without_critic
from lit_rlhf.rewards import CallableReward, Scores
from lit_rlhf.rollout import Experience, RolloutBatch, SamplingOptions
from tests.support.ppo_objects import tiny_networks
from tests.support.tiny_models import (
    EOS_ID,
    PAD_ID,
    VOCAB_SIZE,
)

LENGTH = 5


@pytest.fixture
def ppo() -> PPO:
    shaping = RewardShapingOptions(normalization=False, clip=None, kl_coef=0.05)
    sampling = SamplingOptions(max_new_tokens=LENGTH)
    options = PPOOptions(sampling=sampling, reward_shaping=shaping, responses_per_prompt=2)
    return PPO(tiny_networks(), options)


@pytest.fixture
def prompts() -> PromptBatch:
    ids = torch.tensor([[5, 6, 7], [0, 8, 9]])
    mask = torch.tensor([[True] * 3, [False, True, True]])
    return PromptBatch(
        input_ids=ids,
        attention_mask=mask,
        texts=["a", "b"],
        index=torch.arange(2),
        fields=[{}, {}],
    )


def test_phases_run_without_a_trainer(ppo: PPO, prompts: PromptBatch) -> None:
    batch = ppo.repeat_prompts(prompts)
    assert batch.texts == ["a", "a", "b", "b"]
    rollouts = ppo.rollout(batch, seed=1)
    scores = ppo.score(rollouts, batch)
    assert scores.total.tolist() == rollouts.response_mask.sum(1).tolist()
    estimates = ppo.estimate(rollouts)
    # policy and reference are equal: no KL, so the reward of a response is its score
    rewards = ppo.shape_rewards(rollouts, scores, estimates)
    torch.testing.assert_close(rewards.sum(1), scores.total, rtol=0, atol=1e-5)
    experience = ppo.experience(rollouts, rewards, estimates)
    tokens = experience.loss_mask.sum()
    loss, metrics = ppo.policy_loss(experience, tokens)
    assert float(metrics["ppo/ratio"]) == pytest.approx(1.0, abs=1e-5)
    (loss + ppo.critic_loss(experience, tokens).loss).backward()
    for network in (ppo.networks.policy, ppo.networks.critic):
        assert any(p.grad is not None and bool(p.grad.any()) for p in network.parameters())


def test_spread_of_reward_models_costs_its_coefficient(ppo: PPO, prompts: PromptBatch) -> None:
    rollouts = ppo.rollout(prompts, seed=1)
    # Standardized, the two heads say 1 and -1 of the first response, and the reverse of the second.
    scores = Scores(torch.tensor([3.0, -9.0]), head_scores=torch.tensor([[5.0, 1.0], [3.0, 2.0]]))
    ppo.reward_shaping = replace(ppo.reward_shaping, kl_coef=0.0, spread_coef=2.0)
    rewards = ppo.shape_rewards(rollouts, scores, ppo.estimate(rollouts))
    assert rewards.sum(1).tolist() == pytest.approx([3.0 - 2.0, -9.0 - 2.0], abs=1e-5)
    with pytest.raises(ValueError, match=r"spread_coef=2\.0: expected at least two reward models"):
        PPO(ppo.networks, PPOOptions(reward_shaping=ppo.reward_shaping))


def test_long_responses_are_penalized_gradually(ppo: PPO, prompts: PromptBatch) -> None:
    rollouts = ppo.rollout(prompts, seed=1)
    scores, estimates = Scores(torch.zeros(2)), ppo.estimate(rollouts)
    penalty = {"missing_eos_penalty": 0.5, "overlong_buffer": 4}
    ppo.reward_shaping = replace(ppo.reward_shaping, kl_coef=0.0, **penalty)
    ppo.sampling = replace(ppo.sampling, max_new_tokens=LENGTH + 2)  # so none has the whole penalty
    rewards = ppo.shape_rewards(rollouts, scores, estimates).sum(1).tolist()
    expected = [-0.5 * max(n - (LENGTH - 2), 0) / 4 for n in rollouts.lengths.tolist()]
    assert rewards == pytest.approx(expected, abs=1e-5)
    assert min(expected) < 0


def test_critic_has_a_lambda_of_its_own(ppo: PPO, prompts: PromptBatch) -> None:
    rollouts = ppo.rollout(prompts, seed=1)
    estimates, mask = ppo.estimate(rollouts), rollouts.response_mask
    rewards = torch.arange(1.0, mask.numel() + 1).view(mask.shape) * mask
    plain = ppo.experience(rollouts, rewards, estimates)
    ppo.advantages = replace(ppo.advantages, critic_lam=1.0)
    experience = ppo.experience(rollouts, rewards, estimates)
    assert torch.equal(experience.advantages, plain.advantages)
    # with lambda 1 the values cancel, and what is left is the sum of the rewards to come
    to_come = rewards.flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(experience.returns[mask], to_come[mask])


def test_lambda_grows_with_the_response(ppo: PPO, prompts: PromptBatch) -> None:
    rollouts = ppo.rollout(prompts, seed=1)
    rollouts = rollouts._replace(response_mask=torch.arange(LENGTH) < torch.tensor([[2], [LENGTH]]))
    estimates, mask = ppo.estimate(rollouts), rollouts.response_mask
    rewards = torch.arange(1.0, mask.numel() + 1).view(mask.shape) * mask
    ppo.advantages = replace(ppo.advantages, lam_alpha=0.4)
    experience = ppo.experience(rollouts, rewards, estimates)
    for row, (length, lam) in enumerate([(2, 0.0), (LENGTH, 0.5)]):  # 1 - 1 / (0.4 * 5)
        ppo.advantages = AdvantageOptions(lam=lam)
        expected = ppo.experience(rollouts, rewards, estimates)
        torch.testing.assert_close(experience.advantages[row], expected.advantages[row])
        assert experience.advantages[row, :length].all()


def test_prompts_with_unlike_scores_are_learned_from_first(ppo: PPO, prompts: PromptBatch) -> None:
    batch = prompts.select([0, 1, 0, 1, 0, 0, 1, 1])
    rollouts = ppo.rollout(batch, seed=1)
    estimates = ppo.estimate(rollouts)
    rewards = torch.arange(8.0)[:, None] * rollouts.response_mask
    # four prompts, of which the first and third are alike
    scores = torch.tensor([2.0, 2.0, 1.0, 0.0, 0.1, 0.1, 5.0, 3.0])
    experience = ppo.experience(rollouts, rewards, estimates)
    assert ppo.select_prompts(experience, scores) is experience
    for count, rows in ((1, [2, 3]), (2, [2, 3, 6, 7]), (3, [0, 1, 2, 3, 6, 7])):
        ppo.advantages = AdvantageOptions(estimator="rloo", learned_prompts=count)
        selected = ppo.select_prompts(experience, scores)
        expected = experience.select(torch.tensor(rows))
        assert torch.equal(selected.rollouts.sequence_ids, expected.rollouts.sequence_ids)
        assert torch.equal(selected.returns, expected.returns)
        assert ppo.count_learned(8) == len(selected) == len(rows)


def test_prompt_whose_only_rival_was_cut_off_tells_nothing(ppo: PPO, prompts: PromptBatch) -> None:
    rollouts = ppo.rollout(prompts.select([0, 0, 1, 1]), seed=1)
    rollouts = rollouts._replace(terminated=torch.tensor([True, False, True, True]))
    ppo.advantages = AdvantageOptions(estimator="rloo", truncation="mask", learned_prompts=1)
    rewards = torch.arange(4.0)[:, None] * rollouts.response_mask
    experience = ppo.experience(rollouts, rewards, ppo.estimate(rollouts))
    selected = ppo.select_prompts(experience, torch.tensor([1.0, 2.0, 0.0, 3.0]))
    expected = experience.select(torch.tensor([2, 3]))
    assert torch.equal(selected.rollouts.sequence_ids, expected.rollouts.sequence_ids)


def test_measure_adds_metrics_of_prompts_and_responses(ppo: PPO, prompts: PromptBatch) -> None:
    rollouts = ppo.rollout(prompts, seed=1)
    estimates = ppo.estimate(rollouts)
    estimates = estimates._replace(ref_logprobs=estimates.logprobs - 0.5)
    collected = Collected(prompts, rollouts, ppo.score(rollouts, prompts), estimates)
    metrics = ppo.measure(collected)
    computed = metrics.compute()
    assert float(computed["rollout/prompt_length"]) == (3 + 2) / 2
    assert float(computed["rollout/kl_per_token"]) == pytest.approx(0.5, abs=1e-6)
    entropy = float(estimates.ref_prompt_entropy.double().mean())
    assert float(computed["rollout/ref_prompt_entropy"]) == pytest.approx(entropy, rel=1e-6)
    assert float(ppo.measure(collected, metrics).compute()["rollout/responses"]) == 4


def test_gold_reward_is_a_mean_over_its_votes(ppo: PPO, prompts: PromptBatch) -> None:
    def abstain_first(prompts: list[str], responses: list[str]) -> list[float | None]:
        return [None, 4.0]

    gold = CallableReward(abstain_first, ppo.networks.tokenizer)
    ppo.networks = ppo.networks._replace(gold=gold)
    rollouts = ppo.rollout(prompts, seed=1)
    scores = ppo.score(rollouts, prompts)
    collected = Collected(prompts, rollouts, scores, ppo.estimate(rollouts))
    assert float(ppo.measure(collected).compute()["rollout/gold"]) == 4.0


def test_logged_reward_is_a_mean_over_responses(ppo: PPO, prompts: PromptBatch) -> None:
    rollouts = ppo.rollout(prompts, seed=1)
    rewards = torch.arange(1.0, rollouts.response_mask.numel() + 1)
    rewards = rewards.view(rollouts.response_mask.shape) * rollouts.response_mask
    experience = ppo.experience(rollouts, rewards, ppo.estimate(rollouts))
    metrics = ppo.measure_experience(rewards, ppo.score(rollouts, prompts), experience)
    assert float(metrics["rollout/reward"]) == float(rewards.sum()) / 2


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    # 6 tokens of 2 responses: 3 for each, over a response's own tokens or over the longest
    [("sequence_mean", [3.0, 1.5, 0.75]), ("sequence_sum", [0.6, 0.6, 0.6])],
)
def test_weights_count_responses_with_tokens_to_learn_from(
    ppo: PPO, prompts: PromptBatch, aggregation: Any, expected: list[float]
) -> None:
    rollouts = ppo.rollout(prompts.select([0, 1, 0]), seed=1)
    mask = torch.arange(LENGTH) < torch.tensor([[0], [2], [4]])
    experience = ppo.experience(rollouts, torch.ones(mask.shape), ppo.estimate(rollouts))
    ppo.loss = replace(ppo.loss, aggregation=aggregation)
    weighed = ppo.weigh_responses(
        replace(experience, loss_mask=mask, advantages=torch.ones(mask.shape))
    )
    assert weighed.weights is not None
    assert weighed.weights.tolist() == pytest.approx(expected)
    assert weighed.advantages[:, 0].tolist() == pytest.approx(expected)


def test_kl_of_the_loss_has_the_weights_of_the_responses(ppo: PPO, prompts: PromptBatch) -> None:
    rollouts = ppo.rollout(prompts, seed=1)
    mask = torch.arange(LENGTH) < torch.tensor([[2], [LENGTH]])
    rollouts = rollouts._replace(response_mask=mask)
    experience = ppo.experience(rollouts, torch.ones(mask.shape), ppo.estimate(rollouts))
    ref_logprobs = experience.old_logprobs - 0.5
    weights = torch.tensor([2.0, 0.5])
    weighed = replace(experience, ref_logprobs=ref_logprobs, weights=weights)
    metrics = ppo.policy_loss(weighed, torch.tensor(10.0)).metrics
    k3 = math.exp(-0.5) - 1 + 0.5
    expected = k3 * (2.0 * 2 + 0.5 * LENGTH) / 10
    assert float(metrics["ppo/ref_kl"].detach()) == pytest.approx(expected, abs=1e-5)


def test_reinforce_plus_plus_discounts_by_gamma() -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    advantages = advantages_without_critic(
        AdvantageOptions(estimator="reinforce_plus_plus", gamma=0.5),
        rewards=torch.tensor([[0.0, 0.0, 4.0]]),
        mask=mask,
        loss_mask=mask,
        group_size=1,
    )
    returns = [1.0, 2.0, 4.0]
    expected = [(x - 7 / 3) / statistics.pstdev(returns) for x in returns]
    assert advantages[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("estimator", "first", "second"),
    # returns of 2 and 5: the other one's return, or their mean of 3.5, is the baseline
    [
        ("rloo", -3.0, 3.0),
        ("dr_grpo", -1.5, 1.5),
        ("grpo", -1.5 / statistics.stdev([2, 5]), 1.5 / statistics.stdev([2, 5])),
    ],
)
def test_response_that_is_not_learned_from_is_no_baseline_of_the_others(
    estimator: Any, first: float, second: float
) -> None:
    advantages = advantages_without_critic(
        AdvantageOptions(estimator=estimator),
        rewards=torch.tensor([[1.0, 1.0], [5.0, 0.0], [100.0, 0.0]]),
        mask=torch.tensor([[True, True], [True, False], [True, True]]),
        loss_mask=torch.tensor([[True, False], [True, False], [False, False]]),
        group_size=3,
    )
    # a return has the rewards of tokens that are not learned from, too
    expected = [first, 0.0, second, 0.0, 0.0, 0.0]
    assert advantages.flatten().tolist() == pytest.approx(expected)


def test_a_critic_comes_with_the_estimator_that_uses_it(ppo: PPO) -> None:
    networks = ppo.networks._replace(critic=None)
    with pytest.raises(ValueError, match=r"networks\.critic: expected a critic with .*: gae"):
        PPO(networks)
    free = PPOOptions(advantages=AdvantageOptions(estimator="rloo"), responses_per_prompt=2)
    assert PPO(networks, free).networks.critic is None
    with pytest.raises(ValueError, match=r"networks\.critic: expected no critic with .*: rloo"):
        PPO(ppo.networks, free)


class RecordingPPO(PPO):
    rollouts: list[RolloutBatch]

    def rollout(self, batch: PromptBatch, seed: int) -> RolloutBatch:
        self.rollouts.append(super().rollout(batch, seed))
        return self.rollouts[-1]


def test_start_is_sampled_from_the_reference_by_the_override_of_rollout(
    prompts: PromptBatch,
) -> None:
    networks = tiny_networks()
    assert networks.reference is not None
    ppo = RecordingPPO(networks, PPOOptions(sampling=SamplingOptions(max_new_tokens=LENGTH)))
    ppo.rollouts = []
    expected = ppo.rollout(prompts, seed=1)  # policy and reference are equal
    with torch.no_grad():
        for parameter in networks.policy.parameters():
            parameter.add_(torch.randn_like(parameter))
    scores = ppo.score_start(prompts, seed=1)
    assert scores.tolist() == expected.response_mask.sum(1).tolist()
    assert ppo.networks is networks
    ppo.rollout(prompts, seed=1)
    _, of_start, of_policy = ppo.rollouts
    assert torch.equal(of_start.response_ids, expected.response_ids)
    assert not torch.equal(of_policy.response_ids, expected.response_ids)


@pytest.mark.parametrize(
    ("limits", "n_rows"),
    [({"micro_batch_size": 3}, [3, 1]), ({"micro_batch_tokens": 8}, [2, 2])],
)
def test_micro_batches_have_the_rows_and_tokens_of_the_options(
    ppo: PPO, limits: dict[str, int], n_rows: list[int]
) -> None:
    ppo.minibatches = replace(ppo.minibatches, **limits)
    parts = ppo.micro_batches(torch.tensor([4, 4, 4, 4]))
    assert [len(range(4)[rows]) for rows, _ in parts] == n_rows


def test_phases_are_told_their_shapes_and_the_options_that_save_memory(
    ppo: PPO, prompts: PromptBatch
) -> None:
    phases = []

    @contextmanager
    def record(phase: str, shape: Sequence[int], options: Sequence[str]) -> Iterator[None]:
        phases.append((phase, tuple(shape), tuple(options)))
        yield

    rollouts = ppo.collect(prompts, 1, record).rollouts
    whole = (2, 3 + rollouts.response_ids.shape[1])
    scoring = ("memory.max_tokens_per_forward", "sampling.max_new_tokens")
    assert phases == [
        ("rollout", (2, 3), ("memory.rollout_batch_size", "sampling.max_new_tokens")),
        ("score", whole, scoring),
        ("estimate", whole, scoring),
    ]


def test_sampler_rewards_and_networks_are_called_with_the_options_of_the_run(
    ppo: PPO, prompts: PromptBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts._replace(fields=[{"answer": 1}, {}], turns=[(), ()])
    rollouts = ppo.rollout(prompts, seed=1)
    sampler = Mock(return_value=rollouts)
    reward = Mock()
    score_rollouts = Mock()
    monkeypatch.setattr(algorithm, "score_rollouts", score_rollouts)
    ppo.networks = ppo.networks._replace(sampler=sampler, reward=reward)
    ppo.sampling = replace(ppo.sampling, temperature=0.7)
    ppo.memory = replace(ppo.memory, rollout_batch_size=3, max_tokens_per_forward=99)

    assert ppo.rollout(prompts, seed=7) is rollouts
    policy, ids, mask, sampling = sampler.call_args.args
    assert policy is ppo.networks.policy
    assert ids is prompts.input_ids
    assert mask is prompts.attention_mask
    assert sampling is ppo.sampling
    assert sampler.call_args.kwargs == {
        "eos_token_ids": [EOS_ID],
        "pad_token_id": PAD_ID,
        "seed": 7,
        "batch_size": 3,
    }

    ppo.score(rollouts, prompts)
    assert reward.call_args.args[0] is rollouts
    assert reward.call_args.args[1] == ["a", "b"]
    assert reward.call_args.kwargs == {
        "max_tokens_per_forward": 99,
        "records": prompts.fields,
        "turns": prompts.turns,
    }

    ppo.estimate(rollouts)
    given = score_rollouts.call_args.kwargs
    for name in ("policy", "reference", "critic"):
        assert given[name] is getattr(ppo.networks, name)
    assert (given["temperature"], given["max_tokens_per_forward"]) == (0.7, 99)


@pytest.mark.parametrize(
    ("required", "fields", "is_scored"),
    [
        ((), [{}, {}], True),
        (("answer",), [{}, {}], False),
        (("answer",), [{"answer": 1}, {}], True),
    ],
)
def test_samples_have_scores_unless_no_prompt_has_the_fields_of_a_reward(
    ppo: PPO,
    prompts: PromptBatch,
    required: tuple[str, ...],
    fields: list[dict[str, int]],
    is_scored: bool,
) -> None:
    rollouts = ppo.rollout(prompts, seed=4)
    functions = [SimpleNamespace(), SimpleNamespace(required_fields=required)]
    reward = Mock(functions=functions, return_value=Scores(torch.tensor([1.0, 2.0])))
    ppo.networks = ppo.networks._replace(reward=reward)
    records = ppo.sample_records(prompts._replace(fields=fields), seed=4)
    scores = [record["score"] for record in records]
    assert scores == [1.0, 2.0] if is_scored else all(map(math.isnan, scores))
    tokens = [ids[mask] for ids, mask in zip(*rollouts[2:4], strict=True)]
    decode = ppo.networks.tokenizer.decode
    assert [record["response"] for record in records] == [
        decode(ids, skip_special_tokens=True) for ids in tokens
    ]


def test_kl_to_the_sampler_is_a_mean_over_the_tokens_of_a_response(
    ppo: PPO, prompts: PromptBatch
) -> None:
    rollouts = ppo.rollout(prompts, seed=1)
    mask = torch.arange(LENGTH) < torch.tensor([[2], [LENGTH]])
    estimates = ppo.estimate(rollouts)
    # the second token of each is as probable under the sampler as under the policy
    log_ratio = torch.tensor([0.5, 0.0, 3.0, 3.0, 3.0]).expand(2, -1)
    rollouts = rollouts._replace(
        response_mask=mask, sampler_logprobs=estimates.logprobs + log_ratio
    )
    collected = Collected(
        prompts=prompts, rollouts=rollouts, scores=Scores(torch.zeros(2)), estimates=estimates
    )
    half, three = (math.exp(-x) - 1 + x for x in (0.5, 3.0))
    kl = float(ppo.measure(collected).compute()["rollout/sampler_kl"])
    assert kl == pytest.approx((half / 2 + (half + 3 * three) / 5) / 2, rel=1e-5)


def test_informative_prompts_have_unlike_scores_of_responses_to_learn_from(
    ppo: PPO, prompts: PromptBatch
) -> None:
    rollouts = ppo.rollout(prompts.select([0, 0, 1, 1]), seed=1)
    rollouts = rollouts._replace(
        response_mask=torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH], [2], [3]]),
        terminated=torch.tensor([True, False, True, True]),
    )
    ppo.advantages = replace(ppo.advantages, truncation="mask")
    rewards = torch.ones(4, LENGTH) * rollouts.response_mask
    experience = ppo.experience(rollouts, rewards, ppo.estimate(rollouts))
    # of the first prompt, only the response that was cut off has another score
    scores = Scores(torch.tensor([1.0, 2.0, 0.0, 3.0]))
    metrics = ppo.measure_experience(rewards, scores, experience)
    assert float(metrics["rollout/informative_share"]) == 0.5


def test_critic_explains_returns_of_all_responses(ppo: PPO, prompts: PromptBatch) -> None:
    rollouts = ppo.rollout(prompts, seed=1)
    mask = torch.arange(LENGTH) < torch.tensor([[2], [3]])
    rollouts = rollouts._replace(response_mask=mask, terminated=torch.tensor([True, False]))
    ppo.advantages = replace(ppo.advantages, truncation="mask")
    zeros = torch.zeros(2, LENGTH)
    experience = replace(
        ppo.experience(rollouts, zeros, ppo.estimate(rollouts)),
        returns=torch.tensor([[1.0, 2.0, 99.0, 99.0, 99.0], [3.0, 5.0, 9.0, 99.0, 99.0]]),
        old_values=torch.tensor([[1.0, 3.0, 0.0, 0.0, 0.0], [2.0, 5.0, 7.0, 0.0, 0.0]]),
    )
    metrics = ppo.measure_experience(zeros, Scores(torch.zeros(2)), experience)
    # 1 - variance of the errors by variance of the returns, of five tokens
    expected = 1 - statistics.pvariance([0, -1, 1, 0, 2]) / statistics.pvariance([1, 2, 3, 5, 9])
    assert float(metrics["ppo/explained_variance"]) == pytest.approx(expected, rel=1e-6)


def test_first_ratio_is_that_of_the_first_minibatch(ppo: PPO, prompts: PromptBatch) -> None:
    rollouts = ppo.rollout(prompts, seed=1)
    rewards = torch.zeros(rollouts.response_mask.shape)
    experience = ppo.experience(rollouts, rewards, ppo.estimate(rollouts))
    ppo.pretraining_done.fill_(True)
    ppo.minibatches = replace(ppo.minibatches, minibatch_size=1, ppo_epochs=1)
    ppo.train_critic = Mock(return_value={})  # type: ignore[method-assign]
    one, two = ({"ppo/ratio": torch.tensor(ratio)} for ratio in (1.5, 2.5))
    for iteration, (first, second) in enumerate([(one, two), ({}, two), (one, {})]):
        ppo.train_policy = Mock(side_effect=[first, second])  # type: ignore[method-assign]
        means = ppo.update(experience, Mock(), torch.Generator())
        assert means.get("ppo/ratio_first") == first.get("ppo/ratio")
        assert int(ppo.iteration) == iteration + 1


def test_text_of_a_minibatch_goes_with_its_responses(ppo: PPO, prompts: PromptBatch) -> None:
    rollouts = ppo.rollout(prompts.select([0, 0, 1, 1]), seed=1)
    rewards = torch.zeros(rollouts.response_mask.shape)
    experience = ppo.experience(rollouts, rewards, ppo.estimate(rollouts))
    rows = torch.arange(4.0)[:, None].expand(rewards.shape)
    ppo.pretraining_done.fill_(True)
    ppo.minibatches = replace(ppo.minibatches, minibatch_size=2, ppo_epochs=1)
    ppo.train_critic = Mock(return_value={})  # type: ignore[method-assign]
    ppo.train_policy = Mock(return_value={})  # type: ignore[method-assign]
    ptx: Any = SimpleNamespace(select=lambda index: index)  # the rows stand for their text
    ppo.update(replace(experience, advantages=rows), Mock(), torch.Generator(), ptx)
    pairs = [call.args[:2] for call in ppo.train_policy.call_args_list]
    assert [minibatch.advantages[:, 0].tolist() for minibatch, _ in pairs] == [
        text.tolist() for _, text in pairs
    ]
    assert sorted(row for _, text in pairs for row in text.tolist()) == [0, 1, 2, 3]


def test_minibatches_are_drawn_after_the_seed_of_the_rollouts() -> None:
    draws = iteration_draws(seed=10_000_019, iteration=1, rank=0)
    generator = torch.Generator().manual_seed(10_000_019 * 1_000_003 + 7_919)
    assert draws.rollout_seed == int(torch.randint(2**31, (), generator=generator))
    order, expected = (torch.randperm(9, generator=g) for g in (draws.generator, generator))
    assert torch.equal(order, expected)


def test_longest_sequence_of_the_run_reaches_every_network(
    ppo: PPO, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = []
    monkeypatch.setattr(
        algorithm, "set_longest_sequence", lambda network, length: reached.append((network, length))
    )
    networks = ppo.networks
    reference = networks.reference
    assert reference is not None
    assert not isinstance(reference, Offloaded)
    reward = Mock()
    ppo.networks = networks._replace(reference=Offloaded(reference), reward=reward)
    ppo.set_longest_sequence(77)
    expected = [(networks.policy, 77), (reference, 77), (networks.critic, 77)]
    assert [(id(network), length) for network, length in reached] == [
        (id(network), length) for network, length in expected
    ]
    reward.set_longest_sequence.assert_called_once_with(77)


def test_id_without_a_token_in_a_response_of_another_sampler_is_refused(
    ppo: PPO, prompts: PromptBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = ppo.rollout(prompts, seed=1)
    mask = torch.arange(LENGTH) < torch.tensor([[2], [3]])
    ids = torch.tensor([[5, 6, 200, 200, 200], [7, 8, 9, 201, 201]])
    monkeypatch.setattr(algorithm, "ids_without_token", lambda policy: torch.tensor([200, 201]))
    rollouts = rollouts._replace(response_ids=ids, response_mask=mask)
    ppo.networks = ppo.networks._replace(sampler=Mock(return_value=rollouts))
    assert ppo.rollout(prompts, seed=1) is rollouts  # only padding has no token
    rollouts.response_ids[1, 2] = 201
    with pytest.raises(ValueError, match="tokenizer has tokens for, got 201,"):
        ppo.rollout(prompts, seed=1)


def test_override_of_a_phase_acts(ppo: PPO, prompts: PromptBatch) -> None:
    class Doubled(PPO):
        def score(self, *arguments: Any) -> Scores:
            scores = super().score(*arguments)
            return replace(scores, total=2 * scores.total)

    rollouts = ppo.rollout(prompts, seed=1)
    once = ppo.score(rollouts, prompts)
    ppo.__class__ = Doubled
    assert torch.equal(ppo.score(rollouts, prompts).total, 2 * once.total)


def test_score_in_two_parts_logs_what_one_call_logs(ppo: PPO, prompts: PromptBatch) -> None:
    class Halved(PPO):
        def score(self, rollouts: RolloutBatch, batch: PromptBatch) -> Scores:
            return Scores.concatenate(
                [
                    super(Halved, self).score(rollouts.select(rows), batch.select([row]))
                    for row, rows in enumerate((slice(1), slice(1, 2)))
                ]
            )

    rollouts = ppo.rollout(prompts, seed=1)
    # 5 tokens, of which the second response has none but its first
    mask = torch.tensor([[True] * LENGTH, [True] + [False] * (LENGTH - 1)])
    rollouts = rollouts._replace(response_mask=mask)
    estimates = ppo.estimate(rollouts)
    scored_at_once = Collected(
        prompts=prompts,
        rollouts=rollouts,
        scores=ppo.score(rollouts, prompts),
        estimates=estimates,
    )
    metrics_at_once = ppo.measure(scored_at_once).compute()
    ppo.__class__ = Halved
    scored_in_halves = scored_at_once._replace(scores=ppo.score(rollouts, prompts))
    metrics_in_halves = ppo.measure(scored_in_halves).compute()
    assert metrics_in_halves == metrics_at_once
    # the last part alone would be 1
    assert float(metrics_in_halves["rollout/score/count_tokens"]) == (LENGTH + 1) / 2


def test_rollouts_stop_at_every_stop_token_of_a_chat_model(ppo: PPO, prompts: PromptBatch) -> None:
    second_stop = int(ppo.rollout(prompts, seed=1).response_ids[0, 0])
    assert second_stop != EOS_ID
    ppo.networks.policy.generation_config = GenerationConfig(eos_token_id=[EOS_ID, second_stop])
    stopped = ppo.rollout(prompts, seed=1)
    assert stopped.response_mask[0].sum() == 1
    assert bool(stopped.terminated[0])


def test_kl_coefficient_keeps_its_dtype_in_a_cast(ppo: PPO) -> None:
    assert ppo.bfloat16().kl_coef.dtype == torch.float64


def sampled_elsewhere(sampler_logprobs: torch.Tensor) -> Any:
    """A sampler that draws each token once as the only one of a response, with log-probs `[V]`."""

    def sample(model: Any, ids: torch.Tensor, mask: torch.Tensor, *_: Any, **__: Any) -> Any:
        n = len(sampler_logprobs)
        ones = torch.ones(n, 1, dtype=torch.bool)
        return RolloutBatch(
            prompt_ids=ids[:1].expand(n, -1),
            prompt_mask=mask[:1].expand(n, -1),
            response_ids=torch.arange(n)[:, None],
            response_mask=ones,
            terminated=ones[:, 0],
            sampler_logprobs=sampler_logprobs[:, None],
        )

    return sample


@pytest.mark.parametrize("cap", [1e6, None])
def test_importance_restores_the_gradient_of_the_policy(
    ppo: PPO, prompts: PromptBatch, cap: float | None
) -> None:
    # all tokens, each weighted by how often the sampler draws it: an expectation without noise
    generator = torch.Generator().manual_seed(0)
    sampler_logprobs = torch.randn(VOCAB_SIZE, generator=generator).log_softmax(0)
    ppo.networks = ppo.networks._replace(sampler=sampled_elsewhere(sampler_logprobs))
    ppo.loss = replace(ppo.loss, importance_cap=cap)
    rollouts = ppo.rollout(prompts, seed=0)
    estimates = ppo.estimate(rollouts)
    rewards = torch.randn(VOCAB_SIZE, 1, generator=generator)
    experience = ppo.experience(rollouts, rewards, estimates)
    tokens = torch.tensor(1.0)

    def gradient(weights: torch.Tensor, experience: Experience) -> torch.Tensor:
        weighted = replace(experience, advantages=rewards * weights[:, None])
        ppo.networks.policy.zero_grad()
        ppo.policy_loss(ppo.reparameterize_advantages(weighted), tokens).loss.backward()
        return torch.cat(
            [p.grad.flatten() for p in ppo.networks.policy.parameters() if p.grad is not None]
        )

    policy_probs = estimates.logprobs[:, 0].exp()
    on_policy = gradient(policy_probs, replace(experience, importance=None))
    off_policy = gradient(sampler_logprobs.exp(), experience)
    error = float((off_policy - on_policy).norm() / on_policy.norm())
    assert error < 1e-5 if cap else error > 0.1
    collected = Collected(
        prompts=prompts,
        rollouts=rollouts,
        scores=Scores(rewards[:, 0]),
        estimates=estimates,
    )
    kl = float(ppo.measure(collected).compute()["rollout/sampler_kl"])
    x = sampler_logprobs - estimates.logprobs[:, 0]
    assert kl == pytest.approx(float(((-x).exp() - 1 + x).mean()), rel=1e-5)
