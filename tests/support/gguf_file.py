"""A tiny Llama in a GGUF file with the layout of llama.cpp's converter."""

import json
from pathlib import Path
from typing import Any

import gguf
from torch import Tensor

from tests.support.tiny_models import BOS_ID, EOS_ID, UNK_ID, tiny_causal_lm, tiny_tokenizer

CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
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
"""Names of llama.cpp by names of transformers."""

QUANTIZATION = gguf.GGMLQuantizationType.Q8_0
SPECIAL, NORMAL = 3, 1


def quantize(weight: Tensor) -> Any:
    """The blocks of a quantized weight."""
    return gguf.quantize(weight.numpy(), QUANTIZATION)


def write_tiny_gguf(path: Path) -> None:
    """Write the tiny Llama and its tokenizer; the down projections of the MLPs are quantized."""
    model, writer = tiny_causal_lm(), gguf.GGUFWriter(path, "llama")
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
    _add_tokenizer(writer, config.vocab_size)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        key, kind, prefix = name.removesuffix(".weight"), name.split(".")[-2], ""
        if key.startswith("model.layers."):
            layer, key = key.removeprefix("model.layers.").split(".", 1)
            prefix = f"blk.{layer}."
        if kind in heads:
            weight = _rotary_order(weight, heads[kind])
        name = f"{prefix}{NAMES[key]}.weight"
        if kind == "down_proj":
            writer.add_tensor(name, quantize(weight), raw_dtype=QUANTIZATION)
        else:
            writer.add_tensor(name, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.get_vocab()
    bpe = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(ids, key=ids.__getitem__))
    writer.add_token_types([SPECIAL if n < 4 else NORMAL for n in range(vocab_size)])
    writer.add_token_merges([" ".join(merge) for merge in bpe["merges"]])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_unk_token_id(UNK_ID)
    writer.add_chat_template(CHAT_TEMPLATE)


def _rotary_order(weight: Tensor, n_heads: int) -> Tensor:
    """The rows of a query or key projection in llama.cpp's order: halves of a head interleaved."""
    return weight.view(n_heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
