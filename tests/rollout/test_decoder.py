"""Generation that refills its slots: the tokens of `generate`, and no work for who has ended."""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from lit_rlhf.rollout import (
    RolloutBatch,
    SamplingOptions,
    batch,
    compute_policy_statistics,
    decoder,
)
from lit_rlhf.rollout.decoder import KVCache
from tests.support.decoding import generate_with_transformers, make_prompts, sample_responses
from tests.support.nucleus import nucleus_logprobs
from tests.support.tiny_models import FAMILIES, PAD_ID, optimized_causal_lm, tiny_causal_lm


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {}) for family in FAMILIES),
        ("llama", {"repetition_penalty": 1.3}),
        ("gpt2", {"min_new_tokens": 5}),
    ],
)
def test_greedy_tokens_are_those_of_transformers(family: str, options: dict[str, Any]) -> None:
    ids, mask = make_prompts()
    expected = generate_with_transformers(tiny_causal_lm(family), ids, mask, **options)
    greedy = SamplingOptions(max_new_tokens=30, do_sample=False, **options)
    for n_slots in (6, 2):
        model = optimized_causal_lm(family)
        rollouts = sample_responses(model, ids, mask, greedy, batch_size=n_slots)
        assert torch.equal(rollouts.response_ids, expected[:, : rollouts.response_ids.shape[1]])


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_response_depends_only_on_prompt_row_and_seed(family: str) -> None:
    model, options = optimized_causal_lm(family), SamplingOptions(max_new_tokens=30)
    ids, mask = make_prompts()
    six_slots, two_slots = (
        sample_responses(model, ids, mask, options, seed=3, batch_size=n) for n in (6, 2)
    )
    assert torch.equal(six_slots.response_ids, two_slots.response_ids)
    # the other rows get other prompts, which must not change the response of the third
    third = torch.arange(6)[:, None] == 2
    changed = torch.where(third, ids, ids.flip(1)).masked_fill(~mask, PAD_ID)
    beside = sample_responses(model, changed, mask, options, seed=3, batch_size=2)
    n_tokens = int(six_slots.lengths[2])
    assert int(beside.lengths[2]) == n_tokens
    assert torch.equal(beside.response_ids[2, :n_tokens], six_slots.response_ids[2, :n_tokens])


def test_padding_does_not_count_as_a_token_that_occurred() -> None:
    # the padding of the shorter prompts is the token that would come next without a penalty
    model, responses_alone = optimized_causal_lm(), []
    options = SamplingOptions(max_new_tokens=4, do_sample=False, repetition_penalty=1e6)
    ids, mask = make_prompts()
    for row in range(len(ids)):
        prompt, real = ids[row, mask[row]][None], mask[row, mask[row]][None]
        rollouts = sample_responses(model, prompt, real, options, eos_token_ids=[])
        responses_alone.append(rollouts.response_ids[0])
    for row in range(1, len(ids)):
        padded = ids.masked_fill(~mask, int(responses_alone[row][0]))
        together = sample_responses(model, padded, mask, options, eos_token_ids=[])
        assert torch.equal(together.response_ids[row], responses_alone[row])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_statistics_of_sampling_equal_those_of_scoring(temperature: float) -> None:
    model, (ids, mask) = optimized_causal_lm(), make_prompts()
    options = SamplingOptions(max_new_tokens=30, temperature=temperature, top_k=40)
    rollouts = sample_responses(model, ids, mask, options, seed=3, batch_size=4)
    assert not rollouts.statistics.logprobs.requires_grad
    assert not rollouts.statistics.entropy.requires_grad
    scored = compute_policy_statistics(model, rollouts, temperature=temperature)
    # the statistics belong to the whole distribution, although top_k cuts what is sampled
    torch.testing.assert_close(rollouts.statistics.logprobs, scored.logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rollouts.statistics.entropy, scored.entropy, rtol=1e-5, atol=1e-5)


def test_log_probs_of_a_nucleus_are_of_what_is_left_of_the_policy() -> None:
    model, (ids, mask) = optimized_causal_lm(), make_prompts()
    options = SamplingOptions(max_new_tokens=12, temperature=0.8, top_p=0.7)
    rollouts = sample_responses(model, ids, mask, options, seed=3, batch_size=4)
    expected = nucleus_logprobs(model, rollouts, options)
    sampler_logprobs = rollouts.sampler_logprobs
    torch.testing.assert_close(
        sampler_logprobs[rollouts.response_mask].double(), expected, rtol=0, atol=1e-4
    )
    assert not sampler_logprobs[~rollouts.response_mask].any()
    plain = replace(options, top_p=1.0)
    for uncut in (plain, replace(options, do_sample=False)):
        sampled = sample_responses(model, ids, mask, uncut, seed=3, batch_size=4)
        assert sampled.sampler_logprobs is None


def test_statistics_of_sampling_are_dropped_in_bfloat16() -> None:
    model, (ids, mask) = optimized_causal_lm().to(torch.bfloat16), make_prompts()
    options = SamplingOptions(max_new_tokens=10)
    assert sample_responses(model, ids, mask, options).statistics is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = sample_responses(optimized_causal_lm(), ids, mask, options)
    assert mixed.statistics is None


