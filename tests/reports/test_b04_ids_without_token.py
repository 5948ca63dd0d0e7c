"""B4: ids that the tokenizer has no token for are neither sampled nor part of any distribution."""

import logging
import math
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from lit_rlhf.data import DialogueEncoder, parse_prompts
from lit_rlhf.export.checkpoint import load_checkpoint_model
from lit_rlhf.forward import (
    Offloaded,
    forward_plan,
    ids_without_token,
    on_device,
    optimize_forward,
    rule_out_ids_without_token,
    target_logprobs,
    token_logits,
)
from lit_rlhf.functional import exact_kl
from lit_rlhf.models import ModelOptions
from lit_rlhf.modules import PPOModule
from lit_rlhf.ppo import PPO
from lit_rlhf.rollout import (
    RolloutBatch,
    SamplingOptions,
    VLLMSampler,
    compute_policy_statistics,
    generate_responses,
)
from lit_rlhf.tools.evaluation import generate_from_models
from lit_rlhf.tools.evaluation.loading import load_policy
from tests.support.decoding import make_short_prompts
from tests.support.stages import fit_module, ppo_options, prompts, write_data, write_models
from tests.support.tiny_models import (
    EOS_ID,
    FAMILIES,
    PAD_ID,
    VOCAB_SIZE,
    tiny_causal_lm,
    tiny_config,
    tiny_tokenizer,
)

PADDED_SIZE = VOCAB_SIZE + 60
TEMPERATURE = 0.7
OPTIONS = SamplingOptions(max_new_tokens=20, temperature=TEMPERATURE)


def padded_model(family: str, optimize: bool = True) -> PreTrainedModel:
    """A model with 60 ids beyond its tokenizer, all of them likely."""
    model = tiny_causal_lm(family, vocab_size=PADDED_SIZE)
    return optimize_forward(model) if optimize else model


def ruled_out(model: PreTrainedModel) -> PreTrainedModel:
    rule_out_ids_without_token([model], tiny_tokenizer())
    return model


def sample(model: PreTrainedModel, options: SamplingOptions = OPTIONS) -> RolloutBatch:
    ids, mask = make_short_prompts()
    return generate_responses(
        model,
        ids.repeat(4, 1),
        mask.repeat(4, 1),
        options,
        eos_token_ids=[EOS_ID],
        pad_token_id=PAD_ID,
        seed=0,
    )


