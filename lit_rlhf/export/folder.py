"""A model folder, of a stage or of anyone, as what a finished stage would leave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from peft import PeftConfig
from transformers import PreTrainedModel

from lit_rlhf.data import DialogueEncoder, TextContract
from lit_rlhf.export.checkpoint import Export, NetworkName
from lit_rlhf.forward import LanguageModel, unwrap_model
from lit_rlhf.models import (
    ADAPTER_CONFIG,
    DTYPES,
    DType,
    ModelOptions,
    add_base_weights,
    find_stored_head,
    is_classifier,
    load_adapter_folder,
    load_causal_lm,
    load_scalar_model,
    load_tokenizer,
    read_config,
    read_lm_head,
)

SCALAR = ("reward", "critic")


def export_folder(
    path: str | Path,
    network: NetworkName | None = None,
    dtype: DType | None = None,
    base: str | None = None,
    trust_remote_code: bool = False,
) -> Export:
    """The model in a folder of weights or of adapters.

    Args:
        path: The folder. Weights may be in safetensors, or pickled by torch as plain data.
        network: `reward` or `critic` for a scalar model, `policy` or `model` for a language model;
            `None` takes a scalar model where there is a scalar head.
        dtype: Type to save the weights in; `None` takes what the model's config says.
        base: Folder or hub id of the model that the weights are differences from, or of the one
            below the adapters; `None` takes the one that the adapters name.
        trust_remote_code: Run code that comes with a model.

    Raises:
        ValueError: If there is no such model in the folder.
    """
    path = Path(path)
    options = ModelOptions(trust_remote_code=trust_remote_code)
    adapters = (path / ADAPTER_CONFIG).is_file()
    below = str(path)
    if adapters:
        below = base or str(PeftConfig.from_pretrained(str(path)).base_model_name_or_path)
    stored = str(read_config(below, options).dtype).removeprefix("torch.")
    target: DType = dtype or (cast(DType, stored) if stored in DTYPES else "float32")
    if adapters:
        model: LanguageModel = load_adapter_folder(path, options, base, pickled_weights=True)
    elif base is not None:
        # sums are in float32, the default of the options
        model = _load_model(path, options, network, delta_weights=True)
        whole = load_causal_lm(base, options, pickled_weights=True)
        add_base_weights(unwrap_model(model), unwrap_model(whole))
    else:
        model = _load_model(path, replace(options, dtype=target), network)
    inner = unwrap_model(model)
    scalar = not inner.can_generate()
    if adapters and network is not None and scalar != (network in SCALAR):
        expected = "reward or critic" if scalar else "policy or model"
        raise ValueError(
            f"network: expected {expected} for the adapters in {path}, got {network!r}"
        )
    own_tokenizer = (path / "tokenizer_config.json").is_file()
    tokenizer = load_tokenizer(path if own_tokenizer else base or below, trust_remote_code)
    lm_head = read_lm_head(path) if scalar else None
    card = path / "README.md"
    return Export(
        model=model,
        tokenizer=tokenizer,
        name=f"{'scalar' if scalar else 'language'} model in {path}",
        scalar=scalar,
        dtype=ModelOptions(dtype=target).torch_dtype,
        contract=TextContract.find(path),
        card=card.read_text("utf-8") if card.is_file() else None,
        generation=None if scalar else _generation(inner),
        lm_head={} if lm_head is None else lm_head.state_dict(),
    )


def with_template(export: Export, chat_template: str) -> Export:
    """An export that says how its model was shown text.

    Args:
        export: Of a model that does not say so itself.
        chat_template: `tokenizer` for the template that comes with the tokenizer, or a name of
            `lit_rlhf.data.CHAT_TEMPLATES`.

    Raises:
        ValueError: If the model says so itself, or there is no such template.
    """
    if export.contract is not None:
        raise ValueError(
            f"chat_template: expected none for the {export.name}, whose text contract says how it "
            f"was shown text, got {chat_template!r}"
        )
    length = getattr(unwrap_model(export.model).config, "max_position_embeddings", None)
    encoder = DialogueEncoder(export.tokenizer, chat_template, max_length=length or 512)
    return replace(export, contract=encoder.contract)


def _load_model(
    path: Path,
    options: ModelOptions,
    network: NetworkName | None,
    delta_weights: bool = False,
) -> LanguageModel:
    config = read_config(path, options)
    stored_head = find_stored_head(path, config, pickled_weights=True)
    has_head = is_classifier(config) or stored_head is not None
    wants_scalar = has_head if network is None else network in SCALAR
    if wants_scalar and not has_head:
        raise ValueError(
            f"network: expected policy or model for {path}, a language model without a scalar "
            f"head, got {network!r}"
        )
    load = load_scalar_model if wants_scalar else load_causal_lm
    return load(path, options, pickled_weights=True, delta_weights=delta_weights)


def _generation(model: PreTrainedModel) -> dict[str, Any]:
    """What the folder's `generation_config.json` says."""
    config = model.generation_config
    settings: dict[str, Any] = {} if config is None else config.to_diff_dict()
    return {k: v for k, v in settings.items() if k != "transformers_version" and k[0] != "_"}
