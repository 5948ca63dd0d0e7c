"""Getting at the parts of a network, whether or not LoRA adapters wrap it, and setting its mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias, TypeVar

from peft import PeftModel
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

LanguageModel: TypeAlias = PreTrainedModel | PeftModel
"""A causal language model or a trunk with a scalar head, as it is or inside LoRA adapters."""

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def unwrap_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model itself; LoRA layers, if any, stay in it and stay in effect.

    Raises:
        ValueError: If `model` is neither a transformers model nor one inside LoRA adapters.
    """
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(inner, PreTrainedModel):
        raise ValueError(
            "model: expected a transformers PreTrainedModel, with or without peft adapters, "
            f"got {type(model).__name__}"
        )
    return inner


def trunk_of(model: nn.Module) -> PreTrainedModel:
    """The network below the head: token ids in, hidden states out.

    Raises:
        ValueError: If the architecture does not keep its trunk apart from its head.
    """
    inner = unwrap_model(model)
    trunk = inner.base_model
    if trunk is inner or not isinstance(trunk, PreTrainedModel):
        raise ValueError(f"model: expected a trunk with a head on it, got {type(inner).__name__}")
    return trunk


def scalar_head_of(model: nn.Module) -> nn.Module:
    """The layer of a scalar model that maps hidden states `[..., H]` to `[..., 1]`.

    Raises:
        ValueError: If `model` has no such layer, for instance as it is a causal language model.
    """
    inner = unwrap_model(model)
    head = getattr(inner, "score", None)
    if not isinstance(head, nn.Module) or inner.config.num_labels != 1:
        raise ValueError(
            "model: expected a scalar model (AutoModelForSequenceClassification with one label), "
            f"got {type(inner).__name__} with {inner.config.num_labels} labels"
        )
    return head


def freeze(model: ModuleT) -> ModuleT:
    """`model` in evaluation mode and without gradients: a reference or reward model."""
    return model.eval().requires_grad_(False)


def disable_dropout(model: ModuleT) -> ModuleT:
    """`model`, from now on without dropout in training mode too.

    PPO needs it: log-probs of rollout and update must come from the same network, yet gradient
    checkpointing acts in training mode only. The model's config, and so what is saved, keeps its
    probabilities.
    """
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        # attention and layer dropout are plain numbers in many transformers modules
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the context; after it every submodule has the mode it had before."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
