from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlhf.forward import optimize_forward
from lit_rlhf.models import ModelOptions, load_causal_lm, load_scalar_model
from lit_rlhf.models.heads import build_scalar_model
from lit_rlhf.rollout import SamplingOptions, compute_policy_statistics, generate_responses
from lit_rlhf.rollout.batch import PolicyStatistics, RolloutBatch
from lit_rlhf.rollout.scoring import compute_reference_statistics, compute_values, score_rollouts
from tests.support.decoding import make_short_prompts
from tests.support.tiny_models import (
    EOS_ID,
    PAD_ID,
    move_adapters,
    noisy_causal_lm,
    optimized_causal_lm,
    tiny_causal_lm,
)

TEMPERATURE = 0.7


def rollouts_of(model: PreTrainedModel, pad: int = PAD_ID) -> RolloutBatch:
    """Responses of 8, 3, 1 and 5 tokens to prompts of 9, 4, 1 and 6."""
    ids, mask = make_short_prompts()
    ids = ids.masked_fill(~mask, pad)
    options = SamplingOptions(max_new_tokens=8, temperature=TEMPERATURE)
    rollouts = generate_responses(
        model, ids, mask, options, eos_token_ids=(), pad_token_id=pad, seed=0
    )
    response_ids, lengths = rollouts.response_ids.clone(), torch.tensor([8, 3, 1, 5])
    response_mask = torch.arange(8) < lengths[:, None]
    response_ids[1, 2] = response_ids[2, 0] = EOS_ID
    response_ids = response_ids.masked_fill(~response_mask, pad)
    return rollouts._replace(response_ids=response_ids, response_mask=response_mask)


@torch.no_grad()
def distributions(model: PreTrainedModel, rollouts: RolloutBatch, row: int, t: int) -> Tensor:
    """Log-probs of all tokens at step `t`, from the unpadded prefix alone, float64."""
    prompt = rollouts.prompt_ids[row][rollouts.prompt_mask[row]]
    prefix = torch.cat([prompt, rollouts.response_ids[row, :t]])
    logits = model(prefix.unsqueeze(0), use_cache=False).logits[0, -1].double()
    return torch.log_softmax(logits / TEMPERATURE, dim=-1)


