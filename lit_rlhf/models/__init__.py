"""Loading and saving policies, critics and reward models as Hugging Face folders."""

from lit_rlhf.models.assembly import ADAPTER_CONFIG, plain_model
from lit_rlhf.models.cards import ModelCardInfo
from lit_rlhf.models.configs import is_classifier
from lit_rlhf.models.exchange import HeadFormat
from lit_rlhf.models.generation import using_generation_config
from lit_rlhf.models.heads import build_scalar_model, read_lm_head
from lit_rlhf.models.loading import (
    load_causal_lm,
    load_lm_head,
    load_scalar_model,
    load_tokenizer,
    max_positions,
    random_scalar_model,
)
from lit_rlhf.models.options import ModelOptions
from lit_rlhf.models.saving import save_adapter_folder, save_model_folder

__all__ = [
    "ADAPTER_CONFIG",
    "HeadFormat",
    "ModelCardInfo",
    "ModelOptions",
    "build_scalar_model",
    "is_classifier",
    "load_causal_lm",
    "load_lm_head",
    "load_scalar_model",
    "load_tokenizer",
    "max_positions",
    "plain_model",
    "random_scalar_model",
    "read_lm_head",
    "save_adapter_folder",
    "save_model_folder",
    "using_generation_config",
]
