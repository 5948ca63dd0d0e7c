"""Models of other projects: the names in their files, and weights published as differences.

A scalar model is a trunk and a layer from its last hidden states to one number, with weight
`[1, H]` and perhaps bias `[1]`. The trunk's names are transformers' everywhere, for instance
`model.layers.0...` in a Llama. The layer is called

- `score`, without bias, in transformers' sequence classifiers, which this project writes and which
  TRL, vLLM (`as_seq_cls_model` in model_executor/models/adapters.py) and OpenRLHF load;
- `score`, the config's `value_head_prefix`, or `value_head` in older releases, without bias, in
  OpenRLHF (openrlhf/models/model.py), whose config does not say that there is one label;
- `reward_head`, without bias, in the paper's `LlamaRewardModel` (train_ppo.py of
  OpenLMLab/MOSS-RLHF), next to the language model's head;
- `v_head.summary`, with bias, in TRL's `AutoModelForCausalLMWithValueHead` (`ValueHead` in
  modeling_value_head.py), next to the language model's head; all other names may have the prefix
  `pretrained_model.`

The paper's English models are published as delta weights. LLaMA's weights are subtracted from all
weights in the trunk's numbered layers, while embeddings, the last norm and the heads are whole
(merge_weight_en.py and merge_weight_zh.py of OpenLMLab/MOSS-RLHF).
"""

import copy
import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)
from transformers.utils.hub import cached_file

from lit_rlhf.choices import HeadFormat as HeadFormat
from lit_rlhf.forward import trunk_of
from lit_rlhf.models.config import is_classifier
from lit_rlhf.models.heads import check_whole
from lit_rlhf.tensor_checks import check_stored

HEAD_NAMES = ("score", "value_head", "reward_head", "v_head.summary")
"""Names of scalar heads in the files of the projects above."""
_TRL_PREFIX = "pretrained_model."
_TRL_HEAD = "v_head.summary"
_DELTA_ARCHITECTURES = ("LlamaRewardModel", "Llama")  # in the configs of published delta weights
_MAX_DELTA_NORM = 1e-2
"""Largest mean weight of a norm in delta weights: they have under 1e-3, LLaMA has about 0.3."""


class _StoredHead(NamedTuple):
    """The scalar head in a model's files.

    Attributes:
        name: Name of the layer.
        weight: Shape `[1, H]`.
        bias: Shape `[1]`; `None` if there is none, or if it is 0.
    """

    name: str
    weight: Tensor
    bias: Tensor | None

    def is_plain(self, config: PreTrainedConfig) -> bool:
        """Whether the class that the model's config names loads the head as it is."""
        standard = self.name == HEAD_NAMES[0] and self.bias is None
        return standard and is_classifier(config) and config.num_labels == 1

    @property
    def key_mapping(self) -> dict[str, str]:
        """Transformers' `key_mapping` (pattern to name) to its own sequence classifiers."""
        return {rf"^{re.escape(_TRL_PREFIX)}": "", rf"^{re.escape(self.name)}\.": "score."}


def find_stored_head(
    path: str | Path, config: PreTrainedConfig, pickled_weights: bool = False
) -> _StoredHead | None:
    """Find the scalar head in a model's files by name and shape.

    Args:
        path: Folder or hub id of the model.
        config: Its config.
        pickled_weights: Also look into `pytorch_model.bin`, which is read as plain data.

    Returns:
        The head; `None` if there is none.
    """
    first = getattr(config, "value_head_prefix", None) or HEAD_NAMES[0]
    head_names = (first, *(name for name in HEAD_NAMES if name != first))
    tensors = _read_single_output_tensors(path, pickled_weights)
    layers = [name.removesuffix(".weight") for name, tensor in tensors.items() if tensor.dim() == 2]
    # classifiers of other architectures have a name of their own, which transformers knows
    named_by_transformers = is_classifier(config) and set(layers).isdisjoint(head_names)
    if not layers or named_by_transformers:
        return None
    if len(layers) > 1 or layers[0] not in head_names:
        raise ValueError(
            f"path: expected in {path} at most one layer with a single output, called "
            f"{', '.join(head_names)}, got {', '.join(sorted(layers))}; remove what is not the "
            "scalar head, and if it has another name, set value_head_prefix in config.json to it"
        )
    (name,) = layers
    bias = tensors.get(f"{name}.bias")
    return _StoredHead(
        name=name,
        weight=tensors[f"{name}.weight"],
        bias=bias if bias is not None and bias.any() else None,
    )


