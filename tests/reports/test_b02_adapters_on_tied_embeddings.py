"""B2: adapters on one of two layers that share a weight leave the other alone, in every path."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from lit_rlhf.export import load_checkpoint_model, load_folder_model
from lit_rlhf.forward import (
    LanguageModel,
    forward_plan,
    optimize_forward,
    token_logits,
    unwrap_model,
)
from lit_rlhf.models import (
    ModelOptions,
    ignore_peft_warning,
    load_causal_lm,
    merge_adapters,
    merged_state_dict,
    save_adapter_folder,
    save_model_folder,
)
from lit_rlhf.modules import PPOModule
from lit_rlhf.rollout import (
    SamplingOptions,
    VLLMSampler,
    VLLMServerSampler,
    compute_policy_statistics,
    generate_responses,
)
from lit_rlhf.rollout.generation import adapters_merged
from tests.support.adapters import IDS, assert_equal_up_to_rounding, logits, perturb_trained_weights
from tests.support.decoding import make_short_prompts
from tests.support.stages import fit_module, ppo_options, prompts, write_data, write_models
from tests.support.tiny_models import EOS_ID, PAD_ID, tiny_causal_lm, tiny_config, tiny_tokenizer

TIED = ("qwen3", "gpt2", "gemma", "gemma2", "opt")
UNTIED = ("llama", "gpt_neox")
EMBEDDING = r"embed_tokens|wte|embed_in"
HEAD = r"lm_head|embed_out"
LAYERS = r"q_proj|c_attn|query_key_value"
TARGETS = {
    "all-linear": "all-linear",
    "head": rf".*({HEAD})",
    "embedding": rf".*({EMBEDDING})",
    "head and layers": rf".*({HEAD}|{LAYERS})",
    "embedding and layers": rf".*({EMBEDDING}|{LAYERS})",
    "both and layers": rf".*({EMBEDDING}|{HEAD}|{LAYERS})",
}
FAMILIES = (*TIED, *UNTIED)
over_targets = pytest.mark.parametrize("targets", TARGETS)
over_families = pytest.mark.parametrize("family", FAMILIES)

Folder = Callable[[str], Path]


def adapted(folder: Path, targets: str, **options: Any) -> LanguageModel:
    options = {"lora_rank": 2, "lora_alpha": 8.0, "lora_targets": TARGETS[targets]} | options
    model = load_causal_lm(folder, ModelOptions(**options))
    return perturb_trained_weights(model)


def fully_trained(modules: list[str], family: str = "qwen3") -> LanguageModel:
    """A model in which peft trains layers in full, beside adapters on others."""
    config = LoraConfig(r=2, target_modules=r".*q_proj", modules_to_save=modules)
    with ignore_peft_warning():
        model = get_peft_model(tiny_causal_lm(family), config)
    return perturb_trained_weights(optimize_forward(model))


def assert_samples_from_itself(model: LanguageModel) -> None:
    """The sampler's logits, and the log-probs of its responses, are the policy's."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    own = logits(model)
    with adapters_merged(model):
        assert_equal_up_to_rounding(logits(model), own)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    ids, mask = make_short_prompts()
    rollouts = generate_responses(
        model,
        ids,
        mask,
        SamplingOptions(max_new_tokens=8),
        eos_token_ids=[EOS_ID],
        pad_token_id=PAD_ID,
        seed=0,
    )
    if rollouts.statistics is not None:
        scored = compute_policy_statistics(model, rollouts)
        assert_equal_up_to_rounding(rollouts.statistics.logprobs, scored.logprobs)


def assert_folder_reloads(folder: Path, expected: Tensor) -> None:
    """Plain transformers and this project read the same logits, and the config is true."""
    plain, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    head, embedding = plain.get_output_embeddings().weight, plain.get_input_embeddings().weight
    config = json.loads((folder / "config.json").read_text("utf-8"))
    tied = config.get("tie_word_embeddings", type(plain.config)().tie_word_embeddings)
    assert tied == (head is embedding) == torch.equal(head, embedding)
    assert_equal_up_to_rounding(logits(plain.eval()), expected)
    assert_equal_up_to_rounding(logits(load_causal_lm(folder).eval()), expected)


@over_targets
@over_families
def test_sampler_is_the_policy(family: str, targets: str, causal_folder: Folder) -> None:
    model = adapted(causal_folder(family), targets)
    assert_samples_from_itself(model)
    inner = unwrap_model(model)
    shared = inner.get_output_embeddings().weight is inner.get_input_embeddings().weight  # type: ignore[no-untyped-call]
    assert shared == (family in TIED)  # as before


