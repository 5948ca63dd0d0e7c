"""What policy, reference and critic make of a rollout: three networks, or adapters on and off."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lit_rlhf.models import ModelOptions, load_causal_lm, load_scalar_model, save_model_folder
from lit_rlhf.rollout import (
    RolloutBatch,
    reference_logprobs,
    response_logprobs,
    response_statistics,
    response_value_estimates,
    score_rollouts,
)
from tests.support.tiny_models import tiny_causal_lm, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("estimates") / "lm"
    save_model_folder(tiny_causal_lm(), tiny_tokenizer(), root)
    return root


@pytest.fixture(scope="module")
def rollouts() -> RolloutBatch:
    prompt_mask = torch.tensor([[False, True, True], [True, True, True]])
    response_mask = torch.tensor([[True] * 4, [True, True, False, False]])
    generator = torch.Generator().manual_seed(0)
    return RolloutBatch(
        torch.randint(4, 280, (2, 3), generator=generator).masked_fill(~prompt_mask, 0),
        prompt_mask,
        torch.randint(4, 280, (2, 4), generator=generator).masked_fill(~response_mask, 0),
        response_mask,
        torch.tensor([False, True]),
    )


def test_each_network_gives_its_part(folder: Path, rollouts: RolloutBatch) -> None:
    policy, reference = tiny_causal_lm(seed=1), tiny_causal_lm(seed=2)
    critic = load_scalar_model(folder, head_seed=3)
    estimates = score_rollouts(policy, reference, critic, rollouts, temperature=0.7)
    statistics = response_statistics(policy, rollouts, 0.7)
    assert torch.equal(estimates.logprobs, statistics.logprobs)
    assert torch.equal(estimates.entropy, statistics.entropy)
    assert torch.equal(estimates.ref_logprobs, response_logprobs(reference, rollouts, 0.7))
    values = response_value_estimates(critic, rollouts)
    assert torch.equal(estimates.values, values.values)
    assert torch.equal(estimates.next_values, values.bootstrap_values)
    for field in estimates:
        assert not field.requires_grad


def test_the_reference_of_a_policy_with_adapters_is_the_policy_without_them(
    folder: Path, rollouts: RolloutBatch
) -> None:
    policy = load_causal_lm(folder, ModelOptions(lora_rank=2))
    plain = response_logprobs(load_causal_lm(folder), rollouts)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(reference_logprobs(policy, None, rollouts, 1.0, None), plain)
    # and the adapters are on again
    assert (response_logprobs(policy, rollouts) - plain).abs().max() > 0.1


def test_a_policy_without_adapters_needs_a_reference(rollouts: RolloutBatch) -> None:
    with pytest.raises(ValueError, match="reference: expected one, or a policy with adapters"):
        reference_logprobs(tiny_causal_lm(), None, rollouts, 1.0, None)


def test_parts_of_a_rollout_give_what_the_whole_gives(folder: Path, rollouts: RolloutBatch) -> None:
    critic, policy = load_scalar_model(folder), tiny_causal_lm()
    whole = score_rollouts(policy, policy, critic, rollouts)
    parts = score_rollouts(policy, policy, critic, rollouts, max_tokens=1)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
