"""Weights in 4 bits below LoRA adapters, by bitsandbytes (QLoRA, arXiv 2305.14314).

A linear layer then holds its weight in blocks of 64 numbers of the type `nf4`, and computes with
numbers of `ModelOptions.dtype`. Embeddings, norms and heads stay in that type. The weights never
change, so state dicts leave them out, and they come from the model's folder.
"""

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from lit_rlhf.models.config import ModelOptions


def loading_arguments(options: ModelOptions) -> dict[str, Any]:
    """Arguments of `from_pretrained` that load weights in 4 bits if the options say so."""
    if not options.load_in_4bit:
        return {}
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            "load_in_4bit: expected bitsandbytes to be installed "
            "(pip install 'bitsandbytes>=0.50'), got none"
        )
    config = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,  # scales in 8 bits
        bnb_4bit_compute_dtype=options.torch_dtype,
    )
    # A CPU takes minutes to quantize 7B. The GPU is the one that Lightning and torchrun give to
    # this process; the Trainer moves the network if its device is another one.
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    return {"quantization_config": config, "device_map": {"": device}}


def prepare_4bit_layers(model: PreTrainedModel) -> None:
    """Set up the 4-bit layers of a loaded model for training; no-op without such layers."""
    for _, layer in _named_layers(model):
        # bitsandbytes (0.50) repacks weights in evaluation mode on CPUs with AVX512-BF16. What it
        # computes with these has no gradient and rounds scales to bfloat16, also in training mode
        # afterwards.
        layer.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
        layer.register_state_dict_post_hook(_leave_out_weight)  # type: ignore[no-untyped-call]
        layer.register_load_state_dict_pre_hook(_add_weight)  # type: ignore[no-untyped-call]


def is_4bit(model: nn.Module) -> bool:
    """Whether a model has layers in 4 bits."""
    return next(_named_layers(model), None) is not None


@torch.no_grad()
def dequantized_weights(model: nn.Module) -> dict[str, Tensor]:
    """The numbers that 4-bit layers compute with, in CPU memory, by the names of their weights."""
    weights = {}
    for name, layer in _named_layers(model):
        from bitsandbytes.functional import dequantize_4bit  # missing where no layer is in 4 bits

        weight: Any = layer.weight
        weights[f"{name}.weight"] = dequantize_4bit(weight.data, weight.quant_state).cpu()
    return weights


def _named_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        # not `module.weight`: on peft's layers this is the weight of the layer below
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if getattr(weight, "quant_state", None) is not None:
            yield name, module


def _leave_out_weight(
    layer: nn.Module, state: dict[str, Tensor], prefix: str, metadata: dict[str, Any]
) -> None:
    """Drop the weight and what bitsandbytes saves beside it, for instance `weight.absmax`."""
    for name in [name for name in state if name.startswith(f"{prefix}weight")]:
        del state[name]


def _add_weight(layer: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Put the layer's own weight into a state dict that is loaded, which has none."""
    assert isinstance(layer.weight, Tensor)
    state[f"{prefix}weight"] = layer.weight.data
