"""The forward pass of policy, reference, critic and reward model.

`optimize_forward` decides once, after loading, how a network computes its forward: packed, with the
sequences back to back, or padded; logits for the scored tokens only, or for all. The functions that
return hidden states, log-probs, values and scores follow that decision. They raise ValueError, with
the argument's name, for wrong shapes and dtypes and for a model without the head that they need.
"""

from lit_rlhf.forward.activations import MatmulWidths as MatmulWidths
from lit_rlhf.forward.activations import activation_bytes as activation_bytes
from lit_rlhf.forward.activations import checkpoints_activations as checkpoints_activations
from lit_rlhf.forward.activations import logit_bytes as logit_bytes
from lit_rlhf.forward.activations import matmul_widths as matmul_widths
from lit_rlhf.forward.attention import AttentionInputs as AttentionInputs
from lit_rlhf.forward.attention import RowOffsets as RowOffsets
from lit_rlhf.forward.attention import cached_attention as cached_attention
from lit_rlhf.forward.attention import run_with_layout as run_with_layout
from lit_rlhf.forward.attention import varlen_attention as varlen_attention
from lit_rlhf.forward.attention import varlen_obstacle as varlen_obstacle
from lit_rlhf.forward.cpu import OneDNNLinear as OneDNNLinear
from lit_rlhf.forward.cpu import has_bfloat16 as has_bfloat16
from lit_rlhf.forward.cpu import matmul_dtype as matmul_dtype
from lit_rlhf.forward.cpu import resident_bytes as resident_bytes
from lit_rlhf.forward.lower import MAX_LOWER_BYTES as MAX_LOWER_BYTES
from lit_rlhf.forward.lower import LowerStates as LowerStates
from lit_rlhf.forward.lower import decoder_layers as decoder_layers
from lit_rlhf.forward.lower import freeze_lower_layers as freeze_lower_layers
from lit_rlhf.forward.lower import has_lower_layers_of as has_lower_layers_of
from lit_rlhf.forward.lower import share_lower_layers as share_lower_layers
from lit_rlhf.forward.networks import CALL as CALL
from lit_rlhf.forward.networks import PLAN_ATTRIBUTE as PLAN_ATTRIBUTE
from lit_rlhf.forward.networks import LanguageModel as LanguageModel
from lit_rlhf.forward.networks import ModuleT as ModuleT
from lit_rlhf.forward.networks import Offloaded as Offloaded
from lit_rlhf.forward.networks import call as call
from lit_rlhf.forward.networks import copy_parameter as copy_parameter
from lit_rlhf.forward.networks import count_heads as count_heads
from lit_rlhf.forward.networks import disable_dropout as disable_dropout
from lit_rlhf.forward.networks import eval_mode as eval_mode
from lit_rlhf.forward.networks import forward_plan as forward_plan
from lit_rlhf.forward.networks import freeze as freeze
from lit_rlhf.forward.networks import gathered as gathered
from lit_rlhf.forward.networks import head_labels as head_labels
from lit_rlhf.forward.networks import is_language_model as is_language_model
from lit_rlhf.forward.networks import is_sharded as is_sharded
from lit_rlhf.forward.networks import on_device as on_device
from lit_rlhf.forward.networks import replace_parameters as replace_parameters
from lit_rlhf.forward.networks import scalar_head_of as scalar_head_of
from lit_rlhf.forward.networks import stop_token_ids as stop_token_ids
from lit_rlhf.forward.networks import trunk_of as trunk_of
from lit_rlhf.forward.networks import unwrap_model as unwrap_model
from lit_rlhf.forward.optimize import head_matches_logits as head_matches_logits
from lit_rlhf.forward.optimize import optimize_forward as optimize_forward
from lit_rlhf.forward.outputs import hidden_states as hidden_states
from lit_rlhf.forward.outputs import logits_from_hidden as logits_from_hidden
from lit_rlhf.forward.outputs import logits_per_chunk as logits_per_chunk
from lit_rlhf.forward.outputs import map_target_logits as map_target_logits
from lit_rlhf.forward.outputs import response_logits as response_logits
from lit_rlhf.forward.outputs import response_values as response_values
from lit_rlhf.forward.outputs import scores_from_hidden as scores_from_hidden
from lit_rlhf.forward.outputs import sequence_scores as sequence_scores
from lit_rlhf.forward.outputs import target_logprobs as target_logprobs
from lit_rlhf.forward.outputs import target_logprobs_from_hidden as target_logprobs_from_hidden
from lit_rlhf.forward.outputs import token_logits as token_logits
from lit_rlhf.forward.outputs import token_values as token_values
from lit_rlhf.forward.packing import PackedLayout as PackedLayout
from lit_rlhf.forward.positions import longest_sequence as longest_sequence
from lit_rlhf.forward.positions import raise_too_long as raise_too_long
from lit_rlhf.forward.positions import set_longest_sequence as set_longest_sequence
from lit_rlhf.forward.vocabulary import count_tokens as count_tokens
from lit_rlhf.forward.vocabulary import find_ids_without_token as find_ids_without_token
from lit_rlhf.forward.vocabulary import ids_without_token as ids_without_token
from lit_rlhf.forward.vocabulary import rule_out_ids_without_token as rule_out_ids_without_token
