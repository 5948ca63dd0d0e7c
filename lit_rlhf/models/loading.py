"""Loading policy, critic, reward model and tokenizer from a Hugging Face folder or hub id.

Weights come from safetensors files, unless the caller allows others. Models come back in training
mode, with the fastest forward that `optimize_forward` finds; see `freeze` and `disable_dropout` for
the modes that PPO needs.
"""

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from peft import TaskType
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from lit_rlhf.files import check_weights
from lit_rlhf.forward import LanguageModel, count_heads, optimize_forward
from lit_rlhf.models.config import (
    WRONG_VALUES,
    ModelOptions,
    check_causal,
    check_model_folder,
    check_model_path,
    is_classifier,
    read_config,
)
from lit_rlhf.models.four_bit import loading_arguments, prepare_4bit_layers
from lit_rlhf.models.heads import (
    average_heads,
    build_scalar_model,
    copy_lm_head,
    init_scalar_head,
    linear_layer,
    set_scalar_padding,
)
from lit_rlhf.models.interop import check_not_delta_weights, find_stored_head
from lit_rlhf.models.prepare import prepare_model, private_rng
from lit_rlhf.models.sharing import copy_sharing_weights
from lit_rlhf.sandbox import check_tokenizer_file

_LOADING_ERRORS = (SafetensorError, ArithmeticError, NotImplementedError, ValueError)


def load_causal_lm(
    path: str | Path,
    options: ModelOptions = ModelOptions(),
    *,
    pickled_weights: bool = False,
    delta_weights: bool = False,
) -> LanguageModel:
    """Load a causal language model, for instance policy, reference or SFT model.

    With a positive `options.lora_rank` the model is inside LoRA adapters, and is its own reference
    inside `with model.disable_adapter()`. `path` is a folder or hub id.

    With `pickled_weights` it takes `pytorch_model.bin`, read as plain data so that no code in it is
    run, if there is no safetensors file. With `delta_weights` it accepts differences from another
    model's weights, see `add_base_weights`.
    """
    model = _load_plain_causal_lm(path, options, pickled_weights, delta_weights)
    return prepare_model(model, options, TaskType.CAUSAL_LM, seed=0)


def load_scalar_model(
    path: str | Path,
    options: ModelOptions = ModelOptions(),
    head_seed: int = 0,
    *,
    heads: int | None = 1,
    base: LanguageModel | None = None,
    pickled_weights: bool = False,
    delta_weights: bool = False,
) -> LanguageModel:
    """Load a trunk with a scalar head, for instance critic or reward model.

    From the folder of a scalar model, trunk and head are loaded: an
    `AutoModelForSequenceClassification` with one label, or a model under the names of another
    project. From the folder of a causal language model the trunk is loaded, and the head is new.
    Inside LoRA adapters (`options.lora_rank`) the head is trained in full. `head_seed` is the seed
    of a new head's weights, and of adapters.

    A new head has `heads` outputs, and those of an ensemble on one trunk become their mean unless
    as many are asked for; `None` takes as many as there are.

    `base` is a network with frozen weights that was loaded from `path` with the same options: the
    model has these very weights below its adapters, instead of copies. The last two arguments are
    as for `load_causal_lm`.
    """
    head: nn.Linear | None = None
    if base is not None:
        model = copy_sharing_weights(base)
    else:
        model, head = _load_trunk_and_head(path, options, pickled_weights, delta_weights)
    if head is not None or model.can_generate():
        model = build_scalar_model(model, head_seed, head, heads=1 if head else heads or 1)
        _set_padding_of_tokenizer(model.config, path, options)
    if heads == 1 < count_heads(model.config):
        average_heads(model)
    elif heads not in (None, found := count_heads(model.config)):
        raise ValueError(
            f"heads: expected {' or '.join(map(str, sorted({1, found})))} for the reward model "
            f"{path}, got {heads}; several start from a language model"
        )
    return prepare_model(model, options, TaskType.SEQ_CLS, seed=head_seed)


