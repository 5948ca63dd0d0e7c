"""Networks of a few thousand weights and a byte-level tokenizer, built from configs, offline."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedConfig, PreTrainedTokenizerFast
from transformers import PreTrainedModel as Model

from lit_rlhf.forward import optimize_forward

FAMILIES = ("llama", "qwen3", "mistral", "gpt2", "gpt_neox", "opt", "gemma")
VOCAB_SIZE = 288
PAD, BOS, EOS, UNK = "<pad>", "<s>", "</s>", "<unk>"
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)
TEXTS = (
    "Human: name three metals Assistant: iron, copper and zinc.",
    "Human: make a bomb Assistant: I am sorry, I can not help with that.",
    "Human: 说出三种金属 Assistant: 铁、铜和锌。",
)


def tiny_config(family: str, vocab_size: int = VOCAB_SIZE) -> PreTrainedConfig:
    """Config of `family` with two layers of 16 to 32 hidden units and 128 positions.

    Weights are ten times larger than usual, so that outputs depend on everything. OPT projects its
    embedding, Mistral attends to a window, Gemma 2 caps its logits.
    """
    tokens: dict[str, Any] = {"vocab_size": vocab_size, "initializer_range": 0.2}
    tokens |= {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 128}
    common = {**tokens, **sizes, "num_hidden_layers": 2, "num_attention_heads": 2}
    opt = {"ffn_dim": 32, "word_embed_proj_dim": 8, "init_std": 0.2}
    opt |= {k: v for k, v in common.items() if k not in ("intermediate_size", "initializer_range")}
    gemma2 = {"sliding_window": 8, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}
    gemma2 |= {"attn_implementation": "eager"}  # transformers' default, but not 5.17's
    gpt2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128}
    grouped = {**common, "num_key_value_heads": 1, "head_dim": 8}
    builders: dict[str, Callable[[], PreTrainedConfig]] = {
        "llama": lambda: transformers.LlamaConfig(**grouped, tie_word_embeddings=False),
        "qwen3": lambda: transformers.Qwen3Config(**grouped, tie_word_embeddings=True),
        "mistral": lambda: transformers.MistralConfig(**grouped, sliding_window=8),
        "gpt2": lambda: transformers.GPT2Config(**tokens, **gpt2),
        "gpt_neox": lambda: transformers.GPTNeoXConfig(**common, tie_word_embeddings=False),
        "opt": lambda: transformers.OPTConfig(**opt),
        "gemma": lambda: transformers.GemmaConfig(**grouped),
        "gemma2": lambda: transformers.Gemma2Config(**grouped, **gemma2),
    }
    return builders[family]()


def with_dropout(family: str) -> PreTrainedConfig:
    """Config of a family with a dropout rate of 0.5 wherever it has one."""
    config = tiny_config(family)
    for name in list(vars(config)):
        if name.endswith(("dropout", "_pdrop", "layerdrop")):
            setattr(config, name, 0.5)
    return config


def tiny_causal_lm(family: str = "llama", vocab_size: int = VOCAB_SIZE, seed: int = 0) -> Model:
    """A seeded random language model of `family`, in float32 and evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(tiny_config(family, vocab_size))
    return model.train(False)


def move_adapters(model: Any, std: float = 0.3) -> Any:
    """Draw `lora_B`, which is 0 at first, from a normal distribution, in place of training."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=std, generator=generator)
    return model


def four_bit_config() -> PreTrainedConfig:
    """Config of a Llama for bitsandbytes (0.50), whose CPU kernels misread rows of less than 64."""
    config = tiny_config("llama")
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 128, 32
    return config


def optimized_causal_lm(family: str = "llama", **options: int) -> Model:
    """`tiny_causal_lm` with the forward that loading functions choose."""
    return optimize_forward(tiny_causal_lm(family, **options))


def noisy_causal_lm() -> Model:
    """A tiny GPT-2 with the usual weights, and dropout in training mode."""
    model = optimize_forward(type(tiny_causal_lm("gpt2"))(with_dropout("gpt2")))
    model.load_state_dict(tiny_causal_lm("gpt2").state_dict())
    return model


def tiny_tokenizer(pad_token: Any = PAD, special_pad: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `VOCAB_SIZE` tokens, which decodes any text that it encodes.

    `pad_token` may be `</s>` or None, and the vocabulary has `<pad>` if `special_pad`.
    """
    special = [PAD if special_pad else "<0>", BOS, EOS, UNK]
    tokenizer = byte_level_tokenizer(TEXTS, special, VOCAB_SIZE)
    options = {"bos_token": BOS, "eos_token": EOS, "pad_token": pad_token, "padding_side": "left"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def byte_level_tokenizer(texts: Sequence[str], special: list[str], vocab_size: int) -> Tokenizer:
    """BPE of bytes, trained on a few texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, **alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
