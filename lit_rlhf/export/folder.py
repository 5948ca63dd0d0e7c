"""Reads the model in a folder or GGUF file, of this or another program, for an export."""

import importlib.util
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lit_rlhf.data import TextContract
from lit_rlhf.export.model import ExportableModel, NetworkName
from lit_rlhf.files import read_manifest, read_text
from lit_rlhf.forward import LanguageModel, count_heads, unwrap_model
from lit_rlhf.models import (
    ADAPTER_CONFIG,
    DTYPES,
    DType,
    ModelOptions,
    add_base_weights,
    check_gguf_size,
    check_model_path,
    check_stored_names,
    find_base,
    find_stored_head,
    is_classifier,
    load_adapter_folder,
    load_causal_lm,
    load_scalar_model,
    load_tokenizer,
    pad_with_special_token,
    read_config,
    read_lm_head,
    without_loading_report,
)
from lit_rlhf.paths import WRONG_VALUES

SCALAR_NETWORKS = ("reward", "critic")
COPIED_ENTRIES = ("made", "versions")
"""What an exported model's manifest takes over from the folder's."""
GGUF_SUFFIX = ".gguf"


def load_folder_model(
    path: str | Path,
    network: NetworkName | None = None,
    *,
    dtype: DType | None = None,
    base: str | None = None,
    trust_remote_code: bool = False,
) -> ExportableModel:
    """Load the model in a folder of weights (safetensors, or pickled plain data) or LoRA adapters.

    Args:
        path: The folder.
        network: `reward` or `critic` for a scalar model, `policy` or `model` for a language model;
            `None` for a scalar model if there is a scalar head.
        dtype: Type to save the weights in; `None` for the type in the model's config.
        base: Folder or hub id of the model that delta weights are to be added to, or that adapters
            belong to; `None` for the one that the adapters name.
        trust_remote_code: Run code that comes with a model.
    """
    path = Path(path)
    check_model_path(path)
    options = ModelOptions(trust_remote_code=trust_remote_code)
    has_adapters = (path / ADAPTER_CONFIG).is_file()
    config_source = str(path)
    if has_adapters:
        config_source = base or find_base(path)
    target = dtype or _stored_dtype(config_source, options)
    # Adapters and delta weights are added in float32, the default of the options.
    if has_adapters:
        model: LanguageModel = _load_adapted(path, options, network, base=config_source)
    elif base is not None:
        model = _add_delta_weights(path, options, network, base=base)
    else:
        model = _load_weights(path, replace(options, dtype=target), network)
    inner = unwrap_model(model)
    scalar = not inner.can_generate()
    has_tokenizer = (path / "tokenizer_config.json").is_file()
    tokenizer = load_tokenizer(path if has_tokenizer else base or config_source, trust_remote_code)
    lm_head = read_lm_head(path) if scalar else None
    # the folder's card describes several heads, and not their mean
    averaged = scalar and not has_adapters and count_heads(read_config(path, options)) > 1
    card = path / "README.md"
    return ExportableModel(
        model=model,
        tokenizer=tokenizer,
        name=f"{'scalar' if scalar else 'language'} model in {path}",
        scalar=scalar,
        dtype=ModelOptions(dtype=target).torch_dtype,
        contract=TextContract.find(path),
        card=read_text(card) if card.is_file() and not averaged else None,
        manifest={
            name: value for name, value in read_manifest(path).items() if name in COPIED_ENTRIES
        },
        generation=None if scalar else generation_config_settings(inner),
        lm_head={} if lm_head is None else lm_head.state_dict(),
    )


def _stored_dtype(path: str, options: ModelOptions) -> DType:
    """The type in a model's config, or float32 for one that is not known here."""
    stored = str(read_config(path, options).dtype).removeprefix("torch.")
    return cast(DType, stored) if stored in DTYPES else "float32"


def _load_adapted(
    path: Path, options: ModelOptions, network: NetworkName | None, *, base: str
) -> LanguageModel:
    """Load a folder of adapters with the model below them."""
    model = load_adapter_folder(path, options, base, pickled_weights=True)
    scalar = not unwrap_model(model).can_generate()
    if network is not None and scalar != (network in SCALAR_NETWORKS):
        expected = "reward or critic" if scalar else "policy or model"
        raise ValueError(
            f"network: expected {expected} for the adapters in {path}, got {network!r}"
        )
    return model