@pytest.mark.parametrize("pad", [PAD_ID, EOS_ID])
@pytest.mark.parametrize("max_tokens", [None, 3])
def test_logprobs_and_entropy_are_each_steps(family: str, pad: int, max_tokens: int | None) -> None:
    model = optimized_causal_lm(family)
    rollouts = rollouts_of(model, pad)
    statistics = compute_policy_statistics(
        model, rollouts, temperature=TEMPERATURE, max_tokens_per_forward=max_tokens
    )
    logprobs, entropy = torch.zeros(4, 8), torch.zeros(4, 8)
    for row, length in enumerate(rollouts.lengths.tolist()):
        for t in range(length):
            step = distributions(model, rollouts, row, t)
            logprobs[row, t] = step[rollouts.response_ids[row, t]]
            entropy[row, t] = -(step.exp() * step).sum()
    torch.testing.assert_close(statistics.logprobs, logprobs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(statistics.entropy, entropy, rtol=1e-4, atol=1e-4)


def test_dropout_and_gradients_are_off() -> None:
    noisy, plain = noisy_causal_lm().train(), optimized_causal_lm("gpt2")
    rollouts = rollouts_of(noisy)
    logprobs = compute_policy_statistics(noisy, rollouts, temperature=TEMPERATURE).logprobs
    expected = compute_policy_statistics(plain, rollouts, temperature=TEMPERATURE).logprobs
    assert torch.equal(logprobs, expected)
    assert not logprobs.requires_grad
    assert noisy.training
    critic = optimize_forward(build_scalar_model(noisy_causal_lm())).train()
    one, other = (compute_values(critic, rollouts)[0] for _ in range(2))
    assert torch.equal(one, other)
    assert critic.training


@torch.no_grad()
def test_values_are_those_of_each_state_alone(family: str) -> None:
    rollouts = rollouts_of(optimized_causal_lm(family))
    critic = optimize_forward(build_scalar_model(tiny_causal_lm(family))).train(False)
    values, next_values = compute_values(critic, rollouts)
    for row, length in enumerate(rollouts.lengths.tolist()):
        prompt = rollouts.prompt_ids[row][rollouts.prompt_mask[row]]
        for t in range(length + 1):
            state = torch.cat([prompt, rollouts.response_ids[row, :t]]).unsqueeze(0)
            expected = critic.score(critic.base_model(state).last_hidden_state[0, -1])[0]
            value = values[row, t] if t < length else next_values[row]
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    assert not values[~rollouts.response_mask].any()


@pytest.fixture(scope="module")
def rollouts() -> RolloutBatch:
    prompt_mask = torch.tensor([[False, True, True], [True, True, True]])
    response_mask = torch.tensor([[True] * 4, [True, True, False, False]])
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(4, 280, (2, 3), generator=generator).masked_fill(~prompt_mask, 0)
    responses = torch.randint(4, 280, (2, 4), generator=generator).masked_fill(~response_mask, 0)
    ended = torch.tensor([False, True])
    return RolloutBatch(prompts, prompt_mask, responses, response_mask, ended)


def test_each_network_gives_its_part(folder: Path, rollouts: RolloutBatch) -> None:
    policy, reference = optimized_causal_lm(seed=1), optimized_causal_lm(seed=2)
    critic = load_scalar_model(folder, head_seed=3)
    estimates = score_rollouts(policy, reference, critic, rollouts, temperature=0.7)
    statistics = compute_policy_statistics(policy, rollouts, temperature=0.7)
    assert torch.equal(estimates.logprobs, statistics.logprobs)
    assert torch.equal(estimates.entropy, statistics.entropy)
    of_reference = compute_policy_statistics(reference, rollouts, temperature=0.7)
    assert torch.equal(estimates.ref_logprobs, of_reference.logprobs)
    assert torch.equal(estimates.ref_prompt_entropy, of_reference.entropy[:, 0])
    # the first response token is predicted from the prompt: no other policy's response changes it
    rolled = rollouts._replace(response_ids=rollouts.response_ids.roll(1, dims=0), statistics=None)
    other = score_rollouts(policy, reference, critic, rolled, temperature=0.7)
    torch.testing.assert_close(other.ref_prompt_entropy, estimates.ref_prompt_entropy)
    assert estimates.ref_prompt_entropy.shape == (len(rollouts.lengths),)
    values, next_values = compute_values(critic, rollouts)
    assert torch.equal(estimates.values, values)
    assert torch.equal(estimates.next_values, next_values)
    for field in estimates[:6]:
        assert not field.requires_grad


def test_values_without_a_critic_are_zero(rollouts: RolloutBatch) -> None:
    policy = optimized_causal_lm(seed=1)
    estimates = score_rollouts(policy, policy, None, rollouts, temperature=0.7)
    assert torch.equal(estimates.values, torch.zeros(2, 4))
    assert torch.equal(estimates.next_values, torch.zeros(2))


def test_reference_of_an_adapted_policy_lacks_them(folder: Path, rollouts: RolloutBatch) -> None:
    policy = load_causal_lm(folder, ModelOptions(lora_rank=2))
    plain = compute_policy_statistics(load_causal_lm(folder), rollouts).logprobs
    move_adapters(policy, std=1.0)
    torch.testing.assert_close(compute_reference_statistics(policy, None, rollouts).logprobs, plain)
    # and the adapters are on again
    assert (compute_policy_statistics(policy, rollouts).logprobs - plain).abs().max() > 0.1
    with pytest.raises(ValueError, match="reference: expected a model, or None for a policy"):
        compute_reference_statistics(optimized_causal_lm(), None, rollouts)


def test_parts_of_a_rollout_give_what_the_whole_gives(folder: Path, rollouts: RolloutBatch) -> None:
    critic, policy = load_scalar_model(folder, head_seed=0), optimized_causal_lm()
    whole = score_rollouts(policy, policy, critic, rollouts)
    parts = score_rollouts(policy, policy, critic, rollouts, max_tokens_per_forward=1)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_statistics_are_reused_at_equal_temperature(folder: Path, rollouts: RolloutBatch) -> None:
    policy, critic = optimized_causal_lm(seed=1), load_scalar_model(folder, head_seed=0)
    known = PolicyStatistics(torch.full((2, 4), -7.0), torch.full((2, 4), 5.0), TEMPERATURE)
    sampled = rollouts._replace(statistics=known)
    reused = score_rollouts(policy, policy, critic, sampled, temperature=TEMPERATURE)
    assert torch.equal(reused.logprobs, known.logprobs)
    assert torch.equal(reused.entropy, known.entropy)
    computed = score_rollouts(policy, policy, critic, sampled, temperature=1.0)
    expected = compute_policy_statistics(policy, rollouts, temperature=1.0)
    assert torch.equal(computed.logprobs, expected.logprobs)
    assert torch.equal(computed.entropy, expected.entropy)
