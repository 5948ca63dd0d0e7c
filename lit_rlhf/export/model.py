"""The model that is exported, with everything that is saved beside it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_rlhf.choices import NetworkName as NetworkName
from lit_rlhf.data import DialogueEncoder, TextContract
from lit_rlhf.files import code_versions, write_manifest
from lit_rlhf.finite import require_finite_weights
from lit_rlhf.forward import LanguageModel, unwrap_model
from lit_rlhf.models import (
    HeadFormat,
    ModelCardInfo,
    assign_weights,
    merge_adapters,
    merged_state_dict,
    replace_folder,
    save_adapter_folder,
    save_model_folder,
)

BESIDE = "beside the scalar model."
"""Prefix that tells the weights of `ExportableModel.lm_head` from the model's own."""


@dataclass(frozen=True)
class ExportableModel:
    """A model, with its adapters if it has any, and what is saved beside it.

    Attributes:
        model: The network.
        tokenizer: Its tokenizer.
        name: Its kind and origin in words.
        scalar: Whether it is a scalar model, as opposed to a language model.
        dtype: Type that weights are saved in.
        contract: The text contract, if it is known.
        card: How the model was made, or the text of its README.md, if either is known.
        generation: Settings of a language model's `generation_config.json` besides the token ids.
        lm_head: State dict of the output layer that was trained beside a scalar model.
        manifest: Entries of the manifest that are taken over from the folder of the model.
    """

    model: LanguageModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    scalar: bool
    dtype: torch.dtype
    contract: TextContract | None = None
    card: ModelCardInfo | str | None = None
    generation: Mapping[str, Any] | None = None
    lm_head: Mapping[str, Tensor] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict)

    def save(
        self, output: str | Path, max_shard_size: str = "5GB", format: HeadFormat = "transformers"
    ) -> None:
        """Write the model's folder, with adapters merged into the weights.

        Args:
            output: The folder. A folder that was saved like this is replaced.
            max_shard_size: Size of the largest weight file.
            format: Project under whose names a scalar model's weights are saved.
        """
        if not self.scalar and format != "transformers":
            raise ValueError(
                "format: expected transformers for a language model, which all programs load, got "
                f"{format!r}; network critic or reward exports a scalar model"
            )
        merged = merge_adapters(self.model, self.dtype)
        # as they are saved: float16 does not hold what float32 holds
        dtype = str(self.dtype).removeprefix("torch.")
        require_finite_weights(merged, f"{self.name} in {dtype}", str(output))
        with replace_folder(output) as partial:
            save_model_folder(
                merged,
                self.tokenizer,
                partial,
                contract=self.contract,
                card=self.card,
                generation=self.generation,
                max_shard_size=max_shard_size,
                head_format=format,
                lm_head={name: tensor.to(self.dtype) for name, tensor in self.lm_head.items()},
            )
            write_manifest(partial, self.manifest)

    def save_adapters(self, output: str | Path) -> None:
        """Write a folder of only the model's LoRA adapters."""
        if not isinstance(self.model, PeftModel):
            raise ValueError(
                f"merge_lora: expected true, got false for the {self.name}, which has no adapters"
            )
        save_adapter_folder(
            self.model, self.tokenizer, str(output), contract=self.contract, card=self.card
        )


def average_models(models: Iterable[ExportableModel], names: Sequence[str]) -> ExportableModel:
    """Average the weights of fine-tuned models of one start, each with the same weight.

    This is WARP for policies (arXiv 2406.16768) and WARM for reward models (arXiv 2401.12187).
    Adapters are merged first, and sums are in float32. If the models come from a generator, memory
    holds the first model, the sums and one other model at a time.

    Args:
        models: At least one model.
        names: A name for each, for the manifest and the card.

    Raises:
        ValueError: If architectures or text contracts differ.
    """
    first: ExportableModel | None = None
    sums: dict[str, Tensor] = {}
    for model in models:
        weights = _all_weights(model)
        if first is None:
            first = model
            sums = {name: tensor.float().clone() for name, tensor in weights.items()}
            continue
        _check_same_start(model, first, shapes=_shapes(weights), first_shapes=_shapes(sums))
        for name, total in sums.items():
            total += weights[name].float()
        del model, weights
    assert first is not None
    means = {name: total / len(names) for name, total in sums.items()}
    lm_head = {name: means.pop(f"{BESIDE}{name}") for name in first.lm_head}
    averaged = merge_adapters(first.model, torch.float32)
    assign_weights(averaged, means)  # the first model keeps its own weights
    return replace(
        first,
        model=averaged,
        name=f"average of {len(names)} models",
        card="\n".join(["# Average of models", "", *(f"- {name}" for name in names), ""]),
        lm_head=lm_head,
        manifest={"made": {"average_of": list(names)}, "versions": code_versions()},
    )


def _all_weights(exported: ExportableModel) -> dict[str, Tensor]:
    """The weights of a model and of the output layer beside it."""
    beside = {f"{BESIDE}{name}": tensor for name, tensor in exported.lm_head.items()}
    return merged_state_dict(exported.model) | beside


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in weights.items()}


def _check_same_start(
    model: ExportableModel,
    first: ExportableModel,
    *,
    shapes: Mapping[str, torch.Size],
    first_shapes: Mapping[str, torch.Size],
) -> None:
    """Refuse models whose weights or texts do not mean the same."""
    problem = None
    if first.contract and model.contract:
        problem = first.contract.mismatch(model.contract)
    if shapes != first_shapes or _architecture(model) != _architecture(first):
        problem = "their architectures differ"
    if problem:
        raise ValueError(
            f"average: expected fine-tunings of one model, got the {model.name} beside the "
            f"{first.name}: {problem}"
        )


def _architecture(exported: ExportableModel) -> list[Any]:
    """Settings that change what weights of the same shapes compute."""
    config: Any = unwrap_model(exported.model).config.get_text_config()
    names = ("model_type", "num_attention_heads", "rope_parameters")
    return [getattr(config, name, None) for name in names]


def with_text_contract(exported: ExportableModel, chat_template: str) -> ExportableModel:
    """Give an exported model without a text contract one with the template `chat_template`."""
    if exported.contract is not None:
        raise ValueError(
            f"chat_template: expected none for the {exported.name}, whose text contract names its "
            f"template, got {chat_template!r}"
        )
    length = getattr(unwrap_model(exported.model).config, "max_position_embeddings", None)
    # the contract does not depend on the length, which the encoder asks for
    encoder = DialogueEncoder(exported.tokenizer, chat_template, max_length=length or 512)
    return replace(exported, contract=encoder.contract)
