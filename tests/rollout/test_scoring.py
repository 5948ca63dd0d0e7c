from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rlhf.models import build_scalar_model
from lit_rlhf.rollout import (
    RolloutBatch,
    SamplingOptions,
    generate_responses,
    response_logprobs,
    response_statistics,
    response_value_estimates,
)
from tests.support.tiny_models import (
    EOS_ID,
    FAMILIES,
    PAD_ID,
    VOCAB_SIZE,
    tiny_causal_lm,
    tiny_config,
)

TEMPERATURE = 0.7


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def rollouts_of(model: PreTrainedModel, pad: int = PAD_ID) -> RolloutBatch:
    """Responses of 8, 3, 1 and 5 tokens to prompts of 9, 4, 1 and 6."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.full((4, 9), pad)
    mask = torch.zeros((4, 9), dtype=torch.bool)
    for i, length in enumerate((9, 4, 1, 6)):
        ids[i, 9 - length :] = torch.randint(4, VOCAB_SIZE, (length,), generator=generator)
        mask[i, 9 - length :] = True
    options = SamplingOptions(max_new_tokens=8, temperature=TEMPERATURE)
    rollouts = generate_responses(model, ids, mask, options, (), pad, seed=0)
    response_ids, lengths = rollouts.response_ids.clone(), torch.tensor([8, 3, 1, 5])
    response_mask = torch.arange(8) < lengths[:, None]
    response_ids[1, 2] = response_ids[2, 0] = EOS_ID
    return rollouts._replace(
        response_ids=response_ids.masked_fill(~response_mask, pad), response_mask=response_mask
    )


@torch.no_grad()
def distributions(model: PreTrainedModel, rollouts: RolloutBatch, row: int, t: int) -> Tensor:
    """Log-probs of all tokens at step `t`, from the unpadded prefix alone, float64."""
    prompt = rollouts.prompt_ids[row][rollouts.prompt_mask[row]]
    prefix = torch.cat([prompt, rollouts.response_ids[row, :t]])
    logits = model(prefix.unsqueeze(0), use_cache=False).logits[0, -1].double()
    return torch.log_softmax(logits / TEMPERATURE, dim=-1)


@pytest.mark.parametrize("pad", [PAD_ID, EOS_ID])
@pytest.mark.parametrize("micro_batch_size", [None, 3])
def test_logprobs_and_entropy_are_those_of_each_step_alone(
    family: str, pad: int, micro_batch_size: int | None
) -> None:
    model = tiny_causal_lm(family)
    rollouts = rollouts_of(model, pad)
    statistics = response_statistics(model, rollouts, TEMPERATURE, micro_batch_size)
    logprobs, entropy = torch.zeros(4, 8), torch.zeros(4, 8)
    for row, length in enumerate(rollouts.lengths.tolist()):
        for t in range(length):
            step = distributions(model, rollouts, row, t)
            logprobs[row, t] = step[rollouts.response_ids[row, t]]
            entropy[row, t] = -(step.exp() * step).sum()
    torch.testing.assert_close(statistics.logprobs, logprobs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(statistics.entropy, entropy, rtol=1e-4, atol=1e-4)
    alone = response_logprobs(model, rollouts, TEMPERATURE, micro_batch_size)
    assert torch.equal(alone, statistics.logprobs)


def test_dropout_and_gradients_are_off() -> None:
    config = tiny_config("gpt2")
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.5
    noisy = type(tiny_causal_lm("gpt2"))(config)
    noisy.load_state_dict(tiny_causal_lm("gpt2").state_dict())
    noisy.train()
    rollouts = rollouts_of(noisy)
    logprobs = response_logprobs(noisy, rollouts, TEMPERATURE)
    assert torch.equal(logprobs, response_logprobs(tiny_causal_lm("gpt2"), rollouts, TEMPERATURE))
    assert not logprobs.requires_grad
    assert noisy.training


class PositionHead(nn.Module):
    """Its value is the index of the position it reads."""

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.arange(hidden.shape[1]).expand(hidden.shape[:2]).unsqueeze(-1)


@pytest.mark.parametrize("micro_batch_size", [None, 3])
def test_values_are_read_before_each_token_and_after_the_last(micro_batch_size: int | None) -> None:
    policy = tiny_causal_lm()
    rollouts = rollouts_of(policy)
    critic = build_scalar_model(policy)
    critic.score = PositionHead()
    values = response_value_estimates(critic, rollouts, micro_batch_size)
    # nine prompt columns: the first token's state ends at column 8
    assert values.values.tolist() == [
        [8, 9, 10, 11, 12, 13, 14, 15],
        [8, 9, 10, 0, 0, 0, 0, 0],
        [8, 0, 0, 0, 0, 0, 0, 0],
        [8, 9, 10, 11, 12, 0, 0, 0],
    ]
    assert values.bootstrap_values.tolist() == [16, 11, 9, 13]


@torch.no_grad()
def test_values_are_those_of_each_state_alone(family: str) -> None:
    rollouts = rollouts_of(tiny_causal_lm(family))
    critic = build_scalar_model(tiny_causal_lm(family)).train(False)
    values = response_value_estimates(critic, rollouts)
    for row, length in enumerate(rollouts.lengths.tolist()):
        prompt = rollouts.prompt_ids[row][rollouts.prompt_mask[row]]
        for t in range(length + 1):
            state = torch.cat([prompt, rollouts.response_ids[row, :t]]).unsqueeze(0)
            hidden = critic.base_model(state).last_hidden_state[0, -1]
            expected = critic.score(hidden)[0]
            got = values.values[row, t] if t < length else values.bootstrap_values[row]
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_forward_reads_at_least_one_token() -> None:
    model = tiny_causal_lm()
    with pytest.raises(ValueError, match="max_tokens: expected an integer >= 1, got 0"):
        response_logprobs(model, rollouts_of(model), max_tokens=0)


def test_a_rollout_survives_moving_and_slicing(tmp_path: Path) -> None:
    rollouts = rollouts_of(tiny_causal_lm())
    torch.save(tuple(rollouts[:5]), tmp_path / "r.pt")
    again = RolloutBatch(*torch.load(tmp_path / "r.pt", weights_only=True))
    assert torch.equal(again.sequence_ids, rollouts.sequence_ids)
