"""Scalar models as other projects keep them: the names in their files, and ours under those names.

A scalar model is a trunk and a layer from its last hidden states to one number, weight `[1, H]` and
perhaps bias `[1]`. The trunk's names are transformers' everywhere (`model.layers.0...` in a Llama);
the layer is called

- `score`, without bias, in transformers' sequence classifiers, which this project writes and which
  TRL, vLLM (`as_seq_cls_model` in model_executor/models/adapters.py) and OpenRLHF load;
- `score`, or what the config says as `value_head_prefix`, or `value_head` in older releases,
  without bias, in OpenRLHF's `RewardModel` and `CriticModel` (openrlhf/models/model.py), where the
  config leaves out that there is one label;
- `reward_head`, without bias, in the paper's `LlamaRewardModel` (train_ppo.py of
  OpenLMLab/MOSS-RLHF), beside the language model's head;
- `v_head.summary`, with bias, in TRL's `AutoModelForCausalLMWithValueHead` (`ValueHead` in
  modeling_value_head.py), beside the language model's head; all the other names may stand behind
  `pretrained_model.`
"""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)
from transformers.utils.hub import cached_file

from lit_rlhf.models.configs import is_classifier

HeadFormat = Literal["transformers", "openrlhf", "trl"]
"""Under which names a scalar model is saved."""

HEADS = ("score", "value_head", "reward_head", "v_head.summary")
WRAPPER = "pretrained_model."
VALUE_HEAD = "v_head.summary"


class StoredHead(NamedTuple):
    """The scalar head in a model's files.

    Attributes:
        name: What the files call it.
        weight: `[1, H]`.
        bias: `[1]`; `None` without one, or if it is 0.
    """

    name: str
    weight: Tensor
    bias: Tensor | None

    def is_plain(self, config: PreTrainedConfig) -> bool:
        """Whether the class that the model's config names reads it as it is."""
        standard = self.name == HEADS[0] and self.bias is None
        return standard and is_classifier(config) and config.num_labels == 1

    @property
    def renamed(self) -> dict[str, str]:
        """Transformers' `key_mapping` (pattern to name) to its own sequence classifiers."""
        return {
            rf"^{re.escape(WRAPPER)}": "",
            rf"^{re.escape(self.name)}\.": "score.",
        }

    def layer(self) -> nn.Linear:
        """The head as a layer."""
        head = nn.Linear(self.weight.shape[1], 1, bias=self.bias is not None, device="meta")
        head.weight = nn.Parameter(self.weight)
        if self.bias is not None:
            head.bias = nn.Parameter(self.bias)
        return head


def stored_head(
    path: str | Path, config: PreTrainedConfig, pickled: bool = False
) -> StoredHead | None:
    """The scalar head that a model's files hold, found by name and shape.

    Args:
        path: Folder or hub id.
        config: The model's.
        pickled: Whether to look into `pytorch_model.bin` too, as plain data.

    Returns:
        The head; `None` if the files hold none, as a language model's.

    Raises:
        ValueError: If there is a layer with one output of an unknown name, or several such layers,
            or pickled files hold more than plain data.
    """
    first = getattr(config, "value_head_prefix", None) or HEADS[0]
    known = (first, *(name for name in HEADS if name != first))
    tensors = _single_rows(path, pickled)
    found = [name.removesuffix(".weight") for name, tensor in tensors.items() if tensor.dim() == 2]
    own = is_classifier(config) and set(found).isdisjoint(known)  # as transformers calls it there
    if not found or own:
        return None
    if len(found) > 1 or found[0] not in known:
        raise ValueError(
            f"path: expected in {path} at most one layer with a single output, called "
            f"{', '.join(known)}, got {', '.join(sorted(found))}; leave out what is not the scalar "
            "head, and if it has another name, say so as value_head_prefix in config.json"
        )
    bias = tensors.get(f"{found[0]}.bias")
    return StoredHead(
        found[0], tensors[f"{found[0]}.weight"], bias if bias is not None and bias.any() else None
    )


def _single_rows(path: str | Path, pickled: bool) -> dict[str, Tensor]:
    """What has a single output outside a trunk's numbered layers, and biases that go with it."""
    rows = {}
    for file in _files_outside_layers(path, pickled):
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as stored:
                for name in filter(_outside_layers, stored.keys()):
                    if stored.get_slice(name).get_shape()[:1] == [1]:
                        rows[name] = stored.get_tensor(name)
        else:
            tensors = plain_tensors(file).items()
            rows |= {n: t.clone() for n, t in tensors if _outside_layers(n) and t.shape[:1] == (1,)}
    return rows


def _outside_layers(name: str) -> bool:
    return name.endswith((".weight", ".bias")) and not any(map(str.isdigit, name.split(".")))


def _files_outside_layers(path: str | Path, pickled: bool) -> list[Path]:
    """The weight files that hold anything but a trunk's numbered layers."""
    kinds = [(SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME), (WEIGHTS_INDEX_NAME, WEIGHTS_NAME)]
    for index_name, whole_name in kinds if pickled else kinds[:1]:
        index, whole = _located(path, index_name), _located(path, whole_name)
        if index is not None:
            shards = json.loads(index.read_text("utf-8"))["weight_map"]
            names = sorted({shard for name, shard in shards.items() if _outside_layers(name)})
            return [file for name in names if (file := _located(path, name)) is not None]
        if whole is not None:
            return [whole]
    return []


def _located(path: str | Path, name: str) -> Path | None:
    """A model's file, fetched from the hub for an id; `None` if the model has none of that name."""
    if Path(path).is_dir():
        return Path(path) / name if (Path(path) / name).is_file() else None
    try:
        return Path(str(cached_file(str(path), name)))
    except OSError:  # also where the hub cannot be reached, which loading the model then reports
        return None


def plain_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors in a file that torch has pickled, mapped and not read; no code of it is run.

    Raises:
        ValueError: If it holds more than plain data, or cannot be read.
    """
    try:
        tensors: dict[str, Tensor] = torch.load(
            file, map_location="cpu", weights_only=True, mmap=True
        )
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise ValueError(
            f"{file}: expected plain tensors, got a file that is none: {error}"
        ) from error
    return tensors


def with_value_head(
    model: PreTrainedModel, state: Mapping[str, Tensor], lm_head: Mapping[str, Tensor]
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A scalar model as TRL's `AutoModelForCausalLMWithValueHead` keeps one.

    Args:
        model: The scalar model.
        state: Its weights, under its own names.
        lm_head: Weight (and bias) of the output layer to put beside it, if there is one.

    Returns:
        A language model without weights, for its names and config, and the weights to save.

    Raises:
        ValueError: If `lm_head` does not fit.
    """
    config = copy.deepcopy(model.config)
    # what a language model's config does not say
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
        name.replace("score.", f"{VALUE_HEAD}.", 1) if name.startswith("score.") else name: tensor
        for name, tensor in state.items()
    }
    weight = renamed[f"{VALUE_HEAD}.weight"]
    renamed.setdefault(f"{VALUE_HEAD}.bias", weight.new_zeros(1))
    return causal, renamed | {f"{prefix}.{name}": tensor for name, tensor in lm_head.items()}