def _read_single_output_tensors(path: str | Path, pickled_weights: bool) -> dict[str, Tensor]:
    """Weights and biases of one row outside a trunk's numbered layers."""
    rows = {}
    for file in _find_files_outside_layers(path, pickled_weights):
        if file.suffix == ".safetensors":
            check_whole(file)
            with safe_open(file, framework="pt") as stored:
                for name in filter(_is_outside_layers, stored.keys()):
                    if stored.get_slice(name).get_shape()[:1] == [1]:
                        rows[name] = stored.get_tensor(name)
        else:
            for name, tensor in _load_plain_tensors(file).items():
                if _is_outside_layers(name) and tensor.shape[:1] == (1,):
                    rows[name] = tensor.clone()  # else the whole file would stay mapped
    return rows


def _is_outside_layers(name: str) -> bool:
    return name.endswith((".weight", ".bias")) and not any(map(str.isdigit, name.split(".")))


def _find_files_outside_layers(path: str | Path, pickled_weights: bool) -> list[Path]:
    """The weight files that hold anything but a trunk's numbered layers."""
    kinds = [(SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME), (WEIGHTS_INDEX_NAME, WEIGHTS_NAME)]
    for index_name, whole_name in kinds if pickled_weights else kinds[:1]:
        index = _find_file(path, index_name)
        single_file = _find_file(path, whole_name)
        if index is not None:
            shards = json.loads(index.read_text("utf-8"))["weight_map"]
            names = sorted({shard for name, shard in shards.items() if _is_outside_layers(name)})
            return [file for name in names if (file := _find_file(path, name)) is not None]
        if single_file is not None:
            return [single_file]
    return []


def check_weights_are_there_once(folder: Path) -> None:
    """Refuse a folder with weights in one file and other ones in several.

    One of them is left from an earlier save, and programs differ in which one they read.
    """
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not (folder / SAFE_WEIGHTS_NAME).is_file() or not index.is_file():
        return
    shards = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    if SAFE_WEIGHTS_NAME not in shards:
        raise ValueError(
            f"path: expected weights once in {folder}, got {SAFE_WEIGHTS_NAME} and those that "
            f"{SAFE_WEIGHTS_INDEX_NAME} lists; remove the older of the two"
        )


def check_weights_are_real(folder: Path) -> None:
    """Refuse weights of integers, truth values or complex numbers.

    They are codes of a quantization whose scales are elsewhere, and would be read as numbers.
    """
    for file in sorted(folder.glob("*.safetensors")):
        check_whole(file)
        with safe_open(file, framework="pt") as stored:
            for name in list(stored.keys()):
                kind = stored.get_slice(name).get_dtype()
                # other tensors may be masks and positions
                if name.endswith(".weight") and not kind.startswith(("F", "BF")):
                    raise ValueError(
                        f"path: expected weights of floating point in {file}, got {name} of {kind}"
                    )


def _find_file(path: str | Path, name: str) -> Path | None:
    """A file of a model, fetched from the hub for an id; `None` if the model has no such file."""
    try:
        return Path(str(cached_file(str(path), name)))
    # also raised where the hub cannot be reached, which loading the model reports afterwards
    except OSError:
        return None


