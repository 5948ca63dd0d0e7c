from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from lit_rlhf.forward import LanguageModel
from lit_rlhf.models import ModelOptions, load_causal_lm
from lit_rlhf.rollout import RolloutBatch, SamplingOptions, generate_responses
from lit_rlhf.rollout.generation import adapters_merged
from tests.support.decoding import make_short_prompts
from tests.support.tiny_models import (
    EOS_ID,
    PAD_ID,
    move_adapters,
    noisy_causal_lm,
    optimized_causal_lm,
    tiny_causal_lm,
)

Build = Callable[..., PreTrainedModel]
# this project's decoder samples from one, and transformers' `generate` from the other
over_decoders = pytest.mark.parametrize("build", [optimized_causal_lm, tiny_causal_lm])

OPTIONS = SamplingOptions(max_new_tokens=8)


def with_logit(token: int, bias: float, build: Build = optimized_causal_lm) -> PreTrainedModel:
    """A model whose logit of a token is raised by `bias`."""
    model = build()
    weight = model.get_parameter("lm_head.weight").detach()
    head = nn.Linear(weight.shape[1], weight.shape[0])
    head.weight = nn.Parameter(weight)
    nn.init.zeros_(head.bias)
    with torch.no_grad():
        head.bias[token] = bias
    model.set_submodule("lm_head", head)
    return model


def sampled(
    model: LanguageModel,
    options: SamplingOptions = OPTIONS,
    *,
    seed: int = 0,
    pad: int = PAD_ID,
    eos: tuple[int, ...] = (EOS_ID,),
    batch_size: int | None = None,
) -> RolloutBatch:
    ids, mask = make_short_prompts()
    return generate_responses(
        model,
        ids,
        mask,
        options,
        eos_token_ids=eos,
        pad_token_id=pad,
        seed=seed,
        batch_size=batch_size,
    )


def test_tokens_depend_on_the_seed_and_not_on_the_global_generator(family: str) -> None:
    model = optimized_causal_lm(family)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first, other = sampled(model, seed=3), sampled(model, seed=4)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    for a, b in zip(first[:5], sampled(model, seed=3)[:5], strict=True):
        assert torch.equal(a, b)
    assert other.response_ids.tolist() != first.response_ids.tolist()
    ids, mask = make_short_prompts()
    assert torch.equal(first.prompt_ids, ids)
    assert torch.equal(first.prompt_mask, mask)


@pytest.mark.parametrize("pad", [PAD_ID, EOS_ID])
@pytest.mark.parametrize("batch_size", [None, 3])
@over_decoders
def test_response_ends_with_its_first_eos(build: Build, pad: int, batch_size: int | None) -> None:
    model, lengths = with_logit(EOS_ID, 4.0, build), set()
    for seed in range(3):
        rollouts = sampled(model, seed=seed, pad=pad, batch_size=batch_size)
        columns = (*rollouts[2:5], rollouts.lengths)  # ids, mask and whether they ended
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for ids, mask, terminated, length in rows:
            assert mask == [True] * length + [False] * (len(ids) - length)
            assert EOS_ID not in ids[: length - 1]
            assert terminated == (ids[length - 1] == EOS_ID)
            assert terminated or length == 8
            assert ids[length:] == [pad] * (len(ids) - length)
            lengths.add(length)
        assert rollouts.response_ids.shape[1] == max(rollouts.lengths)
    assert len(lengths) > 3


@pytest.mark.parametrize(
    ("token", "options", "pad", "eos", "length"),
    [
        (EOS_ID, OPTIONS, PAD_ID, (EOS_ID,), 1),
        (EOS_ID, OPTIONS, EOS_ID, (EOS_ID,), 1),
        # as the last allowed token, too
        (EOS_ID, replace(OPTIONS, max_new_tokens=1), PAD_ID, (EOS_ID,), 1),
        (EOS_ID, replace(OPTIONS, min_new_tokens=3), PAD_ID, (EOS_ID,), 4),
        (7, OPTIONS, PAD_ID, (EOS_ID, 7), 1),
        # nothing else ends a response
        (7, OPTIONS, PAD_ID, (EOS_ID,), None),
        (PAD_ID, OPTIONS, PAD_ID, (EOS_ID,), None),
        (EOS_ID, OPTIONS, EOS_ID, (), None),
    ],
)
def test_response_ends_only_with_an_eos_token(
    token: int, options: SamplingOptions, pad: int, eos: tuple[int, ...], length: int | None
) -> None:
    rollouts = sampled(with_logit(token, 1e4), options, pad=pad, eos=eos)
    assert rollouts.lengths.tolist() == [length or 8] * 4
    assert (rollouts.response_ids[:, -1] == token).all()
    assert rollouts.terminated.tolist() == [length is not None] * 4