def _add_delta_weights(
    path: Path, options: ModelOptions, network: NetworkName | None, *, base: str
) -> LanguageModel:
    """Load a folder of delta weights, and add the weights of the model that they differ from."""
    model = _load_weights(path, options, network, delta_weights=True)
    base_model = load_causal_lm(base, options, pickled_weights=True)
    add_base_weights(unwrap_model(model), unwrap_model(base_model))
    return model


def _load_weights(
    path: Path, options: ModelOptions, network: NetworkName | None, *, delta_weights: bool = False
) -> LanguageModel:
    """Load a folder of weights as a scalar model or as a language model."""
    config = read_config(path, options)
    stored_head = find_stored_head(path, config, pickled_weights=True)
    has_head = is_classifier(config) or stored_head is not None
    scalar = has_head if network is None else network in SCALAR_NETWORKS
    if scalar and not has_head:
        raise ValueError(
            f"network: expected policy or model for {path}, a language model without a scalar "
            f"head, got {network!r}"
        )
    load = load_scalar_model if scalar else load_causal_lm
    return load(path, options, pickled_weights=True, delta_weights=delta_weights)


def generation_config_settings(model: PreTrainedModel) -> dict[str, Any]:
    """Settings of a model's `generation_config.json` that are not defaults, without EOS tokens."""
    config = model.generation_config
    settings: dict[str, Any] = {} if config is None else config.to_diff_dict()
    left_out = ("transformers_version", "eos_token_id")
    return {
        name: value
        for name, value in settings.items()
        if name not in left_out and not name.startswith("_")
    }


@contextmanager
def _named_gguf_errors(path: Path) -> Iterator[None]:
    """Name the file in the errors of reading it."""
    try:
        yield
    # the reader has no own error: an unknown architecture is a ValueError, a truncated file
    # one of struct or an index, a missing key a KeyError
    except (
        OSError,
        ValueError,
        LookupError,
        ArithmeticError,
        struct.error,
        *WRONG_VALUES,
    ) as error:
        raise ValueError(
            f"checkpoint: expected a GGUF file of an architecture that transformers reads, got "
            f"{path}: {error}"
        ) from error


def _list_lost_layers(path: Path, config: PreTrainedConfig) -> list[str]:
    """Names of a GGUF file's tensors in layers that its network lacks: transformers skips them.

    Args:
        path: The file.
        config: The network that the file describes.
    """
    from gguf import GGUFReader  # an extra

    n_layers: int = config.get_text_config().num_hidden_layers
    names = [tensor.name for tensor in GGUFReader(path).tensors]
    layers = {name: re.match(r"blk\.(\d+)\.", name) for name in names}
    return [name for name, layer in layers.items() if layer and int(layer[1]) >= n_layers]


def load_gguf_model(
    path: str | Path, network: NetworkName | None = None, dtype: DType | None = None
) -> ExportableModel:
    """Load the language model and the tokenizer in a GGUF file.

    Quantized weights become plain ones, with the error that quantization left in them.

    Args:
        path: The file.
        network: `policy`, `model` or `None`: the file holds a language model.
        dtype: Type to save the weights in; `None` for float32.
    """
    path = Path(path)
    if network not in (None, "policy", "model"):
        raise ValueError(
            f"network: expected policy or model for {path}, which holds a language model, got "
            f"{network!r}"
        )
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(
            f"checkpoint: expected the package gguf to be installed (pip install gguf) "
            f"to read {path}"
        )
    options = ModelOptions(dtype=dtype or "float32")
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(path.parent),
        "gguf_file": path.name,
    }
    with _named_gguf_errors(path):
        config = AutoConfig.from_pretrained(**source)
    check_gguf_size(path, config)  # before weights are allocated
    with _named_gguf_errors(path), without_loading_report():
        lost_layers = _list_lost_layers(path, config)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **source, dtype=options.torch_dtype, output_loading_info=True
        )
        tokenizer = cast(
            PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(**source, padding_side="left")
        )
    model: PreTrainedModel = loaded[0]
    # transformers initializes missing weights at random
    check_stored_names(model, path, missing=loaded[1]["missing_keys"], unused=lost_layers)
    # The weights are plain now, and the saved folder must not name the file. It holds no more than
    # the settings that the model itself needs.
    del model.config.quantization_config
    model.config.name_or_path = ""
    pad_with_special_token(tokenizer)
    return ExportableModel(
        model=model,
        tokenizer=tokenizer,
        name=f"language model in {path}",
        scalar=False,
        dtype=options.torch_dtype,
        generation=generation_config_settings(model),
    )
