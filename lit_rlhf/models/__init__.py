"""Policy, reference, critic and reward model on Hugging Face trunks: loading, forward, saving."""

from lit_rlhf.models.cards import ModelCardInfo
from lit_rlhf.models.forward import (
    hidden_states,
    position_ids_from_mask,
    response_logits,
    response_values,
    scores_from_hidden,
    sequence_scores,
    token_logits,
    token_values,
)
from lit_rlhf.models.generation import using_generation_config
from lit_rlhf.models.heads import head_logits, saved_lm_head, scalar_model_from
from lit_rlhf.models.loading import (
    causal_lm_positions,
    lm_head_of,
    load_causal_lm,
    load_scalar_model,
    load_tokenizer,
    random_scalar_model,
)
from lit_rlhf.models.networks import (
    LanguageModel,
    disable_dropout,
    evaluating,
    frozen,
    unwrapped,
)
from lit_rlhf.models.offload import Offloaded, on_device
from lit_rlhf.models.options import ModelOptions
from lit_rlhf.models.packing import packs
from lit_rlhf.models.saving import save_model_folder
from lit_rlhf.models.targets import reads_apart, state_readings, target_readings

__all__ = [
    "LanguageModel",
    "ModelCardInfo",
    "ModelOptions",
    "Offloaded",
    "causal_lm_positions",
    "disable_dropout",
    "evaluating",
    "frozen",
    "head_logits",
    "hidden_states",
    "lm_head_of",
    "load_causal_lm",
    "load_scalar_model",
    "load_tokenizer",
    "on_device",
    "packs",
    "position_ids_from_mask",
    "random_scalar_model",
    "reads_apart",
    "response_logits",
    "response_values",
    "save_model_folder",
    "saved_lm_head",
    "scalar_model_from",
    "scores_from_hidden",
    "sequence_scores",
    "state_readings",
    "target_readings",
    "token_logits",
    "token_values",
    "unwrapped",
    "using_generation_config",
]
