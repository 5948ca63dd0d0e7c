"""Networks that hold the same frozen weights once.

With LoRA the weights below the adapters never change, so networks that start from the same model
need one copy of them. Each network has modules, adapters and head of its own: only the frozen
parameters are the same objects, so that forward, engine and state dict stay as they are.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rlhf.forward import LanguageModel


def copy_sharing_weights(model: LanguageModel) -> PreTrainedModel:
    """Copy a network without its adapters; the frozen parameters are `model`'s own."""
    # `deepcopy` takes what it finds in its memo for copied already
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    # the scales of 4-bit weights
    states = [getattr(parameter, "quant_state", None) for parameter in model.parameters()]
    memo |= {id(state): state for state in states if state is not None}
    copied = copy.deepcopy(model, memo)
    inner: PreTrainedModel = copied.unload() if isinstance(copied, PeftModel) else copied
    # peft (0.21) leaves it behind, and would warn that the copy has adapters already
    vars(inner).pop("peft_config", None)
    if trained := [name for name, weight in inner.named_parameters() if weight.requires_grad]:
        raise ValueError(
            f"model: expected frozen weights below its adapters, got trained {', '.join(trained)}"
        )
    return inner


@torch.no_grad()
def separate_weights(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give networks copies of the weights that they share but that differ in a state dict.

    Loading `state` would otherwise put the weights of one network of `module` into the other. They
    differ after a change of the model that one of them starts from.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in state and not parameter.requires_grad:
            names.setdefault(id(parameter), []).append(name)
    for first, *others in names.values():
        for name in others:
            if not torch.equal(state[name].to(state[first].device), state[first]):
                parent, _, attribute = name.rpartition(".")
                untied = nn.Parameter(module.get_parameter(name).clone(), requires_grad=False)
                setattr(module.get_submodule(parent), attribute, untied)
