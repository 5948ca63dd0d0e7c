"""Saving a model as a Hugging Face folder that the next stage and plain transformers load."""

import copy
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lit_rlhf.files import (
    MANIFEST,
    delete,
    find_changed_files,
    fsync,
    move_into_place,
    name_file,
    partial_path,
    read_manifest,
    undo_interrupted_replacement,
    write_manifest,
    write_text,
)
from lit_rlhf.forward import (
    LanguageModel,
    copy_parameter,
    count_heads,
    replace_parameters,
    stop_token_ids,
    unwrap_model,
)
from lit_rlhf.models.card import ModelCardInfo, render_model_card
from lit_rlhf.models.four_bit import dequantized_weights, is_4bit
from lit_rlhf.models.heads import VALUE_HEAD, save_lm_head, set_scalar_padding
from lit_rlhf.models.interop import HeadFormat, convert_to_trl
from lit_rlhf.models.tying import assign_weights, config_for_weights

SAMPLING_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "typical_p")
"""Generation settings that transformers refuses without `do_sample`."""
SCORE_BIAS = re.compile(r"(^|\.)score\.(.*\.)?bias$")
SCORE_WEIGHT = re.compile(r"(^|\.)score\.(original_module\.)?weight$")
"""Name of the weight that has a row for each scalar head."""


class Savable(Protocol):
    """Something that saves itself to a model's folder, as a text contract does."""

    def save(self, folder: Path) -> object:
        """Write a file or several into `folder`."""


def save_model_folder(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    *,
    contract: Savable | None = None,
    card: ModelCardInfo | str | None = None,
    generation: Mapping[str, Any] | None = None,
    max_shard_size: str = "50GB",
    head_format: HeadFormat = "transformers",
    lm_head: Mapping[str, Tensor] | None = None,
    state: dict[str, Tensor] | None = None,
) -> None:
    """Save a model for the next stage and for plain transformers.

    Weights go to safetensors files, with LoRA adapters merged in; `model` itself keeps its
    adapters. `folder` never holds half a model, see `replace_folder`.

    Args:
        model: A causal language model or a scalar model.
        tokenizer: Saved with the model, whose configs get its token ids.
        folder: Where to save. A folder that was saved like this is replaced.
        contract: Text contract to save with the model.
        card: How the model was made, for its README.md, or the text of that file.
        generation: Settings of `generation_config.json` besides the token ids, for language models
            only. The base model's settings are not passed on, except for the tokens that end a
            response.
        max_shard_size: Size of the largest weight file, for instance `5GB`.
        head_format: Project under whose names a scalar model is saved.
        lm_head: Weight (and bias) of the output layer that a scalar model's trunk was trained with.
            It goes to its own file, or to the model's under TRL's names.
        state: The model's `merged_state_dict`, where ranks had to gather it.
    """
    if is_4bit(model):
        model = merge_adapters(model)  # transformers would save the layers in 4 bits
    inner = unwrap_model(model)
    scalar = not inner.can_generate()
    with replace_folder(folder) as partial:
        state = merged_state_dict(model) if state is None else state
        if scalar:
            if generation is not None:
                raise ValueError(
                    "generation: expected None for a scalar model, which samples nothing"
                )
            _name_label(inner.config, card)
            _write_scalar(
                inner,
                tokenizer,
                partial,
                state=state,
                lm_head=lm_head,
                head_format=head_format,
                max_shard_size=max_shard_size,
            )
            if lm_head and head_format != "trl":
                save_lm_head(lm_head, partial)
        else:
            # save_pretrained writes the config that came with the base model's folder
            generation_before = inner.generation_config
            config_before = inner.config
            stop_ids = stop_token_ids(model)
            inner.generation_config = make_generation_config(tokenizer, generation, stop_ids)
            inner.config = config_for_weights(inner, state)
            try:
                inner.save_pretrained(partial, state_dict=state, max_shard_size=max_shard_size)
            finally:
                inner.generation_config = generation_before
                inner.config = config_before
        _save_companions(tokenizer, partial, contract=contract, card=card, scalar=scalar)


def save_adapter_folder(
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    *,
    contract: Savable | None = None,
    card: ModelCardInfo | str | None = None,
) -> None:
    """Save only a model's adapters, as peft loads them on top of the model below them.

    A scalar model's head is saved with them.

    Args:
        model: A model inside LoRA adapters.
        tokenizer: Saved with the adapters.
        folder: Where to save. A folder that was saved like this is replaced.
        contract: Text contract to save with the adapters.
        card: How the model was made, for its README.md, or the text of that file.
    """
    with replace_folder(folder) as partial:
        # otherwise peft asks the base model, even on the hub, whether its vocabulary has grown
        model.save_pretrained(str(partial), save_embedding_layers=False)
        scalar = not unwrap_model(model).can_generate()
        _save_companions(tokenizer, partial, contract=contract, card=card, scalar=scalar)


