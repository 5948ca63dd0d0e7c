"""Leaving a model as a Hugging Face folder that the next stage and plain transformers load."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lit_rlhf.models.cards import ModelCardInfo, model_card
from lit_rlhf.models.generation import saved_generation_config, using_generation_config
from lit_rlhf.models.heads import save_lm_head
from lit_rlhf.models.loading import set_scalar_padding
from lit_rlhf.models.networks import LanguageModel, unwrapped

MODEL_FILES = {".json", ".safetensors", ".jinja", ".txt", ".model", ".md", ".py"}


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
    card: ModelCardInfo | None = None,
    generation: Mapping[str, Any] | None = None,
    lm_head: nn.Module | None = None,
) -> None:
    """Save a model for the next stage and for plain transformers.

    Weights go to safetensors, with LoRA adapters merged in; `model` itself keeps its adapters. The
    files are written to a hidden sibling folder that is renamed when complete, so `folder` never
    holds half a model. An existing model is kept until then; after a crash between the two renames
    it is in `.<name>.previous`, from where the next save brings it back first.

    Args:
        model: A causal language model or a scalar model.
        tokenizer: Saved along; gives the token ids of the generation config, and the padding id
            of a scalar model's config.
        folder: Where to. An existing model folder is replaced.
        contract: Saved along, if any.
        card: How the model was made, for its README.md; `None` writes no model card.
        generation: Settings of `generation_config.json` besides the token ids, for language models.
            What came with the base model's folder is not passed on.
        lm_head: Output layer that a scalar model's trunk was trained with, saved along if any.

    Raises:
        ValueError: If `folder` holds something other than a model, or `generation` is not valid.
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
        _write(model, tokenizer, partial, contract, card, generation)
        if lm_head is not None:
            save_lm_head(lm_head, partial)
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


def _write(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    contract: Savable | None,
    card: ModelCardInfo | None,
    generation: Mapping[str, Any] | None,
) -> None:
    inner = unwrapped(model)
    scalar = not inner.can_generate()
    if scalar:
        if generation is not None:
            raise ValueError(
                "generation: expected None for a scalar model, which does not generate"
            )
        set_scalar_padding(inner.config, tokenizer)
    settings = (
        nullcontext()
        if scalar
        else using_generation_config(inner, saved_generation_config(tokenizer, generation))
    )
    with settings:
        inner.save_pretrained(folder, state_dict=merged_state_dict(model))
    _save_tokenizer(tokenizer, folder, "right" if scalar else "left")
    if contract is not None:
        contract.save(folder)
    if card is not None:
        (folder / "README.md").write_text(model_card(card, scalar), encoding="utf-8")


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
    inner = unwrapped(model)
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
    if content and not (folder / "config.json").is_file():
        names += [path.name for path in content]
    return names
