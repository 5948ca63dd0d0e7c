"""Scalar models with the weight names of other projects, written without this project."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.tiny_models import tiny_causal_lm, tiny_tokenizer


class Foreign(NamedTuple):
    """A layout: the head's name and bias, the prefix of other names, whether it has an LM head."""

    head: str
    bias: bool = False
    prefix: str = ""
    lm_head: bool = False
    config: dict[str, Any] = {}  # noqa: RUF012


REWARD_MODEL, CLASSIFIER = {"architectures": ["RewardModel"]}, "LlamaForSequenceClassification"
FOREIGN = {
    "paper": Foreign("reward_head", lm_head=True, config={"architectures": ["LlamaRewardModel"]}),
    "trl": Foreign("v_head.summary", bias=True, lm_head=True),
    "trl, wrapped": Foreign("v_head.summary", bias=True, lm_head=True, prefix="pretrained_model."),
    "openrlhf": Foreign("score", config=REWARD_MODEL | {"value_head_prefix": "score"}),
    "openrlhf, critic": Foreign("score", config={"architectures": ["CriticModel"]}),
    "openrlhf, older": Foreign("value_head", config=REWARD_MODEL),
    "openrlhf, named": Foreign("rm", config=REWARD_MODEL | {"value_head_prefix": "rm"}),
    "openrlhf, two labels": Foreign("score", config={"architectures": [CLASSIFIER]}),
}


class ForeignFolder(NamedTuple):
    """A folder of a scalar model.

    Attributes:
        folder: The folder.
        causal: The language model whose trunk it holds.
        weight: Weight of the head, `[1, H]`.
        bias: Bias of the head, `[1]`.
    """

    folder: Path
    causal: PreTrainedModel
    weight: Tensor
    bias: Tensor

    @torch.no_grad()
    def scores(self, ids: Tensor) -> Tensor:
        """The head on the last hidden states of the last tokens."""
        output: Any = self.causal(input_ids=ids, output_hidden_states=True)
        scores: Tensor = output.hidden_states[-1][:, -1] @ self.weight[0] + self.bias
        return scores


def write_foreign(
    folder: Path, layout: Foreign, family: str = "llama", shards: int = 1, pickled: bool = False
) -> ForeignFolder:
    """Write a tiny scalar model in a layout, in `shards` files, pickled or as safetensors."""
    causal = tiny_causal_lm(family)
    causal.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    width = causal.get_output_embeddings().in_features  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn((1, width), generator=generator)
    bias = torch.randn(1, generator=generator) if layout.bias else torch.zeros(1)
    if not layout.lm_head:
        weights.pop("lm_head.weight", None)
    weights = {f"{layout.prefix}{name}": tensor for name, tensor in weights.items()}
    weights[f"{layout.head}.weight"] = weight
    if layout.bias:
        weights[f"{layout.head}.bias"] = bias
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | layout.config), "utf-8")
    stem, suffix = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
    names, places = sorted(weights), dict[str, str]()
    for number in range(shards):
        file = f"{stem}-{number + 1:05d}-of-{shards:05d}.{suffix}"
        file = file if shards > 1 else f"{stem}.{suffix}"
        part = {name: weights[name] for name in names[number::shards]}
        places |= dict.fromkeys(part, file)
        if pickled:
            torch.save(part, folder / file)
        else:
            save_file(part, folder / file, metadata={"format": "pt"})
    if shards > 1:
        index = {"metadata": {}, "weight_map": places}
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index), "utf-8")
    return ForeignFolder(folder, causal, weight, bias)