def build_random_scalar_model(
    path: str | Path, options: ModelOptions = ModelOptions(), seed: int = 0
) -> LanguageModel:
    """Build a scalar model with random weights; only config and tokenizer at `path` are read."""
    config = read_config(path, options)
    config.num_labels = 1
    with private_rng(seed):
        model = AutoModelForSequenceClassification.from_config(  # type: ignore[no-untyped-call]
            config,
            dtype=options.torch_dtype,
            attn_implementation=options.attn_implementation,
            trust_remote_code=options.trust_remote_code,
        )
    model.score = init_scalar_head(model.score.in_features, seed).to(model.dtype)
    _set_padding_of_tokenizer(model.config, path, options)
    return prepare_model(model, options, TaskType.SEQ_CLS, seed)


def load_lm_head(path: str | Path, options: ModelOptions = ModelOptions()) -> nn.Linear:
    """Load the output layer of a causal language model, for the language-model loss of Eq. 2.

    It has its own weights even where the model ties them to its embedding. It is used with
    `logits_from_hidden`, and frozen if the options ask for LoRA.
    """
    causal_lm = _load_plain_causal_lm(path, options)
    head = copy_lm_head(causal_lm).requires_grad_(options.lora_rank == 0)
    return optimize_forward(head)


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, with padding on the left and a padding token.

    A tokenizer without a padding token gets a special token of its vocabulary: one whose name has
    "pad" in it, else the unknown token, else EOS. The vocabulary never grows, so no embedding has
    to be resized.
    """
    check_model_path(path)
    check_tokenizer_file(str(path))
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=trust_remote_code, padding_side="left"
        )
    except Exception as error:  # tokenizers has no class for its own
        if trust_remote_code and not isinstance(error, OSError | ValueError):  # of that code
            raise
        if Path(path).is_dir():
            check_model_folder(Path(path))
        raise ValueError(f"path: expected a tokenizer at {path}, got none: {error}") from error
    if tokenizer.eos_token is None:
        raise ValueError(f"path: expected a tokenizer with an EOS token, got none at {path}")
    pad_with_special_token(tokenizer)
    return tokenizer


def pad_with_special_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a tokenizer without a padding token one of its special tokens, see `load_tokenizer`."""
    if tokenizer.pad_token is None:
        special = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
        pads = [token for token in special if "pad" in token.lower()]
        tokenizer.pad_token = (pads or [tokenizer.unk_token or tokenizer.eos_token])[0]


def _load_plain_causal_lm(
    path: str | Path,
    options: ModelOptions,
    pickled_weights: bool = False,
    delta_weights: bool = False,
) -> PreTrainedModel:
    """A causal language model as transformers loads it, not prepared yet."""
    check_causal(read_config(path, options), path)
    return _load_pretrained(AutoModelForCausalLM, path, options, pickled_weights, delta_weights)


def _load_trunk_and_head(
    path: str | Path, options: ModelOptions, pickled_weights: bool, delta_weights: bool
) -> tuple[PreTrainedModel, nn.Linear | None]:
    """A causal language model or scalar model, and the head that it still has to get, if any."""
    config = read_config(path, options)
    # a model with custom code knows the name of its head
    own_code = options.trust_remote_code and hasattr(config, "auto_map")
    stored = None if own_code else find_stored_head(path, config, pickled_weights)
    arguments = (path, options, pickled_weights, delta_weights)
    if stored is None and not is_classifier(config):
        return _load_plain_causal_lm(*arguments), None
    auto = AutoModelForSequenceClassification
    if stored is None or stored.is_plain(config):
        if not count_heads(config):
            raise ValueError(
                f"path: expected a model with 1 label, or heads of RewardModule, "
                f"got {config.num_labels} labels in {path}"
            )
        model = _load_pretrained(auto, *arguments)
        if not isinstance(getattr(model, "score", None), nn.Linear):
            raise ValueError(
                f"path: expected a decoder whose scalar head is a layer `score`, got "
                f"{type(model).__name__} in {path}; such a model can be called from a reward "
                "function, rewards: {'my_package.rules:its_score': 1.0}"
            )
        return model, None
    # OpenRLHF leaves num_labels out of the config, and its default is 2
    config.num_labels = 1
    verbosity = logging.get_verbosity()
    # transformers would report a language model's head and a bias as unexpected weights; missing
    # ones are errors in `_load_pretrained`
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        model = _load_pretrained(auto, *arguments, config=config, key_mapping=stored.key_mapping)
    finally:
        logging.set_verbosity(verbosity)
    # A new model around the trunk: transformers saves this one under the names it was loaded by.
    return model, linear_layer(stored.weight, stored.bias)