def test_dropout_is_off_and_modes_and_settings_are_restored() -> None:
    noisy = noisy_causal_lm().train()
    noisy.get_submodule("transformer.h.0").eval()
    expected = sampled(optimized_causal_lm("gpt2"), seed=5)
    assert torch.equal(sampled(noisy, seed=5).response_ids, expected.response_ids)
    assert noisy.training
    assert noisy.get_submodule("transformer.h.1").training
    assert not noisy.get_submodule("transformer.h.0").training
    plain = tiny_causal_lm()
    plain.generation_config = before = GenerationConfig(top_k=2)  # type: ignore[no-untyped-call]
    sampled(plain)
    assert plain.generation_config is before


IDS, MASK = make_short_prompts()


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        (IDS.float(), MASK, "prompt_ids: expected an integer dtype"),
        (IDS[:0], MASK[:0], "prompt_ids: expected shape"),
        (IDS, MASK.long(), "prompt_mask: expected dtype torch.bool"),
        (IDS, MASK[:, 1:], "prompt_mask: expected shape"),
        (IDS, MASK.flip(1), "prompt_mask: expected prompts.* padded on the left"),
        (IDS, torch.zeros_like(MASK), "prompt_mask: expected prompts of at least one token"),
    ],
)
def test_invalid_prompts_are_named(ids: Tensor, mask: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate_responses(
            optimized_causal_lm(),
            ids,
            mask,
            OPTIONS,
            eos_token_ids=[EOS_ID],
            pad_token_id=PAD_ID,
            seed=0,
        )


def test_invalid_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="expected prompt and response within the model's 128"):
        sampled(optimized_causal_lm("gpt2"), replace(OPTIONS, max_new_tokens=120))
    with pytest.raises(ValueError, match="batch_size: expected an integer >= 1, got 0"):
        sampled(optimized_causal_lm(), batch_size=0)


LEFTOVERS = GenerationConfig(
    **{"do_sample": True, "temperature": 0.3, "top_k": 3, "top_p": 0.5, "min_p": 0.2},
    **{"typical_p": 0.5, "epsilon_cutoff": 0.05, "repetition_penalty": 3.0, "min_length": 30},
    **{"no_repeat_ngram_size": 1, "suppress_tokens": [2, 3], "begin_suppress_tokens": [1]},
    **{"bad_words_ids": [[4]], "forced_eos_token_id": 0, "max_length": 11},
    exponential_decay_length_penalty=(0, 5.0),
)


def chi_square_is_plausible(counts: Tensor, probabilities: Tensor) -> bool:
    """Pearson's test at about five standard deviations, cells with few expected samples joined."""
    expected = probabilities * counts.sum()
    order = expected.argsort()
    expected, counts = expected[order], counts[order].double()
    few = int((expected.cumsum(0) < 8).sum()) + 1
    expected = torch.cat([expected[:few].sum()[None], expected[few:]])
    counts = torch.cat([counts[:few].sum()[None], counts[few:]])
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    return bool(statistic < freedom + 5 * (2 * freedom) ** 0.5)


@torch.no_grad()
def next_token_probabilities(vocab_size: int, ids: list[int], temperature: float) -> Tensor:
    logits = tiny_causal_lm("llama", vocab_size)(torch.tensor([ids])).logits[0, -1].double()
    return torch.softmax(logits / temperature, dim=0)


