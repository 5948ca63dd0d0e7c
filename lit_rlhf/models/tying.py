"""Weights that layers of a network share, such as an embedding that is the output layer, too.

Adapters, and layers that peft trains in full, can make such layers differ. What is saved then has
two weights, and a config that says so.
"""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from lit_rlhf.forward import LanguageModel, unwrap_model

ADAPTED = (".base_layer.", ".original_module.")
"""Parts of the names of weights below LoRA adapters, and beside layers that peft trains in full."""


def shared_names(model: nn.Module) -> list[list[str]]:
    """Names of the parameters that have several, grouped by the parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def has_adapted_ties(model: PreTrainedModel) -> bool:
    """Whether adapters may change one of the layers that share a weight, and not the others."""
    names = [name for group in shared_names(model) for name in group]
    return any(part in name for name in names for part in ADAPTED)


def config_for_weights(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> PreTrainedConfig:
    """A copy of a model's config that says whether weights tie what the model ties.

    Args:
        model: The model, inside adapters or not.
        weights: Weights by names without adapters.
    """
    config = copy.deepcopy(model.config)
    for group in shared_names(model):
        tensors = [weights[name] for name in map(_plain_name, group) if name in weights]
        if any(not torch.equal(tensor, tensors[0]) for tensor in tensors):
            _untie(config)
    return config


def note_untied_embeddings(model: PreTrainedModel) -> None:
    """Let the config of a loaded model say if embedding and output layer have a weight each.

    transformers does not tie weights that differ in a file, even where the file's config ties them.
    """
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        _untie(model.config)


def assign_weights(model: LanguageModel, weights: Mapping[str, Tensor]) -> None:
    """Give a model weights, which are not copied; equal ones of layers that share theirs stay one.

    Where they differ, the layers get a weight each, and the config says so.

    Args:
        model: The model, whose config may be changed.
        weights: A whole state dict.
    """
    groups = shared_names(model)
    model.load_state_dict(weights, assign=True)
    for first, *others in groups:
        shared = model.get_parameter(first)
        for name in others:
            if torch.equal(model.get_parameter(name), shared):
                parent, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(parent), attribute, shared)
            else:
                _untie(unwrap_model(model).config)


def _plain_name(name: str) -> str:
    """The name of a weight in a model without adapters."""
    for part in ADAPTED:
        name = name.replace(part, ".")
    return name


def _untie(config: PreTrainedConfig) -> None:
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = False
