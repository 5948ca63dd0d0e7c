"""Hugging Face models in and out: loading, saving and building networks and their folders.

`load_causal_lm` and `load_scalar_model` return a policy or reference, and a critic or reward model,
ready to train as `ModelOptions` says. `save_model_folder` leaves a folder that they and plain
transformers load. Where a folder does not hold what is expected, they raise ValueError, which says
what it holds and what to do.
"""

from lit_rlhf.models.build import ADAPTER_CONFIG as ADAPTER_CONFIG
from lit_rlhf.models.build import build_for_saving as build_for_saving
from lit_rlhf.models.build import build_untrained_llama as build_untrained_llama
from lit_rlhf.models.build import find_base as find_base
from lit_rlhf.models.build import load_adapter_folder as load_adapter_folder
from lit_rlhf.models.card import ModelCardInfo as ModelCardInfo
from lit_rlhf.models.config import DTYPES as DTYPES
from lit_rlhf.models.config import DType as DType
from lit_rlhf.models.config import ModelOptions as ModelOptions
from lit_rlhf.models.config import check_embedding_size as check_embedding_size
from lit_rlhf.models.config import check_gguf_size as check_gguf_size
from lit_rlhf.models.config import check_model_path as check_model_path
from lit_rlhf.models.config import is_classifier as is_classifier
from lit_rlhf.models.config import max_positions as max_positions
from lit_rlhf.models.config import read_config as read_config
from lit_rlhf.models.heads import VALUE_HEAD as VALUE_HEAD
from lit_rlhf.models.heads import add_value_head as add_value_head
from lit_rlhf.models.heads import read_lm_head as read_lm_head
from lit_rlhf.models.interop import HeadFormat as HeadFormat
from lit_rlhf.models.interop import add_base_weights as add_base_weights
from lit_rlhf.models.interop import find_stored_head as find_stored_head
from lit_rlhf.models.loading import build_random_scalar_model as build_random_scalar_model
from lit_rlhf.models.loading import check_stored_names as check_stored_names
from lit_rlhf.models.loading import load_causal_lm as load_causal_lm
from lit_rlhf.models.loading import load_lm_head as load_lm_head
from lit_rlhf.models.loading import load_scalar_model as load_scalar_model
from lit_rlhf.models.loading import load_tokenizer as load_tokenizer
from lit_rlhf.models.loading import pad_with_special_token as pad_with_special_token
from lit_rlhf.models.loading import without_loading_report as without_loading_report
from lit_rlhf.models.prepare import ignore_peft_warning as ignore_peft_warning
from lit_rlhf.models.saving import check_replaceable as check_replaceable
from lit_rlhf.models.saving import merge_adapters as merge_adapters
from lit_rlhf.models.saving import merged_state_dict as merged_state_dict
from lit_rlhf.models.saving import replace_folder as replace_folder
from lit_rlhf.models.saving import save_adapter_folder as save_adapter_folder
from lit_rlhf.models.saving import save_model_folder as save_model_folder
from lit_rlhf.models.sharing import separate_weights as separate_weights
from lit_rlhf.models.tying import assign_weights as assign_weights
from lit_rlhf.models.tying import has_adapted_ties as has_adapted_ties
