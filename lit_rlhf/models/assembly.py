"""Models from weights at hand, models of adapters, and either one as plain weights."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, TaskType
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from lit_rlhf.forward import LanguageModel, unwrap_model
from lit_rlhf.models.adapters import with_adapters, without_peft_warning
from lit_rlhf.models.configs import read_config
from lit_rlhf.models.exchange import stored_head
from lit_rlhf.models.loading import load_causal_lm, load_scalar_model
from lit_rlhf.models.options import ModelOptions
from lit_rlhf.models.saving import merged_state_dict

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
HEAD_BIAS = re.compile(r"(^|\.)score\.(.*\.)?bias$")


def model_with_weights(
    path: str | Path, options: ModelOptions, weights: Mapping[str, Tensor], scalar: bool
) -> LanguageModel:
    """A model of the shape of the one at `path` that holds the given weights themselves.

    It is for saving: buffers that are in no state dict have no content.

    Args:
        path: Folder or hub id; only its config is read.
        options: How the network was loaded that the weights are of.
        weights: A state dict of such a network, adapters included.
        scalar: Whether it has a scalar head rather than a language model's.

    Raises:
        ValueError: If there is no model at `path`, or the weights are of another shape.
    """
    config = read_config(path, options)
    auto: Any = AutoModelForCausalLM
    if scalar:
        auto, config.num_labels = AutoModelForSequenceClassification, 1
    task = TaskType.SEQ_CLS if scalar else TaskType.CAUSAL_LM
    with torch.device("meta"):
        inner = auto.from_config(config, trust_remote_code=options.trust_remote_code)
        _with_bias_like(inner, weights)
        model = with_adapters(inner, options, task, seed=0)
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ValueError(
            f"path: expected a model of the weights' shape, got {type(inner).__name__} of {path}: "
            f"{error}"
        ) from error
    unwrap_model(model).tie_weights()
    return model


def adapted_model(path: str | Path, options: ModelOptions, base: str | None = None) -> PeftModel:
    """The model of a folder of adapters.

    Args:
        path: Folder with `adapter_config.json` and `adapter_model.safetensors`.
        options: How the model below them is loaded; without adapters of its own.
        base: That model; `None` takes the one that the adapters name.

    Raises:
        ValueError: If the folder holds no safetensors weights, the adapters are for another task,
            or neither they nor the model below them have a scalar model's head.
    """
    file = Path(path) / ADAPTER_WEIGHTS
    if not file.is_file():
        raise ValueError(f"path: expected adapters with safetensors weights, got no {file}")
    config = PeftConfig.from_pretrained(str(path))
    source = base or config.base_model_name_or_path or ""
    if config.task_type == TaskType.CAUSAL_LM:
        model = load_causal_lm(source, options)
    elif config.task_type == TaskType.SEQ_CLS:
        with safe_open(file, framework="pt") as adapters:
            has_head = any("score" in name for name in adapters.keys())  # noqa: SIM118
        if not has_head and stored_head(source, read_config(source, options)) is None:
            raise ValueError(
                f"path: expected adapters with a scalar model's head, or below them a model that "
                f"has one, got neither in {path} and {source}"
            )
        model = load_scalar_model(source, options)
    else:
        raise ValueError(
            f"path: expected adapters for CAUSAL_LM or SEQ_CLS in {path}, got {config.task_type}"
        )
    with without_peft_warning():
        return PeftModel.from_pretrained(unwrap_model(model), str(path))


def plain_model(model: LanguageModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A model without adapters that computes what `model` computes with them; it is for saving.

    Args:
        model: Stays as it is.
        dtype: Type of the weights; `None` leaves them as they are.
    """
    inner = unwrap_model(model)
    weights = merged_state_dict(model)
    if dtype is not None:
        weights = {n: t.to(dtype) if t.is_floating_point() else t for n, t in weights.items()}
    with torch.device("meta"):
        plain = type(inner)(copy.deepcopy(inner.config))
        _with_bias_like(plain, weights)
    plain.load_state_dict(weights, assign=True)
    plain.tie_weights()
    return plain


def _with_bias_like(model: Any, weights: Mapping[str, Tensor]) -> None:  # noqa: ANN401
    """Give a scalar head a bias if its weights have one; transformers' has none."""
    if any(HEAD_BIAS.search(name) for name in weights):
        model.score = nn.Linear(model.score.in_features, 1)
