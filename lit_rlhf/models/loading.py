"""Loading policy, critic, reward model and tokenizer from a Hugging Face folder or hub id.

Weights come from safetensors files, unless the caller allows others. Models come back in training
mode, with the fastest forward that `optimize_forward` finds; see `freeze` and `disable_dropout` for
the modes that PPO needs.
"""

import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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

from lit_rlhf.files import check_model_files
from lit_rlhf.forward import LanguageModel, count_heads, optimize_forward
from lit_rlhf.models.config import (
    WRONG_VALUES,
    ModelOptions,
    check_causal,
    check_hub,
    check_model_folder,
    check_model_path,
    check_text_files,
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
from lit_rlhf.models.interop import (
    HEAD_NAMES,
    check_not_delta_weights,
    check_pickled_weights,
    check_weights_are_real,
    check_weights_are_there_once,
    find_stored_head,
)
from lit_rlhf.models.prepare import prepare_model, private_rng
from lit_rlhf.models.sharing import copy_sharing_weights
from lit_rlhf.models.tying import note_untied_embeddings
from lit_rlhf.sandbox import check_tokenizer_file

_LOADING_ERRORS = (SafetensorError, ArithmeticError, NotImplementedError, ValueError)

_SCALAR_HEADS = tuple(f"{name}." for name in HEAD_NAMES)
"""What the weights of scalar heads begin with. A language model ignores them, and a scalar model
gets them from `find_stored_head`."""
_OUTPUT_LAYERS = ("lm_head.", "embed_out.")
"""What the weights of output layers begin with, which scalar models ignore."""
_OF_NO_USE = re.compile(r"(^|\.)((attn|attention)\.(masked_)?bias$|mtp[._]|\w+\.inv_freq$)")
"""Causal masks and rotary frequencies, which older releases stored, and heads for tokens further
ahead. transformers knows them of some architectures only."""


def load_causal_lm(
    path: str | Path,
    options: ModelOptions = ModelOptions(),
    *,
    role: str = "",
    pickled_weights: bool = False,
    delta_weights: bool = False,
) -> LanguageModel:
    """Load a causal language model, for instance policy, reference or SFT model.

    With a positive `options.lora_rank` the model is inside LoRA adapters, and is its own reference
    inside `with model.disable_adapter()`.

    Args:
        path: Folder or hub id of the model.
        options: How the network is loaded and run.
        role: What it is for, such as `policy`, see `optimize_forward`.
        pickled_weights: Take `pytorch_model.bin` if there is no safetensors file. It is read as
            plain data, so that no code in it is run.
        delta_weights: Accept differences from another model's weights, see `add_base_weights`.
    """
    model = _load_plain_causal_lm(
        path, options, pickled_weights=pickled_weights, delta_weights=delta_weights
    )
    return prepare_model(model, options, TaskType.CAUSAL_LM, seed=0, role=role)


def load_scalar_model(
    path: str | Path,
    options: ModelOptions = ModelOptions(),
    *,
    role: str = "",
    head_seed: int | None = None,
    heads: int | None = 1,
    base: LanguageModel | None = None,
    pickled_weights: bool = False,
    delta_weights: bool = False,
) -> LanguageModel:
    """Load a trunk with a scalar head, for instance critic or reward model.

    From the folder of a scalar model, trunk and head are loaded: an
    `AutoModelForSequenceClassification` with one label or the heads of `RewardModule`, or a model
    under the names of another project. A language model has no such head. It is refused unless
    `head_seed` asks for a new one, which is to be trained. Inside LoRA adapters
    (`options.lora_rank`) the head is trained in full.

    Args:
        path: Folder or hub id of the model.
        options: How the network is loaded and run.
        role: As for `load_causal_lm`.
        head_seed: Seed of the weights of a new head for a language model, and of adapters. `None`
            refuses a language model: its scores would mean nothing.
        heads: Number of outputs of a new head. A stored ensemble of heads on one trunk becomes its
            mean unless as many are asked for; `None` takes as many as there are.
        base: A network with frozen weights that was loaded from `path` with the same options. The
            model has these very weights below its adapters, instead of copies from the folder.
        pickled_weights: As for `load_causal_lm`.
        delta_weights: As for `load_causal_lm`.
    """
    if base is not None:
        stored = _StoredModel(copy_sharing_weights(base), head=None)
    else:
        stored = _load_trunk_and_head(
            path,
            options,
            pickled_weights=pickled_weights,
            delta_weights=delta_weights,
        )
    model = stored.model
    if stored.head is not None:
        model = build_scalar_model(model, head=stored.head)
        _set_padding_of_tokenizer(model.config, path, options)
    elif model.can_generate():
        if head_seed is None:
            raise ValueError(
                f"path: expected a reward model, got the language model in {path}, whose scores "
                "would come from a new, random head; train a reward model from it first, or start "
                "a critic from it with critic_init: policy"
            )
        model = build_scalar_model(model, head_seed=head_seed, heads=heads or 1)
        _set_padding_of_tokenizer(model.config, path, options)
    n_heads = count_heads(model.config)
    if heads == 1 and n_heads > 1:
        average_heads(model)
    elif heads not in (None, n_heads):
        expected = " or ".join(str(number) for number in sorted({1, n_heads}))
        raise ValueError(
            f"heads: expected {expected} for the reward model {path}, got {heads}; several start "
            "from a language model"
        )
    return prepare_model(model, options, TaskType.SEQ_CLS, seed=head_seed or 0, role=role)


def build_random_scalar_model(
    path: str | Path, options: ModelOptions = ModelOptions(), seed: int = 0, *, role: str = ""
) -> LanguageModel:
    """Build a scalar model with random weights, for instance a critic that starts from nothing.

    Args:
        path: Folder or hub id of the model whose shape it gets. Only its config and tokenizer are
            read.
        options: How the network is run.
        seed: Seed of all weights, adapters included.
        role: As for `load_causal_lm`.
    """
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
    return prepare_model(model, options, TaskType.SEQ_CLS, seed=seed, role=role)


def load_lm_head(path: str | Path, options: ModelOptions = ModelOptions()) -> nn.Linear:
    """Load the output layer of a causal language model, for the language-model loss of Eq. 2.

    It has its own weights even where the model ties them to its embedding. It is used with
    `logits_from_hidden`, and frozen if the options ask for LoRA.
    """
    causal_lm = _load_plain_causal_lm(path, options)
    head = copy_lm_head(causal_lm).requires_grad_(options.lora_rank == 0)
    return optimize_forward(head)


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the model at `path`, with padding on the left and a padding token.

    A tokenizer without a padding token gets a special token of its vocabulary: one whose name has
    "pad" in it, else the unknown token, else EOS. The vocabulary never grows, so no embedding has
    to be resized.
    """
    check_model_path(path)
    if not Path(path).is_dir():
        check_hub(str(path))
    check_tokenizer_file(str(path))
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=trust_remote_code, padding_side="left"
        )
        tokenizer("a")  # some settings are used only here
    except Exception as error:  # tokenizers has no class for its own
        if trust_remote_code and not isinstance(
            error, OSError | ValueError
        ):  # an error in the model's own code
            raise
        if Path(path).is_dir():
            check_model_folder(Path(path))
            check_text_files(Path(path))
        kind = type(error).__name__  # the text of a KeyError is the key alone
        raise ValueError(
            f"path: expected a tokenizer at {path}, got none: {kind}: {error}"
        ) from error
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
    *,
    pickled_weights: bool = False,
    delta_weights: bool = False,
) -> PreTrainedModel:
    """A causal language model as transformers loads it, not prepared yet."""
    check_causal(read_config(path, options), path)
    return _load_pretrained(
        AutoModelForCausalLM,
        path,
        options,
        pickled_weights=pickled_weights,
        delta_weights=delta_weights,
    )


class _StoredModel(NamedTuple):
    """Content of a folder: a language model, a scalar model, or a trunk and its scalar head.

    Attributes:
        model: The network, not prepared yet.
        head: The trained scalar head that the network still has to get; `None` if the network has
            it already, or if there is none.
    """

    model: PreTrainedModel
    head: nn.Linear | None


def _load_trunk_and_head(
    path: str | Path,
    options: ModelOptions,
    *,
    pickled_weights: bool,
    delta_weights: bool,
) -> _StoredModel:
    """Load a scalar model under any project's names, or a language model."""
    config = read_config(path, options)
    # a model with custom code knows the name of its head
    own_code = options.trust_remote_code and hasattr(config, "auto_map")
    stored_head = None if own_code else find_stored_head(path, config, pickled_weights)
    if stored_head is None and not is_classifier(config):
        causal_lm = _load_plain_causal_lm(
            path, options, pickled_weights=pickled_weights, delta_weights=delta_weights
        )
        return _StoredModel(causal_lm, head=None)
    load_classifier = partial(
        _load_pretrained,
        AutoModelForSequenceClassification,
        path,
        options,
        pickled_weights=pickled_weights,
        delta_weights=delta_weights,
    )
    if stored_head is None or stored_head.is_plain(config):
        if not count_heads(config):
            raise ValueError(
                f"path: expected a model with 1 label, or heads of RewardModule, "
                f"got {config.num_labels} labels in {path}"
            )
        model = load_classifier()
        if not isinstance(getattr(model, "score", None), nn.Linear):
            raise ValueError(
                f"path: expected a decoder whose scalar head is a layer `score`, got "
                f"{type(model).__name__} in {path}; such a model can be called from a reward "
                "function, rewards: {'my_package.rules:its_score': 1.0}"
            )
        return _StoredModel(model, head=None)
    # OpenRLHF leaves num_labels out of the config, and its default is 2
    config.num_labels = 1
    model = load_classifier(config=config, key_mapping=stored_head.key_mapping)
    # A new model around the trunk: transformers saves this one under the names it was loaded by.
    return _StoredModel(model, head=linear_layer(stored_head.weight, stored_head.bias))


def _load_pretrained(
    auto_class: type[AutoModelForCausalLM] | type[AutoModelForSequenceClassification],
    path: str | Path,
    options: ModelOptions,
    *,
    pickled_weights: bool,
    delta_weights: bool,
    **arguments: Any,
) -> PreTrainedModel:
    """Load a model with all its weights; `arguments` are more arguments of `from_pretrained`."""
    if Path(path).is_dir():
        check_model_files(Path(path))
        check_text_files(Path(path))
        check_weights_are_there_once(Path(path))
        check_weights_are_real(Path(path))
        if pickled_weights:
            check_pickled_weights(Path(path))
    # transformers initializes missing weights at random, which are errors below
    with private_rng(0), without_loading_report():
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
    check_stored_names(
        model,
        path,
        missing=loaded[1]["missing_keys"],
        unused=loaded[1]["unexpected_keys"],
    )
    _check_finite(model, path)
    note_untied_embeddings(model)
    if not delta_weights:
        check_not_delta_weights(model, path)
    return model


@contextmanager
def without_loading_report() -> Iterator[None]:
    """Hide transformers' warnings, such as its table of missing and unexpected weights.

    Whoever loads refuses them; the table says that they may be ignored.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def check_stored_names(
    model: PreTrainedModel, path: str | Path, *, missing: Iterable[str], unused: Iterable[str]
) -> None:
    """Refuse files that do not have just the weights of the network in their configuration.

    Args:
        model: The network.
        path: Folder, file or hub id that it was loaded from.
        missing: Names of its weights that the files do not have.
        unused: Names in the files that it has no weight for, apart from those that transformers
            lists as of no use in such a network.
    """
    network = type(model).__name__
    if missing := sorted(missing):
        raise ValueError(
            f"path: expected all weights of {network} in {path}, got no {list_names(missing)}"
        )
    other_heads = _SCALAR_HEADS if model.can_generate() else (*_SCALAR_HEADS, *_OUTPUT_LAYERS)
    unused = [name for name in unused if not name.startswith(other_heads)]
    if unused := sorted(name for name in unused if not _OF_NO_USE.search(name)):
        raise ValueError(
            f"path: expected a network with a place for all weights in {path}, got {network} "
            f"without {list_names(unused)}; its configuration belongs to another model"
        )


def list_names(names: Sequence[str]) -> str:
    """List the first of some names, and count the others."""
    remainder = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{remainder}"


@torch.no_grad()
def _check_finite(model: PreTrainedModel, path: str | Path) -> None:
    """Refuse weights that are not finite."""
    # the smallest and the largest number are NaN if any number is
    bad = [
        name
        for name, weight in model.named_parameters()
        if weight.is_floating_point() and not all(map(math.isfinite, weight.aminmax()))
    ]
    if bad:
        raise ValueError(
            f"path: expected finite weights of {type(model).__name__} in {path}, got NaN or "
            f"infinity in {list_names(bad)}"
        )


def _set_padding_of_tokenizer(
    config: PreTrainedConfig, path: str | Path, options: ModelOptions
) -> None:
    """Set the padding of a new scalar model from the tokenizer at `path`, if there is one."""
    with suppress(ValueError):
        set_scalar_padding(config, load_tokenizer(path, options.trust_remote_code))
