"""B3: rotary factors depend on the longest sequence of a run, and not of a batch."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from lit_rlhf.forward import (
    forward_plan,
    longest_sequence,
    optimize_forward,
    sequence_scores,
    set_longest_sequence,
    target_logprobs,
    token_logits,
)
from lit_rlhf.models import load_causal_lm, load_scalar_model
from lit_rlhf.modules import PPOModule, SFTModule
from lit_rlhf.rollout import SamplingOptions, VLLMSampler, generate_responses
from tests.support.doctor_runs import findings, module_of
from tests.support.stages import (
    causal_lm,
    demonstrations,
    fit_module,
    ppo_options,
    prompts,
    write_data,
    write_models,
)
from tests.support.tiny_models import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE

ORIGINAL = 24
"""The longest sequence of the models' first training, in tokens."""
LONGEST = 48
SHORT, LONG = 10, 40

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.2, 1.4, 1.6],
    "long_factor": [1.5, 3.0, 6.0, 12.0],
    "original_max_position_embeddings": ORIGINAL,
    "rope_theta": 100.0,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
STATIC: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 100.0},
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0},
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "rope_theta": 100.0,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "rope_theta": 100.0,
    },
}
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB_SIZE, "hidden_size": 16, "intermediate_size": 32},
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"initializer_range": 0.2, "max_position_embeddings": 128, "tie_word_embeddings": False},
    **{"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID},
}


