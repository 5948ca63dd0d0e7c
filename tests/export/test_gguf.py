"""A GGUF file becomes a plain folder, with the weights, tokens and template that it holds."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_rlhf.cli.export import main
from lit_rlhf.data import TextContract
from lit_rlhf.export import load_gguf_model
from lit_rlhf.models import load_causal_lm, load_tokenizer
from tests.support.tiny_models import BOS_ID, EOS_ID, PAD_ID, UNK_ID, tiny_causal_lm, tiny_tokenizer

TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
QUANTIZED = gguf.GGMLQuantizationType.Q8_0


def rotary_order(weight: Tensor, n_heads: int) -> Tensor:
    """The rows of a query or key projection in llama.cpp's order: halves of a head interleaved."""
    halves = weight.view(n_heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def quantize(weight: Tensor) -> Any:  # gguf is not typed
    return gguf.quantize(weight.numpy(), QUANTIZED)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama in a GGUF file; one layer of each MLP is quantized."""
    model, tokenizer = tiny_causal_lm(), tiny_tokenizer()
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    parts = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__))
    writer.add_token_types([3 if n < 4 else 1 for n in range(config.vocab_size)])  # 3 is special
    writer.add_token_merges([" ".join(merge) for merge in parts["merges"]])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_unk_token_id(UNK_ID)
    writer.add_chat_template(TEMPLATE)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        weight = tensor.detach()
        key, kind = name.removesuffix(".weight"), name.split(".")[-2]
        prefix = ""
        if key.startswith("model.layers."):
            layer, key = key.removeprefix("model.layers.").split(".", 1)
            prefix = f"blk.{layer}."
        if kind in heads:
            weight = rotary_order(weight, heads[kind])
        if kind == "down_proj":
            writer.add_tensor(f"{prefix}{NAMES[key]}.weight", quantize(weight), raw_dtype=QUANTIZED)
        else:
            writer.add_tensor(f"{prefix}{NAMES[key]}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_folder_has_the_weights_of_the_file(file: Path, tmp_path: Path) -> None:
    output = tmp_path / "model"
    main(["--checkpoint", str(file), "--output", str(output), "--chat_template", "tokenizer"])
    original = tiny_causal_lm().state_dict()
    plain = AutoModelForCausalLM.from_pretrained(output).state_dict()
    assert plain.keys() == original.keys()
    for name, weight in original.items():
        expected = weight
        if "down_proj" in name:
            blocks = quantize(weight)
            expected = torch.from_numpy(np.array(gguf.dequantize(blocks, QUANTIZED)))
            assert not torch.equal(expected, weight)
        assert torch.equal(plain[name], expected), name
    text = "".join(saved.read_text() for saved in output.glob("*.json"))
    assert "quantization" not in text
    assert file.name not in text
    assert str(file.parent) not in text
    ids = torch.arange(4, 28).view(2, 12)
    logits = load_causal_lm(output)(ids).logits
    assert (logits - tiny_causal_lm()(ids).logits).abs().max() < 0.05


def test_the_folder_has_the_tokenizer_and_the_template_of_the_file(
    file: Path, tmp_path: Path
) -> None:
    main(["--checkpoint", str(file), "--output", str(tmp_path), "--chat_template", "tokenizer"])
    expected, tokenizer = tiny_tokenizer(), load_tokenizer(tmp_path)
    for text in ("Human: name three metals", "说出三种金属"):
        ids = expected(text, add_special_tokens=False).input_ids
        assert tokenizer(text, add_special_tokens=False).input_ids == ids
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (EOS_ID, PAD_ID)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == TEMPLATE
    assert TextContract.load(tmp_path).chat_template == TEMPLATE


def test_weights_may_be_cast(file: Path, tmp_path: Path) -> None:
    load_gguf_model(file, dtype="bfloat16").save(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_files_that_cannot_be_read_are_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"network: expected policy or model .* got 'reward'"):
        load_gguf_model(file, network="reward")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"checkpoint: expected a GGUF file .*broken"):
        load_gguf_model(broken)
    with pytest.raises(ValueError, match=r"checkpoint: expected a GGUF file .*missing"):
        load_gguf_model(tmp_path / "missing.gguf")
    with pytest.raises(ValueError, match=r"got the file .*from a checkpoint or a GGUF file"):
        load_causal_lm(str(file))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'lit-rlhf\[gguf\]'"):
        load_gguf_model(file)
