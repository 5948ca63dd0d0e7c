"""The forward pass of policy, reference, critic and reward model.

`optimize_forward` decides once, after loading, how a network computes its forward: packed, with the
sequences back to back, or padded; logits for the scored tokens only, or for all. The functions that
return hidden states, log-probs, values and scores follow that decision. They raise ValueError, with
the argument's name, for wrong shapes and dtypes and for a model without the head that they need.
"""

from lit_rlhf.forward.attention import (
    AttentionInputs,
    AttentionLayout,
    RowOffsets,
    cached_attention,
    layout_arguments,
    supports_varlen,
    varlen_attention,
    varlen_obstacle,
)
from lit_rlhf.forward.cpu import has_bfloat16, resident_bytes
from lit_rlhf.forward.lower import (
    KEPT_BYTES,
    LowerStates,
    decoder_layers,
    freeze_lower_layers,
    has_lower_layers_of,
    share_lower_layers,
)
from lit_rlhf.forward.networks import (
    PLAN_ATTRIBUTE,
    ForwardPlan,
    LanguageModel,
    ModuleT,
    Offloaded,
    disable_dropout,
    eval_mode,
    forward_plan,
    freeze,
    on_device,
    scalar_head_of,
    stop_token_ids,
    trunk_of,
    unwrap_model,
)
from lit_rlhf.forward.optimize import head_matches_logits, optimize_forward
from lit_rlhf.forward.outputs import (
    CHUNK_SIZE,
    LogitsFunction,
    hidden_states,
    logits_from_hidden,
    map_target_logits,
    response_logits,
    response_values,
    scores_from_hidden,
    sequence_scores,
    target_logprobs,
    target_logprobs_from_hidden,
    token_logits,
    token_values,
)
from lit_rlhf.forward.packing import PackedLayout

__all__ = [
    "CHUNK_SIZE",
    "KEPT_BYTES",
    "PLAN_ATTRIBUTE",
    "AttentionInputs",
    "AttentionLayout",
    "ForwardPlan",
    "LanguageModel",
    "LogitsFunction",
    "LowerStates",
    "ModuleT",
    "Offloaded",
    "PackedLayout",
    "RowOffsets",
    "cached_attention",
    "decoder_layers",
    "disable_dropout",
    "eval_mode",
    "forward_plan",
    "freeze",
    "freeze_lower_layers",
    "has_bfloat16",
    "has_lower_layers_of",
    "head_matches_logits",
    "hidden_states",
    "layout_arguments",
    "logits_from_hidden",
    "map_target_logits",
    "on_device",
    "optimize_forward",
    "resident_bytes",
    "response_logits",
    "response_values",
    "scalar_head_of",
    "scores_from_hidden",
    "sequence_scores",
    "share_lower_layers",
    "stop_token_ids",
    "supports_varlen",
    "target_logprobs",
    "target_logprobs_from_hidden",
    "token_logits",
    "token_values",
    "trunk_of",
    "unwrap_model",
    "varlen_attention",
    "varlen_obstacle",
]