@contextmanager
def replace_folder(folder: str | Path) -> Iterator[Path]:
    """A hidden folder next to `folder` that takes its name when the context ends without an error.

    The content is on disk by then, with a list of its files. An existing model is kept until then.
    A folder with content that was not saved like this is refused.
    """
    target = Path(folder).resolve()
    undo_interrupted_replacement(target)
    check_replaceable(target)
    partial = partial_path(target)
    delete(partial)
    partial.mkdir(parents=True)
    try:
        with name_file(target):
            yield partial
            write_manifest(partial, {})
            # safetensors lets nobody else read its files, whatever the umask
            mode = (partial / MANIFEST).stat().st_mode
            for path in (*partial.rglob("*"), partial):
                if path.is_file():
                    path.chmod(mode)
                fsync(path)
            move_into_place(target)
    except SafetensorError as error:  # its message has neither a class of the system nor a name
        raise OSError(f"the weights in {target} could not be written: {error}") from error
    finally:
        delete(partial)
        undo_interrupted_replacement(target)


def _name_label(config: PreTrainedConfig, card: ModelCardInfo | str | None) -> None:
    """Name the only label: transformers' default, LABEL_0, says nothing in a pipeline's output."""
    # a model from a folder keeps the name that it came with, and several heads are known by theirs
    renamed = isinstance(card, ModelCardInfo) and count_heads(config) == 1
    if renamed or config.id2label == {0: "LABEL_0"}:
        is_critic = isinstance(card, ModelCardInfo) and card.stage == "critic"
        label = "value" if is_critic else "reward"
        config.id2label = {0: label}
        config.label2id = {label: 0}


def _write_scalar(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    state: dict[str, Tensor],
    lm_head: Mapping[str, Tensor] | None,
    head_format: HeadFormat,
    max_shard_size: str,
) -> None:
    """Write the config and weights of a scalar model under the names of a project."""
    set_scalar_padding(model.config, tokenizer)
    if (heads := count_heads(model.config)) > 1 and head_format != "transformers":
        raise ValueError(
            f"head_format: expected transformers for a model of {heads} heads, got {head_format}; "
            "export the folder that transformers gives, which makes one head of them"
        )
    # without it, vLLM and others pass the score through a sigmoid
    model.config.problem_type = "regression"
    if head_format == "trl":
        converted = convert_to_trl(model, state, lm_head or {})
        causal_lm = converted.causal_lm
        causal_lm.generation_config = make_generation_config(tokenizer, None)
        causal_lm.save_pretrained(
            folder, state_dict=converted.weights, max_shard_size=max_shard_size
        )
        return
    bias = state.get("score.bias")
    if head_format == "openrlhf":
        model.config.value_head_prefix = "score"
        if bias is not None:
            raise ValueError(
                f"head_format: OpenRLHF's scalar head has no bias, this one has {float(bias):g}; "
                "use trl"
            )
    elif bias is not None:
        warnings.warn(
            "the scalar head has a bias: this project reads score.bias, while plain transformers "
            f"leaves it out, and its scores are lower by {float(bias):g}; the format trl keeps it",
            stacklevel=2,
        )
    model.save_pretrained(folder, state_dict=state, max_shard_size=max_shard_size)


def _save_companions(
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    contract: Savable | None,
    card: ModelCardInfo | str | None,
    scalar: bool,
) -> None:
    """Save tokenizer, text contract and model card next to the weights."""
    padding_side = tokenizer.padding_side
    # plain transformers continues the last column, and counts a classifier's from the first
    tokenizer.padding_side = "right" if scalar else "left"
    try:
        tokenizer.save_pretrained(folder)
    finally:
        tokenizer.padding_side = padding_side
    if contract is not None:
        contract.save(folder)
    if card is not None:
        if isinstance(card, ModelCardInfo):
            write_manifest(folder, card.manifest())
            chat = tokenizer.chat_template is not None
            card = render_model_card(read_manifest(folder), scalar=scalar, chat=chat)
        write_text(folder / "README.md", card)


def make_generation_config(
    tokenizer: PreTrainedTokenizerBase,
    settings: Mapping[str, Any] | None,
    stop_ids: Sequence[int] = (),
) -> GenerationConfig:
    """Make the generation config of a saved model.

    Args:
        tokenizer: Gives the ids of BOS, EOS and padding.
        settings: Further settings by name. `None` values are left out.
        stop_ids: Ids of other tokens that end a response.
    """
    settings = {key: value for key, value in (settings or {}).items() if value is not None}
    known_settings = GenerationConfig().to_dict()  # type: ignore[no-untyped-call]
    if unknown := sorted(set(settings) - set(known_settings)):
        raise ValueError(
            "generation: expected settings of transformers' GenerationConfig, "
            f"got {', '.join(unknown)}"
        )
    if not settings.get("do_sample", False):
        settings = {k: value for k, value in settings.items() if k not in SAMPLING_SETTINGS}
    eos_ids = [*dict.fromkeys([tokenizer.eos_token_id, *stop_ids])]
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": eos_ids if len(eos_ids) > 1 else eos_ids[0],
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = GenerationConfig(**{**ids, **settings})  # type: ignore[no-untyped-call]
    config.validate(strict=True)
    return config