def samples(
    size: int, temperature: float, n_tokens: int, n_samples: int, build: Build = optimized_causal_lm
) -> Tensor:
    model = build("llama", vocab_size=size)
    model.generation_config = LEFTOVERS
    prompt = torch.tensor([[5, 6]]).expand(n_samples, 2)
    options = SamplingOptions(max_new_tokens=n_tokens, temperature=temperature)
    # no token ends a response, so all outcomes have the same length
    mask = torch.ones_like(prompt, dtype=torch.bool)
    return generate_responses(
        model, prompt, mask, options, eos_token_ids=(), pad_token_id=0, seed=0
    ).response_ids


@pytest.mark.parametrize("temperature", [0.7, 1.6])
@over_decoders
def test_pairs_of_tokens_have_product_probabilities(build: Build, temperature: float) -> None:
    sampled_ids = samples(8, temperature, n_tokens=2, n_samples=6000, build=build)
    first = next_token_probabilities(8, [5, 6], temperature)
    second = torch.stack([next_token_probabilities(8, [5, 6, t], temperature) for t in range(8)])
    counts = torch.bincount(sampled_ids[:, 0] * 8 + sampled_ids[:, 1], minlength=64)
    assert chi_square_is_plausible(counts, (first[:, None] * second).flatten())


@over_decoders
def test_vocabulary_larger_than_the_usual_top_k_is_sampled_in_full(build: Build) -> None:
    sampled_ids = samples(80, temperature=3.0, n_tokens=1, n_samples=8000, build=build)
    counts = torch.bincount(sampled_ids[:, 0], minlength=80)
    assert chi_square_is_plausible(counts, next_token_probabilities(80, [5, 6], 3.0))


def test_chi_square_tells_a_wrong_temperature() -> None:
    counts = torch.bincount(samples(8, 1.0, n_tokens=1, n_samples=6000)[:, 0], minlength=8)
    for wrong in (0.85, 1.2):
        assert not chi_square_is_plausible(counts, next_token_probabilities(8, [5, 6], wrong))


@pytest.fixture
def adapted(folder: Path) -> LanguageModel:
    return move_adapters(load_causal_lm(folder, ModelOptions(lora_rank=2)).eval())


def record_merging(model: LanguageModel) -> list[bool]:
    """Whether the adapters of the first layer were merged, at each of its calls."""
    seen: list[bool] = []
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.register_forward_hook(lambda layer, *_: seen.append(layer.merged))
    return seen


def test_adapters_are_merged_in_float32_and_restored(
    adapted: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {name: parameter.data for name, parameter in adapted.named_parameters()}
    values = {name: weight.clone() for name, weight in weights.items()}
    options, seen = SamplingOptions(max_new_tokens=12), record_merging(adapted)
    merged = sampled(adapted, options, seed=3)
    assert seen
    assert all(seen)
    with pytest.raises(ValueError, match="stopped"), adapters_merged(adapted):
        raise ValueError("stopped")
    for name, parameter in adapted.named_parameters():
        assert parameter.data_ptr() == weights[name].data_ptr()
        assert torch.equal(parameter, values[name])
    seen.clear()
    monkeypatch.setattr("lit_rlhf.rollout.generation.adapters_merged", lambda _: nullcontext())
    apart = sampled(adapted, options, seed=3)
    assert not any(seen)
    assert torch.equal(merged.response_ids, apart.response_ids)
    actual, expected = merged.statistics.logprobs, apart.statistics.logprobs
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    with adapted.disable_adapter():
        reference = sampled(adapted, options, seed=3)
    assert not torch.equal(merged.response_ids, reference.response_ids)


@pytest.mark.parametrize("case", ["bfloat16", "autocast", "disabled"])
def test_adapters_stay_apart_if_merging_lost_them(adapted: LanguageModel, case: str) -> None:
    if case == "bfloat16":
        for name, parameter in adapted.named_parameters():
            if "lora_" not in name:
                parameter.data = parameter.data.to(torch.bfloat16)
    seen = record_merging(adapted)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"),
        adapted.disable_adapter() if case == "disabled" else nullcontext(),
    ):
        sampled(adapted, SamplingOptions(max_new_tokens=2), seed=3)
    assert seen
    assert not any(seen)