def _load_pretrained(
    auto_class: type[AutoModelForCausalLM] | type[AutoModelForSequenceClassification],
    path: str | Path,
    options: ModelOptions,
    pickled_weights: bool,
    delta_weights: bool,
    **arguments: Any,
) -> PreTrainedModel:
    if Path(path).is_dir():
        check_weights(Path(path))
    # transformers initializes missing weights at random, which are errors below
    with private_rng(0):
        try:
            loaded: Any = auto_class.from_pretrained(
                str(path),
                dtype=options.torch_dtype,
                attn_implementation=options.attn_implementation,
                trust_remote_code=options.trust_remote_code,
                use_safetensors=None if pickled_weights else True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # which are errors below, too
                **loading_arguments(options),
                **arguments,
            )
        except OSError as error:
            has_pickled = any(Path(path).glob("pytorch_model*.bin"))
            hint = "; `lit_rlhf export` makes them of pytorch_model.bin" if has_pickled else ""
            if locked := [file for file in Path(path).glob("*") if not os.access(file, os.R_OK)]:
                # safetensors says that there is no such file
                raise ValueError(
                    f"path: {locked[0]} cannot be read by this account: change its owner or mode"
                ) from error
            raise ValueError(
                f"path: expected a model with safetensors weights at {path}: {error}{hint}"
            ) from error
        # the last from weights of other sizes that the model ties
        except (*_LOADING_ERRORS, *WRONG_VALUES) as error:
            raise ValueError(
                f"path: expected whole weights and a valid configuration at {path}, got "
                f"{type(error).__name__}: {error}"
            ) from error
    model: PreTrainedModel = loaded[0]
    prepare_4bit_layers(model)
    for name, stored, configured in loaded[1]["mismatched_keys"]:
        raise ValueError(
            f"path: expected weights of the sizes in the configuration at {path}, got {name} of "
            f"{list(stored)}, not {list(configured)}"
        )
    _check_complete_and_finite(model, path, sorted(loaded[1]["missing_keys"]))
    if not delta_weights:
        check_not_delta_weights(model, path)
    return model


@torch.no_grad()
def _check_complete_and_finite(
    model: PreTrainedModel, path: str | Path, missing: Sequence[str]
) -> None:
    """Refuse weights that are missing or not finite."""
    # the smallest and the largest number are NaN if any number is
    bad = [
        name
        for name, weight in model.named_parameters()
        if weight.is_floating_point() and not all(map(math.isfinite, weight.aminmax()))
    ]
    for names, expected, got in ((missing, "all", "no"), (bad, "finite", "NaN or infinity in")):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ValueError(
                f"path: expected {expected} weights of {type(model).__name__} in {path}, got {got} "
                f"{', '.join(names[:5])}{more}"
            )


def _set_padding_of_tokenizer(
    config: PreTrainedConfig, path: str | Path, options: ModelOptions
) -> None:
    """Set the padding of a new scalar model from the tokenizer at `path`, if there is one."""
    with suppress(ValueError):
        set_scalar_padding(config, load_tokenizer(path, options.trust_remote_code))
