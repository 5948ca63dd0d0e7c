"""Weights published as differences from another model's, as the paper's English models are.

LLaMA's licence did not allow to publish the whole weights. In what the authors published, every
weight of the trunk's numbered layers has LLaMA's subtracted; embeddings, the last norm and the
heads are whole (merge_weight_en.py and merge_weight_zh.py of OpenLMLab/MOSS-RLHF).
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from lit_rlhf.forward import trunk_of

PUBLISHED = ("LlamaRewardModel", "Llama")  # classes that their configs name
LARGEST = 1e-2  # a norm's mean weight is about 0.3 in LLaMA, and under 1e-3 in a difference


@torch.no_grad()
def add_base(model: PreTrainedModel, base: PreTrainedModel) -> None:
    """Add the weights that the layers of `model` are differences from.

    Args:
        model: Gets whole weights.
        base: The model that was subtracted, with or without the same head.

    Raises:
        ValueError: If the layers of both do not have the same names and shapes.
    """
    added = {n: p for n, p in trunk_of(base).named_parameters() if "layers." in n}
    layers = {n: p for n, p in trunk_of(model).named_parameters() if "layers." in n}
    if {n: p.shape for n, p in added.items()} != {n: p.shape for n, p in layers.items()}:
        raise ValueError(
            "base: expected the model that the layers are differences from, got one whose layers "
            "have other names or shapes"
        )
    for name, parameter in layers.items():
        parameter.add_(added[name])


@torch.no_grad()
def check_not_differences(
    model: PreTrainedModel, config: PreTrainedConfig, path: str | Path
) -> None:
    """Refuse published differences, which would be read as a model whose output means nothing.

    Raises:
        ValueError: If the weights of a published model's norms are about 0.
    """
    if not set(config.architectures or []) & set(PUBLISHED):
        return
    norms = [p.abs().mean() for n, p in trunk_of(model).named_parameters() if "layernorm" in n]
    if norms and max(norms) < LARGEST:
        raise ValueError(
            f"path: expected whole weights in {path}, got differences from LLaMA's, as the "
            "paper's authors publish them; make whole ones with `lit_rlhf export --checkpoint "
            f"{path} --base LLAMA --output FOLDER`"
        )