def _load_plain_tensors(file: Path) -> dict[str, Tensor]:
    """Map the tensors in a file that torch pickled, without running code from it."""
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"{file}: expected plain tensors, got a file that torch.load(..., weights_only=True) "
            f"refuses: {error}"
        ) from error
    if not isinstance(tensors, dict):
        raise ValueError(f"{file}: expected tensors by name, got {type(tensors).__name__}")
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise ValueError(f"{file}: expected tensors by name, got one by {name!r:.100}")
        check_stored(f"{file}: {name}", tensor)
    return tensors


def check_pickled_weights(folder: Path) -> None:
    """Refuse pickled weights that are no plain tensors, or stand for more than is stored."""
    for file in sorted(folder.glob("pytorch_model*.bin")):
        _load_plain_tensors(file)


class TRLModel(NamedTuple):
    """A scalar model as TRL's `AutoModelForCausalLMWithValueHead` loads it.

    Attributes:
        causal_lm: A language model without weights, for its config and class.
        weights: State dict under TRL's names.
    """

    causal_lm: PreTrainedModel
    weights: dict[str, Tensor]


def convert_to_trl(
    model: PreTrainedModel, weights: Mapping[str, Tensor], lm_head: Mapping[str, Tensor]
) -> TRLModel:
    """Convert a scalar model to a language model with TRL's value head.

    Args:
        model: The scalar model, for its config.
        weights: Its state dict, without adapters.
        lm_head: State dict of the output layer that its trunk was trained with; may be empty.
    """
    config = copy.deepcopy(model.config)
    # a language model's config does not have these
    for key in ("id2label", "label2id", "problem_type"):
        delattr(config, key)
    with torch.device("meta"):
        causal: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    output = causal.get_output_embeddings()
    prefix = next(name for name, module in causal.named_modules() if module is output)
    for name, tensor in lm_head.items():
        if getattr(output, name).shape != tensor.shape:
            raise ValueError(
                f"lm_head: expected {name} {getattr(output, name).shape}, got {tensor.shape}"
            )
    renamed = {
        name.replace("score.", f"{_TRL_HEAD}.", 1) if name.startswith("score.") else name: tensor
        for name, tensor in weights.items()
    }
    weight = renamed[f"{_TRL_HEAD}.weight"]
    renamed.setdefault(f"{_TRL_HEAD}.bias", weight.new_zeros(1))
    output_layer = {f"{prefix}.{name}": tensor for name, tensor in lm_head.items()}
    return TRLModel(causal_lm=causal, weights=renamed | output_layer)


@torch.no_grad()
def add_base_weights(model: PreTrainedModel, base: PreTrainedModel) -> None:
    """Turn a model's delta weights into whole ones, in place, by adding the weights of `base`."""
    added = _layer_weights(base)
    layers = _layer_weights(model)
    if {n: p.shape for n, p in added.items()} != {n: p.shape for n, p in layers.items()}:
        raise ValueError(
            "base: expected the model that the layers are differences from, got one whose layers "
            "have other names or shapes"
        )
    for name, parameter in layers.items():
        parameter.add_(added[name])


def _layer_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights in the numbered layers of a model's trunk, by name."""
    named = trunk_of(model).named_parameters()
    return {name: weight for name, weight in named if "layers." in name}


@torch.no_grad()
def check_not_delta_weights(model: PreTrainedModel, path: str | Path) -> None:
    """Refuse delta weights, which would load as a model whose output means nothing.

    They are known by the config's class and norms whose weights are about 0.
    """
    if not set(model.config.architectures or []) & set(_DELTA_ARCHITECTURES):
        return
    norms = [p.abs().mean() for n, p in trunk_of(model).named_parameters() if "layernorm" in n]
    if norms and max(norms) < _MAX_DELTA_NORM:
        raise ValueError(
            f"path: expected whole weights in {path}, got differences from LLaMA's, which the "
            "paper's authors publish; make whole ones with `lit_rlhf export --checkpoint "
            f"{path} --base LLAMA --output FOLDER`"
        )