@torch.no_grad()
def merged_state_dict(model: LanguageModel) -> dict[str, Tensor]:
    """Weights, by names without adapters, of the model that computes what `model` computes.

    Only adapted weights are new tensors. `model` is not changed; merging and unmerging in place
    would leave rounding errors.
    """
    inner = unwrap_model(model)
    weights = inner.state_dict() | dequantized_weights(inner)
    # the value head belongs to the critic, which has a folder of its own
    state: dict[str, Tensor] = {
        name: tensor for name, tensor in weights.items() if not name.startswith(VALUE_HEAD)
    }
    adapted = {name: m for name, m in inner.named_modules() if isinstance(m, LoraLayer)}
    if not adapted:
        return state
    adapter = next(iter(adapted.values())).active_adapters[0]
    for name, module in adapted.items():
        below = f"{name}.base_layer"
        if adapter in module.lora_variant or module.lora_bias.get(adapter):
            merged_layer = _merge_layer(name, module, adapter)
            state |= {f"{below}.{part}": tensor for part, tensor in merged_layer.items()}
        else:
            weight = state[f"{below}.weight"]
            delta = cast(Any, module).get_delta_weight(adapter)
            state[f"{below}.weight"] = weight + delta.to(weight)
    merged = {}
    for name, tensor in state.items():
        # a layer that peft trains in full is there twice: as loaded, and as trained under the
        # adapter's name
        if ".lora_" in name or ".original_module." in name:
            continue
        name = name.replace(".base_layer.", ".").replace(f".modules_to_save.{adapter}.", ".")
        merged[name] = tensor
    return merged


def _merge_layer(name: str, layer: LoraLayer, adapter: str) -> dict[str, Tensor]:
    """Parameters of a layer with its adapter, which is more than a product of two matrices.

    DoRA (arXiv 2402.09353) also changes the norms of the weight, and an adapter may have a bias.

    Args:
        name: The layer's name, for messages.
        layer: The layer, which is not changed.
        adapter: The adapter.
    """
    base: nn.Module = layer.get_base_layer()
    if getattr(base.get_parameter("weight"), "quant_state", None) is not None:
        raise ValueError(
            f"model: expected plain LoRA on weights in 4 bits, got {name} with DoRA or lora_bias, "
            "which cannot be merged into them"
        )
    if layer.lora_bias.get(adapter) and getattr(base, "bias", None) is None:
        raise ValueError(
            f"model: expected lora_bias on layers with a bias only, got {name}, which has none to "
            "merge the adapter's bias into"
        )
    mergeable = cast(Any, layer)
    with replace_parameters([base], copy_parameter):
        mergeable.merge(adapter_names=[adapter])
        # unmerging changes the tensors in place
        merged = {part: p.detach().clone() for part, p in base.named_parameters(recurse=False)}
        mergeable.unmerge()
    return merged


def merge_adapters(model: LanguageModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Build the model without adapters that computes what `model` computes, for saving.

    `model` stays as it is. `dtype` is the type of the weights; `None` keeps each one's.
    """
    inner = unwrap_model(model)
    weights = merged_state_dict(model)
    if dtype is not None:
        weights = {n: t.to(dtype) if t.is_floating_point() else t for n, t in weights.items()}
    config = copy.deepcopy(inner.config)
    vars(config).pop("quantization_config", None)  # what is 4-bit in `model` is not here
    with torch.device("meta"):
        merged = type(inner)(config)
        match_score_bias(merged, weights)
    assign_weights(merged, weights)
    return merged


def match_score_bias(model: Any, weights: Mapping[str, Tensor]) -> None:  # noqa: ANN401
    """Give a scalar head a bias if its weights have one; transformers' heads have none."""
    if any(SCORE_BIAS.search(name) for name in weights):
        model.score = nn.Linear(model.score.in_features, 1)


def check_replaceable(folder: Path) -> None:
    """Refuse to replace a folder with files that `replace_folder` has not written as they are."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"folder: expected a folder or a free name, got the file {folder}")
    foreign = [*islice(find_changed_files(folder), 3)]
    if foreign:
        raise ValueError(
            f"folder: expected a model folder or a free name, got {folder} with files that no "
            f"stage or export has saved, or that were changed since ({', '.join(foreign)})"
        )