@torch.no_grad()
def expected_logprobs(model: PreTrainedModel, rollouts: RolloutBatch) -> Tensor:
    """Log-probs over the tokens that there are, `[B, T, V]` float64, by transformers' forward."""
    mask = rollouts.sequence_mask
    positions: dict[str, Tensor] = {}
    if "position_ids" in signature(model.forward).parameters:
        positions["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0)
    logits = model(rollouts.sequence_ids, attention_mask=mask.long(), **positions).logits
    width = rollouts.response_ids.shape[1]
    known = logits[:, -width - 1 : -1, :VOCAB_SIZE].double() / TEMPERATURE
    return known.log_softmax(-1)


CASES = [
    *((family, True) for family in FAMILIES),
    ("gemma2", True),  # computes padded forwards, and caps its logits
    ("llama", False),  # sampled from by transformers
]


@pytest.mark.parametrize(("family", "optimize"), CASES)
def test_sampling_and_scoring_use_the_distribution_over_tokens(family: str, optimize: bool) -> None:
    before = sample(padded_model(family, optimize))
    assert int(before.response_ids.max()) >= VOCAB_SIZE  # the defect shows without the rule
    model = ruled_out(padded_model(family, optimize))
    assert forward_plan(model).chunked_logits == (optimize and family != "gemma2")
    rollouts = sample(model)
    assert int(rollouts.response_ids.max()) < VOCAB_SIZE
    mask = rollouts.response_mask
    expected = expected_logprobs(padded_model(family, optimize), rollouts)
    logprobs = expected.gather(-1, rollouts.response_ids[..., None])[..., 0][mask]
    entropy = -(expected.exp() * expected).sum(-1)[mask]
    statistics = [compute_policy_statistics(model, rollouts, TEMPERATURE)]
    if rollouts.statistics is not None:
        statistics.append(rollouts.statistics)
    for actual in statistics:
        torch.testing.assert_close(actual.logprobs[mask].double(), logprobs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(actual.entropy[mask].double(), entropy, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", [{"do_sample": False}, {"top_k": 340}, {"top_p": 0.9}])
def test_options_of_sampling_choose_among_tokens(change: dict[str, Any]) -> None:
    model = ruled_out(padded_model("llama"))
    options = SamplingOptions(max_new_tokens=20, repetition_penalty=1.2, **change)
    assert int(sample(model, options).response_ids.max()) < VOCAB_SIZE


def test_model_without_such_ids_is_left_as_it_is() -> None:
    plain, given = (optimize_forward(tiny_causal_lm("llama")) for _ in range(2))
    assert ids_without_token(ruled_out(given)) is None
    assert not given._forward_hooks
    assert vars(given).keys() == vars(plain).keys()
    for a, b in zip(sample(plain)[:5], sample(given)[:5], strict=True):
        assert torch.equal(a, b)


def test_ids_between_tokens_are_ruled_out_too() -> None:
    model = optimize_forward(tiny_causal_lm("llama"))
    vocabulary = {name: i for name, i in tiny_tokenizer().get_vocab().items() if i not in (7, 100)}
    tokenizer: Any = SimpleNamespace(get_vocab=lambda: vocabulary, all_special_ids=[PAD_ID])
    rule_out_ids_without_token([model], tokenizer)
    assert ids_without_token(model).tolist() == [7, 100]  # type: ignore[union-attr]
    ids = torch.arange(4, 20)[None]
    mask = torch.ones_like(ids, dtype=torch.bool)
    minus_infinity = token_logits(model, ids, mask)[0, 0] == -torch.inf
    assert minus_infinity.nonzero().flatten().tolist() == [7, 100]


def test_gradients_reach_no_row_without_a_token() -> None:
    model = ruled_out(padded_model("llama"))
    ids = torch.arange(4, 24)[None]
    mask = torch.ones_like(ids, dtype=torch.bool)
    target_logprobs(model, ids, mask, mask & (torch.arange(20) > 3)).sum().backward()  # type: ignore[no-untyped-call]
    gradient = model.get_parameter("lm_head.weight").grad
    assert gradient is not None
    assert gradient.isfinite().all()
    assert not gradient[VOCAB_SIZE:].any()
    assert gradient[:VOCAB_SIZE].any()


@torch.no_grad()
def test_offloaded_reference_rules_out_the_same_ids() -> None:
    model = padded_model("llama")
    reference = Offloaded(padded_model("llama"))
    rule_out_ids_without_token([model, reference], tiny_tokenizer())
    ids = torch.arange(4, 24)[None]
    mask = torch.ones_like(ids, dtype=torch.bool)
    logits = token_logits(model, ids, mask)
    assert (logits == -torch.inf).sum(-1).eq(60).all()
    for _ in range(2):  # the second use comes after the weights went home
        with on_device(reference, torch.device("cpu")) as network:
            kl = exact_kl(logits, token_logits(network, ids, mask))
    assert float(kl.abs().max()) < 1e-6


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `policy` and `reward` with padded embeddings, and data; read only."""
    root = write_models(tmp_path_factory.mktemp("models"), tiny_config("llama", PADDED_SIZE))
    return write_data(root)


@pytest.mark.parametrize("lora", [0, 2])
def test_ppo_starts_without_kl_and_at_a_ratio_of_one(
    root: Path, lora: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        module = PPOModule(
            **ppo_options(root, network={"lora_rank": lora}, loss={"entropy_coef": 0.01})
        )
    lines = [r.message for r in caplog.records if "no token in its tokenizer" in r.message]
    assert lines == [
        f"LlamaForCausalLM: 60 of its {PADDED_SIZE} ids have no token in its tokenizer; they are "
        "neither sampled nor part of log-probs, entropy and KL"
    ]
    run = fit_module(module, prompts(root), tmp_path)
    metrics = run.callback_metrics
    assert float(metrics["rollout/kl"]) == pytest.approx(0.0, abs=1e-5)
    assert float(metrics["ppo/ratio_first"]) == pytest.approx(1.0, abs=1e-5)
    # a checkpoint's state dict does not depend on ruled out ids
    assert not any("without_token" in name for name in module.state_dict())


def test_finished_and_exported_policy_suppress_them(root: Path, tmp_path: Path) -> None:
    module = PPOModule(**ppo_options(root, output_dir=str(tmp_path / "policy")))
    run = fit_module(module, prompts(root), tmp_path)
    run.save_checkpoint(tmp_path / "run.ckpt")
    exported = load_checkpoint_model(tmp_path / "run.ckpt")
    without_token = list(range(VOCAB_SIZE, PADDED_SIZE))
    assert exported.generation is not None
    assert exported.generation["suppress_tokens"] == without_token
    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert plain.generation_config.suppress_tokens == without_token
    ids, mask = make_short_prompts()
    sequences = plain.generate(
        ids.repeat(8, 1), attention_mask=mask.long().repeat(8, 1), max_new_tokens=20
    )
    assert int(sequences.max()) < VOCAB_SIZE


def test_bound_on_entropy_is_compared_with_the_number_of_tokens(root: Path) -> None:
    below = math.log(VOCAB_SIZE) - 0.01
    above = math.log(VOCAB_SIZE) + 0.01  # and below the log of all ids
    PPOModule(**ppo_options(root, loss={"entropy_coef": 0.1, "entropy_clip": below}))
    with pytest.warns(UserWarning, match=f"the log of {VOCAB_SIZE} tokens"):
        PPOModule(**ppo_options(root, loss={"entropy_coef": 0.1, "entropy_clip": above}))


def test_id_that_another_sampler_draws_is_refused(root: Path) -> None:
    class Padded:
        def __call__(self, *arguments: Any, **options: Any) -> RolloutBatch:
            rollouts = generate_responses(*arguments, **options)
            rollouts.response_ids[0, 0] = VOCAB_SIZE + 3
            return rollouts

    module = PPOModule(**ppo_options(root, sampler=Padded()))
    ids, mask = make_short_prompts()
    batch: Any = SimpleNamespace(input_ids=ids, attention_mask=mask)
    with pytest.raises(ValueError, match=rf"sampler: expected ids .* got {VOCAB_SIZE + 3}, whose"):
        PPO.rollout(module.ppo, batch, seed=0)


def test_vllm_is_told_to_leave_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def complete(self: VLLMSampler, model: Any, prompts: Any, settings: Any) -> Any:
        asked.extend(settings)
        return [SimpleNamespace(token_ids=[EOS_ID], logprobs=[-1.0])] * len(prompts)

    monkeypatch.setattr(VLLMSampler, "_complete", complete)
    ids, mask = make_short_prompts()
    for model in (padded_model("llama"), ruled_out(padded_model("llama"))):
        VLLMSampler()(
            model, ids, mask, OPTIONS, eos_token_ids=[EOS_ID], pad_token_id=PAD_ID, seed=0
        )
    unchanged, biased = asked[0], asked[-1]
    assert "logit_bias" not in unchanged
    assert biased["logit_bias"] == dict.fromkeys(range(VOCAB_SIZE, PADDED_SIZE), -100.0)


def test_tools_rule_them_out(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled: list[Tensor] = []

    def record(*arguments: Any, **options: Any) -> RolloutBatch:
        rollouts = generate_responses(*arguments, **options)
        sampled.append(rollouts.response_ids)
        return rollouts

    monkeypatch.setattr("lit_rlhf.tools.evaluation.sampling.generate_responses", record)
    folder = str(root / "policy")
    generate_from_models([folder], parse_prompts(["name it"]), OPTIONS, responses_per_prompt=40)
    (responses,) = sampled
    assert responses.numel() > 400
    assert int(responses.max()) < VOCAB_SIZE
    encoder = DialogueEncoder(tiny_tokenizer(), "hh", 64)
    model = load_policy(folder, ModelOptions(), torch.device("cpu"), encoder.tokenizer)
    with torch.no_grad():  # what lm-evaluation-harness and the chat call
        logits = model(torch.arange(4, 9)[None]).logits
    assert (logits[..., VOCAB_SIZE:] == -torch.inf).all()
    assert logits[..., :VOCAB_SIZE].isfinite().all()
