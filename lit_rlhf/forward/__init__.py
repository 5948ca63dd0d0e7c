"""The forward passes of policy, reference, critic and reward model."""

from lit_rlhf.forward.chunked_logits import (
    head_logits,
    map_state_logits,
    map_target_logits,
    supports_chunked_logits,
)
from lit_rlhf.forward.networks import (
    LanguageModel,
    disable_dropout,
    eval_mode,
    freeze,
    unwrap_model,
)
from lit_rlhf.forward.offload import Offloaded, on_device
from lit_rlhf.forward.outputs import (
    hidden_states,
    position_ids_from_mask,
    response_logits,
    response_values,
    scores_from_hidden,
    sequence_scores,
    token_logits,
    token_values,
)
from lit_rlhf.forward.packing import supports_packing

__all__ = [
    "LanguageModel",
    "Offloaded",
    "disable_dropout",
    "eval_mode",
    "freeze",
    "head_logits",
    "hidden_states",
    "map_state_logits",
    "map_target_logits",
    "on_device",
    "position_ids_from_mask",
    "response_logits",
    "response_values",
    "scores_from_hidden",
    "sequence_scores",
    "supports_chunked_logits",
    "supports_packing",
    "token_logits",
    "token_values",
    "unwrap_model",
]