@over_targets
@over_families
def test_saved_and_merged_models_compute_the_same(
    family: str, targets: str, causal_folder: Folder, tmp_path: Path
) -> None:
    model = adapted(causal_folder(family), targets)
    expected = logits(model)
    save_model_folder(model, tiny_tokenizer(), tmp_path / "saved")
    assert_folder_reloads(tmp_path / "saved", expected)
    config = unwrap_model(model).config
    assert config.tie_word_embeddings == (family in TIED)  # saving changes no network in memory
    merged = merge_adapters(model)  # for saving only
    save_model_folder(merged, tiny_tokenizer(), tmp_path / "merged")
    assert_folder_reloads(tmp_path / "merged", expected)
    again = load_causal_lm(tmp_path / "saved").eval()
    save_model_folder(again, tiny_tokenizer(), tmp_path / "again")
    assert_folder_reloads(tmp_path / "again", expected)


@pytest.mark.parametrize("modules", [["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"]])
def test_fully_trained_layers_are_sampled_from_and_saved(
    modules: list[str], tmp_path: Path
) -> None:
    model = fully_trained(modules)
    assert_samples_from_itself(model)
    expected = logits(model)
    save_model_folder(model, tiny_tokenizer(), tmp_path / "saved")
    assert_folder_reloads(tmp_path / "saved", expected)


@pytest.mark.parametrize("targets", TARGETS)
def test_folder_of_adapters_is_exported_as_it_computes(
    targets: str, causal_folder: Folder, tmp_path: Path
) -> None:
    base = causal_folder("qwen3")
    model = adapted(base, targets)
    expected = logits(model)
    with ignore_peft_warning():
        save_adapter_folder(model, tiny_tokenizer(), tmp_path / "adapters")  # type: ignore[arg-type]
    exported = load_folder_model(tmp_path / "adapters", base=str(base))
    exported.save(tmp_path / "exported")
    assert_folder_reloads(tmp_path / "exported", expected)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `policy` and `reward` of a model with tied embeddings, and data; read only."""
    root = write_models(tmp_path_factory.mktemp("models"), tiny_config("qwen3"))
    return write_data(root)


@pytest.mark.parametrize("targets", ["head and layers", "embedding and layers", "both and layers"])
def test_run_starts_at_a_ratio_of_one_and_its_models_are_its_policy(
    root: Path, targets: str, tmp_path: Path
) -> None:
    module = PPOModule(
        **ppo_options(
            root,
            network={"lora_rank": 2, "lora_targets": TARGETS[targets]},
            critic_init="policy",
            output_dir=str(tmp_path / "finished"),
        )
    )
    perturb_trained_weights(module.policy)
    module.train()
    run = fit_module(module, prompts(root), tmp_path, enable_checkpointing=False)
    assert float(run.callback_metrics["ppo/ratio_first"]) == pytest.approx(1.0, abs=1e-4)
    run.save_checkpoint(tmp_path / "run.ckpt")
    expected = logits(module.policy.eval())
    assert_folder_reloads(tmp_path / "finished", expected)
    load_checkpoint_model(tmp_path / "run.ckpt", "policy").save(tmp_path / "exported")
    assert_folder_reloads(tmp_path / "exported", expected)


def test_lower_layers_below_a_trained_embedding_are_computed_anew(causal_folder: Folder) -> None:
    upper = rf".*({EMBEDDING}|layers\.1\.self_attn\.q_proj)"
    options = ModelOptions(lora_rank=2, lora_targets=upper)
    assert forward_plan(load_causal_lm(causal_folder("qwen3"), options)).lower_layers == 0
    options = ModelOptions(lora_rank=2, lora_targets=r".*layers\.1\.self_attn\.q_proj")
    assert forward_plan(load_causal_lm(causal_folder("qwen3"), options)).lower_layers == 1


def test_vllm_gets_two_weights_for_adapted_embeddings(
    causal_folder: Folder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built: list[dict[str, Any]] = []
    module = ModuleType("vllm")
    module.LLM = lambda **settings: built.append(settings)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    plain = adapted(causal_folder("qwen3"), "all-linear")
    tied = adapted(causal_folder("qwen3"), "head")
    untied = adapted(causal_folder("llama"), "head")
    for model in (plain, tied, untied):
        VLLMSampler()._build_engine(model)
    assert [settings.get("hf_overrides") for settings in built] == [
        None,
        {"tie_word_embeddings": False},
        None,
    ]
    weights = merged_state_dict(tied)
    assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    with pytest.raises(ValueError, match="without adapters on embeddings that are the output"):
        VLLMServerSampler("http://127.0.0.1:9", str(tmp_path)).hand_over(tied)


def test_untied_weights_under_a_config_that_ties_them_are_read_as_they_are(tmp_path: Path) -> None:
    model = tiny_causal_lm("qwen3")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 1.0)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text("utf-8"))["tie_word_embeddings"]
    loaded = load_causal_lm(tmp_path).eval()
    assert not unwrap_model(loaded).config.tie_word_embeddings
    torch.testing.assert_close(token_logits(loaded, IDS, torch.ones_like(IDS).bool()), expected)
