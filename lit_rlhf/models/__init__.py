"""Hugging Face models in and out: loading, saving and building networks and their folders.

`load_causal_lm` and `load_scalar_model` return a policy or reference, and a critic or reward model,
ready to train as `ModelOptions` says. `save_model_folder` leaves a folder that they and plain
transformers load. Where a folder does not hold what is expected, they raise ValueError, which says
what it holds and what to do.
"""

from lit_rlhf.models.build import ADAPTER_CONFIG, build_model, load_adapter_folder
from lit_rlhf.models.card import ModelCardInfo
from lit_rlhf.models.config import (
    DTYPES,
    DType,
    ModelOptions,
    check_embedding_size,
    check_model_path,
    is_classifier,
    max_positions,
    read_config,
)
from lit_rlhf.models.heads import VALUE_HEAD, add_value_head, read_lm_head
from lit_rlhf.models.interop import HeadFormat, add_base_weights, find_stored_head
from lit_rlhf.models.loading import (
    build_random_scalar_model,
    load_causal_lm,
    load_lm_head,
    load_scalar_model,
    load_tokenizer,
    pad_with_special_token,
)
from lit_rlhf.models.saving import (
    check_replaceable,
    merge_adapters,
    replace_folder,
    save_adapter_folder,
    save_model_folder,
)
from lit_rlhf.models.sharing import separate_weights

__all__ = [
    "ADAPTER_CONFIG",
    "DTYPES",
    "VALUE_HEAD",
    "DType",
    "HeadFormat",
    "ModelCardInfo",
    "ModelOptions",
    "add_base_weights",
    "add_value_head",
    "build_model",
    "build_random_scalar_model",
    "check_embedding_size",
    "check_model_path",
    "check_replaceable",
    "find_stored_head",
    "is_classifier",
    "load_adapter_folder",
    "load_causal_lm",
    "load_lm_head",
    "load_scalar_model",
    "load_tokenizer",
    "max_positions",
    "merge_adapters",
    "pad_with_special_token",
    "read_config",
    "read_lm_head",
    "replace_folder",
    "save_adapter_folder",
    "save_model_folder",
    "separate_weights",
]