def test_ended_sequences_are_not_computed() -> None:
    model, (ids, mask) = optimized_causal_lm(), make_prompts()
    options = SamplingOptions(max_new_tokens=30)
    input_shapes: list[tuple[int, int]] = []
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(
        lambda _, inputs, __: input_shapes.append(tuple(inputs[0].shape))
    )
    head_rows: list[int] = []
    model.lm_head.register_forward_hook(lambda _, inputs, __: head_rows.append(len(inputs[0])))
    rollouts = sample_responses(model, ids, mask, options, seed=3, batch_size=2)
    assert sum(head_rows) == int(rollouts.lengths.sum())  # one position for each token
    assert 0 < int(rollouts.terminated.sum()) < 6
    # prompts are read once, each token of a response but the last once, and nothing else
    assert sum(rows * t for rows, t in input_shapes) == int(mask.sum() + rollouts.lengths.sum()) - 6
    assert max(rows for rows, tokens in input_shapes if tokens == 1) == 2


def test_release_interval_does_not_change_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    # up to the last of 128 learned positions, which the steps after the end must not exceed
    model, options = optimized_causal_lm("gpt2"), SamplingOptions(max_new_tokens=28)
    mask = torch.arange(100) >= 100 - torch.tensor([100, 40, 99])[:, None]
    ids = torch.randint(4, 288, mask.shape, generator=torch.Generator().manual_seed(1))
    expected = sample_responses(model, ids, mask, options, seed=3, batch_size=2)
    assert int(expected.terminated.sum()) > 0
    monkeypatch.setattr(decoder, "CPU_RELEASE_INTERVAL", 8)
    rollouts = sample_responses(model, ids, mask, options, seed=3, batch_size=2)
    assert torch.equal(rollouts.response_ids, expected.response_ids)
    assert torch.equal(rollouts.response_mask, expected.response_mask)
    endless = sample_responses(model, ids, mask, options, eos_token_ids=[], seed=3, batch_size=2)
    assert endless.lengths.tolist() == [28] * 3


def test_prefill_reads_no_more_tokens_at_once_than_scoring(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids, mask) = optimized_causal_lm(), make_prompts()
    options = SamplingOptions(max_new_tokens=30)
    expected = sample_responses(model, ids, mask, options, seed=3)
    tokens_read: list[int] = []
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(lambda _, inputs, __: tokens_read.append(inputs[0].numel()))
    monkeypatch.setattr(batch, "CPU_TOKENS_PER_FORWARD", 20)
    rollouts = sample_responses(model, ids, mask, options, seed=3)
    assert tokens_read[:4] == [20, 18, 18, 9]  # prompts of 20, 13 + 5, 17 + 1 and 9 tokens
    assert max(tokens_read[4:]) <= 6
    assert torch.equal(rollouts.response_ids, expected.response_ids)


def test_changed_weights_are_read_under_autocast() -> None:
    model, (ids, mask) = optimized_causal_lm().requires_grad_(True), make_prompts()
    greedy = SamplingOptions(max_new_tokens=10, do_sample=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first_ids = sample_responses(model, ids, mask, greedy, eos_token_ids=[]).response_ids
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(-parameter)
        changed_ids = sample_responses(model, ids, mask, greedy, eos_token_ids=[]).response_ids
    with torch.autocast("cpu", dtype=torch.bfloat16):
        repeated_ids = sample_responses(model, ids, mask, greedy, eos_token_ids=[]).response_ids
    assert torch.equal(changed_ids, repeated_ids)
    assert not torch.equal(first_ids, changed_ids)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "gpt_neox", "opt"])
def test_decoding_with_cast_weights_samples_what_autocast_samples(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (ids, mask) = optimized_causal_lm(family), make_prompts()
    options = SamplingOptions(max_new_tokens=12, top_p=0.9)
    kinds = [type(module) for module in model.modules()]
    parameters = [id(parameter) for parameter in model.parameters()]
    autocast_in_layers: list[bool] = []
    model.get_output_embeddings().register_forward_hook(
        lambda *_: autocast_in_layers.append(torch.is_autocast_enabled("cpu"))
    )

    def sample() -> RolloutBatch:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return sample_responses(model, ids, mask, options, seed=3)

    rollouts = sample()
    assert not any(autocast_in_layers)
    monkeypatch.setattr(decoder, "_only_linear_layers_multiply", lambda _: False)
    autocast_in_layers.clear()
    expected = sample()
    assert all(autocast_in_layers)
    assert torch.equal(rollouts.response_ids, expected.response_ids)
    # the products are equal to the bit: both multiply bfloat16 weights in the same kernel
    assert torch.equal(rollouts.sampler_logprobs, expected.sampler_logprobs)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert [type(module) for module in model.modules()] == kinds
    assert [id(parameter) for parameter in model.parameters()] == parameters


def test_the_cache_is_freed_with_the_rollout() -> None:
    model, (ids, mask) = optimized_causal_lm(), make_prompts()
    options = SamplingOptions(max_new_tokens=5)
    rollouts = sample_responses(model, ids, mask, options, batch_size=2)
    gc.collect()
    assert len(rollouts.response_ids) == 6
    assert KVCache not in {type(instance) for instance in gc.get_objects()}
