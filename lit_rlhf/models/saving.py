"""Leaving a model as a Hugging Face folder that the next stage and plain transformers load."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_rlhf.forward import LanguageModel, unwrap_model
from lit_rlhf.models.cards import ModelCardInfo, model_card
from lit_rlhf.models.exchange import HeadFormat, with_value_head
from lit_rlhf.models.generation import saved_generation_config, using_generation_config
from lit_rlhf.models.heads import save_lm_head
from lit_rlhf.models.loading import set_scalar_padding

MODEL_FILES = {".json", ".safetensors", ".jinja", ".txt", ".model", ".md", ".py"}
CONFIGS = ("config.json", "adapter_config.json")


class Savable(Protocol):
    """Something that writes itself into a model's folder, as a text contract does."""

    def save(self, folder: Path) -> object:
        """Write into `folder`."""


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
) -> None:
    """Save a model for the next stage and for plain transformers.

    Weights go to safetensors, with LoRA adapters merged in; `model` itself keeps its adapters.
    `folder` never holds half a model, see `replaced_folder`.

    Args:
        model: A causal language model or a scalar model.
        tokenizer: Saved along; gives the token ids of the generation config, and the padding id
            of a scalar model's config.
        folder: Where to. An existing model folder is replaced.
        contract: Saved along, if any.
        card: How the model was made, for its README.md, or that file's text; `None` writes none.
        generation: Settings of `generation_config.json` besides the token ids, for language models.
            What came with the base model's folder is not passed on.
        max_shard_size: Largest weight file, for instance `5GB`.
        head_format: Whose names a scalar model is saved under, see `lit_rlhf.models.exchange`.
        lm_head: Weight (and bias) of the output layer that a scalar model's trunk was trained with,
            if any: in a file of its own, or among the model's under TRL's names.

    Raises:
        ValueError: If `folder` holds something other than a model, `generation` is not valid, or a
            model cannot be saved in `head_format`.
    """
    with replaced_folder(folder) as partial:
        scalar = not unwrap_model(model).can_generate()
        if scalar:
            _write_scalar(
                model, tokenizer, partial, generation, max_shard_size, head_format, lm_head
            )
            if lm_head and head_format != "trl":
                save_lm_head(lm_head, partial)
        else:
            _write_language_model(model, tokenizer, partial, generation, max_shard_size)
        save_companions(tokenizer, partial, contract, card, scalar)


def save_adapter_folder(
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    *,
    contract: Savable | None = None,
    card: ModelCardInfo | str | None = None,
) -> None:
    """Save a model's adapters alone, as peft loads them on top of the model below.

    Args:
        model: A language model or scalar model; a scalar model's head goes with the adapters.
        tokenizer: Saved along.
        folder: As for `save_model_folder`.
        contract: Saved along, if any.
        card: As for `save_model_folder`.

    Raises:
        ValueError: If `folder` holds something other than a model.
    """
    with replaced_folder(folder) as partial:
        # else peft looks at the base model, also on the hub, for whether its vocabulary has grown
        model.save_pretrained(str(partial), save_embedding_layers=False)
        scalar = not unwrap_model(model).can_generate()
        save_companions(tokenizer, partial, contract, card, scalar)


@contextmanager
def replaced_folder(folder: str | Path) -> Iterator[Path]:
    """A hidden folder beside `folder` that takes its name when the context ends well.

    An existing model is kept until then; after a crash between the two renames it is in
    `.<name>.previous`, from where the next save brings it back first.

    Args:
        folder: A model folder or a free name.

    Yields:
        The empty folder to write to.

    Raises:
        ValueError: If `folder` holds something other than a model.
    """
    target = Path(folder).resolve()
    partial = target.with_name(f".{target.name}.partial")
    previous = target.with_name(f".{target.name}.previous")
    if previous.exists() and not target.exists():
        previous.rename(target)
    _check_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in (partial, previous):
        if leftover.exists():
            shutil.rmtree(leftover)
    try:
        partial.mkdir()
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if not target.exists():
        partial.rename(target)
        return
    target.rename(previous)
    try:
        partial.rename(target)
    except BaseException:
        previous.rename(target)
        raise
    shutil.rmtree(previous)