def phi3() -> PreTrainedConfig:
    rope = {"rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL}
    return transformers.Phi3Config(**SIZES | rope)


def llama(rope: dict[str, Any], **sizes: int) -> PreTrainedConfig:
    return transformers.LlamaConfig(**SIZES | {"head_dim": 8, "rope_parameters": rope} | sizes)


def phimoe() -> PreTrainedConfig:
    rope = LONGROPE | {"short_mscale": 1.0, "long_mscale": 1.5}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": None}
    return transformers.PhimoeConfig(**SIZES | {"rope_parameters": rope} | experts)


VARYING: dict[str, Callable[[], PreTrainedConfig]] = {
    "phi3": phi3,
    "llama, longrope": lambda: llama(LONGROPE),
    "llama, dynamic": lambda: llama(DYNAMIC, max_position_embeddings=ORIGINAL),
    "phimoe": phimoe,
}
over_models = pytest.mark.parametrize("name", VARYING)


def padded(*lengths: int) -> tuple[Tensor, Tensor]:
    """Rows of tokens padded on the right, each with the same tokens at the same positions."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(4, VOCAB_SIZE, (max(lengths),), generator=torch.Generator().manual_seed(1))
    return torch.where(mask, ids, PAD_ID), mask


def logprobs(model: PreTrainedModel, *lengths: int) -> Tensor:
    ids, mask = padded(*lengths)
    with torch.no_grad():
        return target_logprobs(model, ids, mask, mask & (torch.arange(mask.shape[1]) > 0))


@over_models
@pytest.mark.parametrize("optimize", [True, False])
def test_log_probs_do_not_depend_on_other_rows(name: str, optimize: bool) -> None:
    config = VARYING[name]()
    if not optimize:
        config._attn_implementation = "eager"  # padded forwards
    model = optimize_forward(causal_lm(config).eval())
    assert forward_plan(model).varying_positions
    plain = causal_lm(VARYING[name]()).eval()
    with torch.no_grad():
        mask = padded(SHORT, LONG)[1].long()
        beside = plain(padded(SHORT, LONG)[0], attention_mask=mask).logits[0, :SHORT]
        alone = plain(padded(SHORT)[0]).logits[0]
    assert not torch.allclose(beside, alone, atol=1e-2)  # the defect shows without the rule
    set_longest_sequence(model, LONGEST)
    expected = logprobs(model, SHORT)[0]
    for lengths in ((SHORT, LONG), (SHORT, LONGEST), (SHORT, 5)):
        actual = logprobs(model, *lengths)[0, :SHORT]
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        # the factors of the longest sequence, which plain transformers takes for such a row
        ids = padded(LONGEST)[0]
        whole = plain(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(logprobs(model, LONGEST)[:, 1:], whole, rtol=1e-4, atol=1e-4)


@over_models
def test_short_runs_compute_as_plain_transformers(name: str) -> None:
    model = optimize_forward(causal_lm(VARYING[name]()).eval())
    assert longest_sequence(model) == ORIGINAL
    plain = causal_lm(VARYING[name]()).eval()
    ids, mask = padded(ORIGINAL)
    with torch.no_grad():
        expected = plain(ids).logits
    for longest in (ORIGINAL, 17):
        set_longest_sequence(model, longest)
        ids, mask = padded(longest)
        with torch.no_grad():
            actual = token_logits(model, ids, mask)
        torch.testing.assert_close(actual, expected[:, :longest], rtol=1e-4, atol=1e-4)


@over_models
def test_longer_sequences_than_the_factors_are_for_are_refused(name: str) -> None:
    model = optimize_forward(causal_lm(VARYING[name]()).eval())
    message = rf"sequences of at most {ORIGINAL} tokens, got {LONG}: .*set_longest_sequence"
    ids, mask = padded(SHORT, LONG)
    with pytest.raises(ValueError, match=message):
        logprobs(model, SHORT, LONG)
    with pytest.raises(ValueError, match=message):
        token_logits(model, ids, mask)
    options = SamplingOptions(max_new_tokens=LONG - SHORT)
    if name != "llama, dynamic":  # which has no more positions
        with pytest.raises(ValueError, match=message):
            generate_responses(
                model,
                ids[:1, :SHORT],
                mask[:1, :SHORT],
                options,
                eos_token_ids=[EOS_ID],
                pad_token_id=PAD_ID,
                seed=0,
            )
    # padding does not count
    short_ids, short_mask = (torch.nn.functional.pad(part, (LONG, 0)) for part in padded(SHORT))
    assert token_logits(model, short_ids, short_mask).shape[1] == SHORT + LONG


@pytest.mark.parametrize("rope", STATIC)
def test_factors_of_other_types_depend_on_nothing(rope: str) -> None:
    model = optimize_forward(causal_lm(llama(STATIC[rope])).eval())
    assert longest_sequence(model) is None
    assert not forward_plan(model).varying_positions
    assert not any(module._forward_pre_hooks for module in model.modules())
    expected = logprobs(model, SHORT)[0]
    actual = logprobs(model, SHORT, LONG)[0, :SHORT]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_factors_that_cannot_be_fixed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_rlhf.forward.positions._add_last_position", lambda *_: None)
    monkeypatch.setattr(
        "lit_rlhf.forward.positions._drop_last_position", lambda module, args, output: output
    )
    with pytest.raises(ValueError, match=r"got Phi3ForCausalLM, in which they change beside one"):
        optimize_forward(causal_lm(phi3()))


def test_code_that_is_not_known_is_refused() -> None:
    model = causal_lm(phi3())
    model.model.rotary_emb.rope_type = "default"  # a module that decides by itself
    with pytest.raises(ValueError, match=r"rotary positions are transformers' own, got Phi3ForC"):
        optimize_forward(model)


@over_models
@pytest.mark.parametrize("n_prompt", [6, 20, 30])
def test_generation_on_both_sides_of_the_original_length_samples_as_scored(
    name: str, n_prompt: int
) -> None:
    if name == "llama, dynamic":
        pytest.skip("it has no positions beyond the length at which factors change")
    model = optimize_forward(causal_lm(VARYING[name]()).eval())
    set_longest_sequence(model, LONGEST)
    ids, mask = padded(n_prompt)
    mask = mask.repeat(4, 1)
    mask[1, :3] = False
    rollouts = generate_responses(
        model,
        ids.repeat(4, 1),
        mask,
        SamplingOptions(max_new_tokens=LONGEST - n_prompt),
        eos_token_ids=[EOS_ID],
        pad_token_id=PAD_ID,
        seed=0,
    )
    if rollouts.statistics is None:
        return
    targets = rollouts.to_sequence_mask(rollouts.response_mask)
    with torch.no_grad():
        scored = target_logprobs(model, rollouts.sequence_ids, rollouts.sequence_mask, targets)
    scored = scored[:, n_prompt:]
    torch.testing.assert_close(rollouts.statistics.logprobs, scored, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `policy` and `reward` of a Phi-3 with longrope, and data; read only."""
    return write_data(write_models(tmp_path_factory.mktemp("models"), phi3()))


@pytest.mark.parametrize("network", [{}, {"lora_rank": 2}])
def test_run_starts_without_kl_and_at_a_ratio_of_one(
    root: Path, network: dict[str, int], tmp_path: Path
) -> None:
    # all prompts are short, and responses grow past the original length
    data = prompts(root, max_prompt_length=20)
    options = ppo_options(root, sampling={"max_new_tokens": 24}, network=network)
    module = PPOModule(**options)
    run = fit_module(module, data, tmp_path)
    for trained in (module.policy, module.critic, module.reward.models[0].model):
        assert longest_sequence(trained) == 44
    assert max(len(example.input_ids) for example in data.examples["train"]) == 20
    assert float(run.callback_metrics["rollout/response_length"]) > ORIGINAL - 20
    assert float(run.callback_metrics["rollout/kl"]) == pytest.approx(0.0, abs=1e-5)
    assert float(run.callback_metrics["ppo/ratio_first"]) == pytest.approx(1.0, abs=1e-5)


def test_sft_fixes_the_factors_by_the_longest_dialogue(root: Path, tmp_path: Path) -> None:
    module = SFTModule(str(root / "policy"))
    fit_module(module, demonstrations(root, max_length=56), tmp_path)
    assert longest_sequence(module.model) == 56
    # what is saved is plain: it is fixed anew where it is loaded
    assert longest_sequence(load_causal_lm(tmp_path / "model")) == ORIGINAL


def test_scores_do_not_depend_on_other_dialogues(root: Path) -> None:
    model = load_scalar_model(root / "reward").eval()
    with pytest.raises(ValueError, match=f"at most {ORIGINAL} tokens, got {LONG}"):
        sequence_scores(model, *padded(SHORT, LONG))
    set_longest_sequence(nn.ModuleList([model]), LONGEST)
    with torch.no_grad():
        beside = sequence_scores(model, *padded(SHORT, LONG))[0]
        alone = sequence_scores(model, *padded(SHORT))[0]
    torch.testing.assert_close(beside, alone, rtol=1e-4, atol=1e-4)


def test_doctor_compares_rows_beside_the_longest_sequence(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finding() -> str:
        report = findings(root, tmp_path, module_of(root), data={"max_prompt_length": 16})
        return str(report.findings["padding"].status)

    assert finding() == "ok"
    # without the rule the doctor says so
    monkeypatch.setattr(
        "lit_rlhf.forward.positions._add_last_position", lambda module, args, kwargs: None
    )
    monkeypatch.setattr(
        "lit_rlhf.forward.positions._drop_last_position", lambda module, args, output: output
    )
    monkeypatch.setattr("lit_rlhf.forward.optimize._fix_positions", lambda model: True)
    assert finding() == "failure"


def test_vllm_is_built_for_the_longest_sequence(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[dict[str, Any]] = []
    module = ModuleType("vllm")
    module.LLM = lambda **settings: built.append(settings)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    model = load_causal_lm(root / "policy")
    set_longest_sequence(model, LONGEST)
    VLLMSampler()._build_engine(model)
    VLLMSampler({"max_model_len": 100})._build_engine(model)
    assert [settings["max_model_len"] for settings in built] == [LONGEST, 100]
