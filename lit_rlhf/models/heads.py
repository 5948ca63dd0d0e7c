"""Scalar heads on language models' trunks, and output layers beside scalar models."""

import copy
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lit_rlhf.forward import (
    LanguageModel,
    forward_plan,
    head_labels,
    head_matches_logits,
    optimize_forward,
    scalar_head_of,
    unwrap_model,
)

VALUE_HEAD = "value_head"
"""The layer of a policy that is the scalar head of the critic with the same trunk."""

_LM_HEAD_FILE = "lm_head.safetensors"
"""The file in a reward model's folder with the output layer of Eq. 2; transformers ignores it."""


def add_value_head(policy: LanguageModel, seed: int) -> PreTrainedModel:
    """Add a new scalar head to a policy, and return the scalar model of its trunk and this head.

    The head is a layer `value_head` of the policy too, so that it is moved and trained with it.
    """
    inner = unwrap_model(policy)
    if not forward_plan(policy).chunked_logits:
        raise ValueError(
            "critic_init: expected another than 'shared' for a network whose logits are not those "
            f"of an output layer on its trunk, got it for {type(inner).__name__}"
        )
    critic = build_scalar_model(inner, head_seed=seed, config=copy.deepcopy(inner.config))
    if inner is not policy:
        critic.score.float()  # what is trained beside adapters is float32
    setattr(inner, VALUE_HEAD, critic.score)
    optimize_forward(critic.train(), role="critic")
    return critic


def build_scalar_model(
    causal_lm: PreTrainedModel,
    *,
    head_seed: int = 0,
    head: nn.Linear | None = None,
    config: PreTrainedConfig | None = None,
    heads: int = 1,
) -> PreTrainedModel:
    """Build a scalar model on the trunk of a language model, which is taken over and not copied.

    The forward is padded until `optimize_forward`.

    Args:
        causal_lm: The language model. Do not use it afterwards unless the scalar model gets another
            `config`: its own becomes the scalar model's.
        head_seed: Seed of a new head's weights.
        head: A trained head; `None` makes a new one.
        config: The scalar model's config, which is changed; `None` for the language model's.
        heads: Number of outputs of the head.
    """
    config = config or causal_lm.config
    set_heads(config, heads)
    # on the meta device, so that no weights are made which the trunk then replaces
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]
    prefix = model.base_model_prefix
    score = getattr(model, "score", None)
    if not isinstance(score, nn.Linear) or not hasattr(causal_lm, prefix):
        raise ValueError(
            "path: expected a model whose architecture has a scalar version, "
            f"got {type(causal_lm).__name__}"
        )
    setattr(model, prefix, getattr(causal_lm, prefix))
    model.config = config
    if head is None:
        head = init_scalar_head(score.in_features, head_seed, heads)
    model.score = head.to(device=causal_lm.device, dtype=causal_lm.dtype)
    if unloaded := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        raise ValueError(
            f"path: expected a model whose scalar version has a trunk and a head only, got "
            f"{type(model).__name__} with {', '.join(unloaded)} besides"
        )
    return model  # type: ignore[no-any-return]


def set_heads(config: PreTrainedConfig, heads: int) -> None:
    """Write into a scalar model's config how many heads it has."""
    config.num_labels = heads
    if heads > 1:
        config.id2label = head_labels(heads)
        config.label2id = {label: head for head, label in config.id2label.items()}


def init_scalar_head(in_features: int, seed: int, heads: int = 1) -> nn.Linear:
    """Initialize a scalar head without bias, normal with deviation `1 / sqrt(in_features + 1)`.

    The weights are drawn in float32 from a generator of their own, so that a seed gives the same
    head for any dtype.

    Args:
        in_features: Width of the hidden states.
        seed: Seed of the first head. Further heads have `seed + 1` and so on.
        heads: Number of outputs.
    """
    generators = [torch.Generator().manual_seed(seed + head) for head in range(heads)]
    rows = [torch.randn((1, in_features), generator=generator) for generator in generators]
    return linear_layer(torch.cat(rows) / math.sqrt(in_features + 1))


@torch.no_grad()
def average_heads(model: PreTrainedModel) -> None:
    """Replace the heads of a scalar model, in place, by their mean, which is linear like them."""
    weights = scalar_head_of(model).get_parameter("weight")
    mean = weights.float().mean(0, keepdim=True).to(weights.dtype)
    model.score = linear_layer(mean).requires_grad_(weights.requires_grad)
    set_heads(model.config, 1)


def linear_layer(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Make a linear layer of a weight `[out, in]` and a bias `[out]`, which are not copied."""
    out_features, in_features = weight.shape
    layer = nn.Linear(in_features, out_features, bias=bias is not None, device="meta")
    state = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    layer.load_state_dict(state, assign=True)
    return layer


def copy_lm_head(causal_lm: PreTrainedModel) -> nn.Linear:
    """Copy the output layer of `causal_lm`, with its own weights even if the model ties them."""
    layer = causal_lm.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(layer, nn.Linear):
        raise ValueError(
            "model: expected a language model with a linear output layer, "
            f"got {type(causal_lm).__name__}"
        )
    head = linear_layer(**{name: tensor.clone() for name, tensor in layer.state_dict().items()})
    if not head_matches_logits(causal_lm, head):
        raise ValueError(
            f"path: {type(causal_lm).__name__} changes its logits in a way that is not known "
            "here, so reward modelling cannot use its language-model loss; set lm_coef to 0"
        )
    return head


def save_lm_head(lm_head: Mapping[str, Tensor], folder: Path) -> None:
    """Write an output layer's weight, and bias if any, to a reward model's folder."""
    state = {name: tensor.contiguous() for name, tensor in lm_head.items()}
    save_file(state, folder / _LM_HEAD_FILE, metadata={"format": "pt"})


def read_lm_head(folder: str | Path) -> nn.Linear | None:
    """Read the output layer in a reward model's folder; `None` if there is none."""
    path = Path(folder) / _LM_HEAD_FILE
    if not path.is_file():
        return None
    check_whole(path)
    state = load_file(path)
    weight = state.get("weight")
    if weight is None or weight.dim() != 2 or not state.keys() <= {"weight", "bias"}:
        raise ValueError(
            f"path: expected a matrix `weight` and perhaps `bias` in {path}, got {', '.join(state)}"
        )
    return linear_layer(**state)


def check_whole(file: Path) -> None:
    """Refuse a file of weights that is cut off or no safetensors file."""
    try:
        with safe_open(file, framework="pt"):
            pass
    except SafetensorError as error:
        raise ValueError(
            f"path: expected a whole safetensors file, got {file}, which cannot be read: {error}"
        ) from error


def set_scalar_padding(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set `config.pad_token_id` so that plain transformers reads the score where this project does.

    transformers reads the last token that is not padding. If EOS were the padding token, it would
    skip the EOS at which the score was trained. The id is then left open, and transformers refuses
    padded batches instead of returning other scores.
    """
    distinct = tokenizer.pad_token_id != tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id if distinct else None
