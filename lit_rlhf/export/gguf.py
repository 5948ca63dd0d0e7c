"""The model in a GGUF file, the format of llama.cpp, with its weights dequantized."""

import importlib.util
import struct
from pathlib import Path
from typing import Any, cast

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from lit_rlhf.export.folder import generation_config_settings
from lit_rlhf.export.model import ExportableModel, NetworkName
from lit_rlhf.models import DType, ModelOptions, pad_with_special_token

GGUF_SUFFIX = ".gguf"


def load_gguf_model(
    path: str | Path, network: NetworkName | None = None, dtype: DType | None = None
) -> ExportableModel:
    """Load the language model and the tokenizer in a GGUF file, by default in float32.

    Quantized weights become plain ones, with the error that quantization left in them.
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
    try:
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=options.torch_dtype)
        tokenizer = cast(
            PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(**source, padding_side="left")
        )
    # the reader has no own error: an unknown architecture is a ValueError, a truncated file
    # one of struct, a missing key a KeyError
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise ValueError(
            f"checkpoint: expected a GGUF file of an architecture that transformers reads, got "
            f"{path}: {error}"
        ) from error
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