def _write_language_model(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    generation: Mapping[str, Any] | None,
    max_shard_size: str,
) -> None:
    inner = unwrap_model(model)
    with using_generation_config(inner, saved_generation_config(tokenizer, generation)):
        state = merged_state_dict(model)
        inner.save_pretrained(folder, state_dict=state, max_shard_size=max_shard_size)


def _write_scalar(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    generation: Mapping[str, Any] | None,
    max_shard_size: str,
    head_format: HeadFormat,
    lm_head: Mapping[str, Tensor] | None,
) -> None:
    if generation is not None:
        raise ValueError("generation: expected None for a scalar model, which does not generate")
    inner, state = unwrap_model(model), merged_state_dict(model)
    set_scalar_padding(inner.config, tokenizer)
    # what vLLM and others would pass through a sigmoid otherwise
    inner.config.problem_type = "regression"
    if head_format == "trl":
        causal, state = with_value_head(inner, state, lm_head or {})
        ids = saved_generation_config(tokenizer, None)
        with using_generation_config(causal, ids):
            causal.save_pretrained(folder, state_dict=state, max_shard_size=max_shard_size)
        return
    bias = state.get("score.bias")
    if head_format == "openrlhf":
        inner.config.value_head_prefix = "score"
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
    inner.save_pretrained(folder, state_dict=state, max_shard_size=max_shard_size)


def save_companions(
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    contract: Savable | None,
    card: ModelCardInfo | str | None,
    scalar: bool,
) -> None:
    """Write what stands beside the weights: tokenizer, text contract, model card."""
    _save_tokenizer(tokenizer, folder, "right" if scalar else "left")
    if contract is not None:
        contract.save(folder)
    if card is not None:
        text = card if isinstance(card, str) else model_card(card, scalar)
        (folder / "README.md").write_text(text, encoding="utf-8")


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, padding_side: str) -> None:
    """Save with the side that plain transformers needs.

    Generation continues what stands on the right. Classifiers count positions from the left, so
    with learned positions they read a dialogue behind left padding as another one.
    """
    before = tokenizer.padding_side
    tokenizer.padding_side = padding_side
    try:
        tokenizer.save_pretrained(folder)
    finally:
        tokenizer.padding_side = before


@torch.no_grad()
def merged_state_dict(model: LanguageModel) -> dict[str, Tensor]:
    """Weights of the model without adapters that computes what `model` computes with them.

    Only adapted weights are new tensors; `model` is not changed, not even by a rounding error, as
    merging and unmerging in place would.

    Args:
        model: A model with or without LoRA adapters.

    Returns:
        Weight by name, as the plain architecture names them.
    """
    inner = unwrap_model(model)
    state: dict[str, Tensor] = inner.state_dict()
    if not isinstance(model, PeftModel):
        return state
    adapter = model.active_adapter
    for name, module in inner.named_modules():
        if isinstance(module, LoraLayer):
            weight = module.get_base_layer().weight
            delta = cast(Any, module).get_delta_weight(adapter)
            state[f"{name}.base_layer.weight"] = weight + delta.to(weight.dtype)
    merged = {}
    for name, tensor in state.items():
        # a fully trained layer is there twice: as it was, and as trained under the adapter's name
        if ".lora_" in name or ".original_module." in name:
            continue
        name = name.replace(".base_layer.", ".").replace(f".modules_to_save.{adapter}.", ".")
        merged[name] = tensor
    return merged


def _check_replaceable(folder: Path) -> None:
    """Refuse to replace anything that is not a model folder: its content would be lost."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"folder: expected a folder or a free name, got the file {folder}")
    foreign = _foreign_files(folder)
    if foreign:
        raise ValueError(
            f"folder: expected a model folder or a free name, got {folder} with other content "
            f"({', '.join(foreign[:3])})"
        )


def _foreign_files(folder: Path) -> list[str]:
    """Names of what is no model's; a model may hold another, as a policy holds its critic."""
    content = sorted(folder.iterdir())
    names = [path.name for path in content if path.is_file() and path.suffix not in MODEL_FILES]
    for path in content:
        leftover = path.name.startswith(".") and path.suffix in (".partial", ".previous")
        if path.is_dir() and not leftover:
            names += [f"{path.name}/{name}" for name in _foreign_files(path)]
    if content and not any((folder / name).is_file() for name in CONFIGS):
        names += [path.name for path in content]
    return names
