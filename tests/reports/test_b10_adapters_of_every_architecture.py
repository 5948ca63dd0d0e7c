"""B10: LoRA with its default targets trains every architecture that the documentation names."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from lit_rlhf.forward import target_logprobs
from lit_rlhf.models import ModelOptions, load_causal_lm, save_model_folder
from tests.support.adapters import (
    IDS,
    LORA,
    MASK,
    assert_equal_up_to_rounding,
    logits,
    perturb_trained_weights,
)
from tests.support.stages import causal_lm
from tests.support.tiny_models import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    VOCAB_SIZE,
    tiny_config,
    tiny_tokenizer,
)

DOCS = Path(__file__).parents[2] / "docs" / "models.md"

TOKENS: dict[str, Any] = {
    **{"vocab_size": VOCAB_SIZE, "initializer_range": 0.2},
    **{"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID},
}
SIZES: dict[str, Any] = TOKENS | {
    **{"hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 128},
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
}
MAMBA: dict[str, Any] = TOKENS | {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "Llama": lambda: tiny_config("llama"),
    "Qwen 3": lambda: tiny_config("qwen3"),
    "Mistral": lambda: tiny_config("mistral"),
    "GPT-2": lambda: tiny_config("gpt2"),
    "GPT-NeoX": lambda: tiny_config("gpt_neox"),
    "OPT": lambda: tiny_config("opt"),
    "Gemma": lambda: tiny_config("gemma"),
    "Gemma 2": lambda: tiny_config("gemma2"),
    "Phi-3": lambda: transformers.Phi3Config(**SIZES),
    "Mamba": lambda: transformers.MambaConfig(**MAMBA),
    "Mamba 2": lambda: transformers.Mamba2Config(
        **MAMBA, num_heads=4, head_dim=8, n_groups=1, chunk_size=8
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_default_targets_train_and_save(name: str, tmp_path: Path) -> None:
    save_model_folder(causal_lm(CONFIGS[name]()), tiny_tokenizer(), tmp_path / "base")
    model = load_causal_lm(tmp_path / "base", LORA)
    targets = MASK & (torch.arange(MASK.shape[1]) > 0)
    for layer_b in (p for name, p in model.named_parameters() if "lora_B" in name):
        torch.nn.init.constant_(layer_b, 0.1)  # at 0, its partner has no gradient
    target_logprobs(model, IDS, MASK, targets).sum().backward()  # type: ignore[no-untyped-call]
    trained = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all(g is not None and bool(g.any()) for g in trained.values())
    expected = logits(perturb_trained_weights(model))
    save_model_folder(model, tiny_tokenizer(), tmp_path / "saved")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert_equal_up_to_rounding(logits(plain), expected)


def test_documentation_names_these_architectures() -> None:
    text = " ".join(DOCS.read_text("utf-8").split())
    (named,) = re.findall(r"trains adapters of (.*?)\.", text)
    assert re.split(r", | and ", named) == list(CONFIGS)


@pytest.mark.parametrize(
    ("name", "targets"),
    [("Mamba", r".*\.(in_proj|out_proj)"), ("Llama", "no_such_layer"), ("Llama", r".*\.mlp")],
)
def test_targets_that_peft_refuses_are_named_as_our_option(
    name: str, targets: str, tmp_path: Path
) -> None:
    save_model_folder(causal_lm(CONFIGS[name]()), tiny_tokenizer(), tmp_path)
    options = ModelOptions(lora_rank=2, lora_targets=targets)
    message = rf"^network\.lora_targets: expected modules .* got {re.escape(repr(targets))}: "
    with pytest.raises(ValueError, match=message):
        load_causal_lm(tmp_path, options)
