"""A model folder, of a stage or of anyone, as what a finished stage would leave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from peft import PeftConfig
from transformers import PreTrainedModel

from lit_rlhf.data import DialogueEncoder, TextContract
from lit_rlhf.export.checkpoint import Export, NetworkName
from lit_rlhf.forward import LanguageModel, unwrap_model
from lit_rlhf.models import ModelOptions, load_causal_lm, load_scalar_model, load_tokenizer
from lit_rlhf.models.assembly import ADAPTER_CONFIG, adapted_model
from lit_rlhf.models.configs import is_classifier, read_config
from lit_rlhf.models.differences import add_base
from lit_rlhf.models.exchange import stored_head
from lit_rlhf.models.heads import read_lm_head
from lit_rlhf.models.options import DTYPES

SCALAR = ("reward", "critic")


def export_folder(
    path: str | Path,
    network: NetworkName | None = None,
    dtype: str | None = None,
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
    options = ModelOptions(pickled_weights=True, trust_remote_code=trust_remote_code)
    adapters = (path / ADAPTER_CONFIG).is_file()
    below = str(path)
    if adapters:
        below = base or str(PeftConfig.from_pretrained(str(path)).base_model_name_or_path)
    stored = str(read_config(below, options).dtype).removeprefix("torch.")
    target = dtype or (stored if stored in DTYPES else "float32")
    if adapters:
        model: LanguageModel = adapted_model(path, options, base)
    elif base is not None:
        model = _recovered(path, options, network, base)
    else:
        model = _model(path, replace(options, dtype=target), network)
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


def _model(path: Path, options: ModelOptions, network: NetworkName | None) -> LanguageModel:
    config = read_config(path, options)
    has_head = is_classifier(config) or stored_head(path, config, pickled=True) is not None
    if network is None:
        return (load_scalar_model if has_head else load_causal_lm)(path, options)
    if network not in SCALAR:
        return load_causal_lm(path, options)
    if not has_head:
        raise ValueError(
            f"network: expected policy or model for {path}, a language model without a scalar "
            f"head, got {network!r}"
        )
    return load_scalar_model(path, options)


def _recovered(
    path: Path, options: ModelOptions, network: NetworkName | None, base: str
) -> LanguageModel:
    """A model of published differences; sums are in float32."""
    model = _model(path, replace(options, differences=True), network)
    add_base(unwrap_model(model), unwrap_model(load_causal_lm(base, options)))
    return model


def _generation(model: PreTrainedModel) -> dict[str, Any]:
    """What the folder's `generation_config.json` says."""
    config = model.generation_config
    settings: dict[str, Any] = {} if config is None else config.to_diff_dict()
    return {k: v for k, v in settings.items() if k != "transformers_version" and k[0] != "_"}
