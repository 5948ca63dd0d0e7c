"""Loading policy, critic, reward model and tokenizer from a Hugging Face folder or hub id.

Weights come from safetensors only. Models come back in training mode; see `frozen` and
`disable_dropout` for the modes that PPO needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

from peft import TaskType
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

from lit_rlhf.forward import LanguageModel, optimize_forward
from lit_rlhf.models.adapters import prepared, private_rng
from lit_rlhf.models.configs import (
    check_folder,
    check_path,
    has_pickled_weights,
    is_classifier,
    read_config,
)
from lit_rlhf.models.differences import check_not_differences
from lit_rlhf.models.exchange import StoredHead, stored_head
from lit_rlhf.models.heads import build_scalar_model, copy_lm_head, seeded_scalar_head
from lit_rlhf.models.options import ModelOptions

AutoClass: TypeAlias = type[AutoModelForCausalLM] | type[AutoModelForSequenceClassification]


def load_causal_lm(path: str | Path, options: ModelOptions | None = None) -> LanguageModel:
    """A causal language model: policy, reference or SFT model.

    Args:
        path: Folder or hub id.
        options: How it is loaded; `None` takes the defaults.

    Returns:
        The model, inside LoRA adapters if `options.lora_rank` is positive. Its reference is then
        itself inside `with model.disable_adapter()`.

    Raises:
        ValueError: If `path` is neither a folder nor a hub id, is not a causal language model's,
            or holds no complete safetensors weights.
    """
    options = options or ModelOptions()
    model = _causal_lm(path, options)
    return prepared(model, options, TaskType.CAUSAL_LM, seed=0)


def max_positions(path: str | Path, options: ModelOptions | None = None) -> int | None:
    """How many tokens, prompt and response together, a causal language model has positions for.

    Only its config is read, so that a wrong folder is told before any weights are loaded.

    Args:
        path: Folder or hub id.
        options: How it is loaded; `None` takes the defaults.

    Returns:
        The number; `None` where the architecture has no limit.

    Raises:
        ValueError: If `path` is neither a folder nor a hub id, or is not a causal language model's.
    """
    config = read_config(path, options or ModelOptions())
    _check_causal(config, path)
    limit: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit


def load_scalar_model(
    path: str | Path, options: ModelOptions | None = None, head_seed: int = 0
) -> LanguageModel:
    """A trunk with a scalar head: critic or reward model.

    From a scalar model's folder trunk and head are loaded: `AutoModelForSequenceClassification`
    with one label, or under the names of another project, see `lit_rlhf.models.exchange`. From a
    causal language model's, the trunk is loaded and the head is new, see `build_scalar_model`.

    Args:
        path: Folder or hub id.
        options: How it is loaded; `None` takes the defaults.
        head_seed: Seed of a new head's weights, and of LoRA adapters.

    Returns:
        The model, inside LoRA adapters if `options.lora_rank` is positive; its head is then trained
        in full.

    Raises:
        ValueError: If `path` is neither a folder nor a hub id, is a classifier's with other than
            one label, holds a scalar head of an unknown name, differences from another model's
            weights, or no complete safetensors weights.
    """
    options = options or ModelOptions()
    config = read_config(path, options)
    own_code = options.trust_remote_code and hasattr(config, "auto_map")
    head = None if own_code else stored_head(path, config, options.pickled_weights)
    if head is not None and not head.is_plain(config):
        model = _with_stored_head(path, options, config, head)
        if not options.differences:
            check_not_differences(model, config, path)
    elif is_classifier(config):
        if config.num_labels != 1:
            raise ValueError(
                f"path: expected a model with 1 label, got {config.num_labels} in {path}"
            )
        model = _pretrained(AutoModelForSequenceClassification, path, options)
        if not isinstance(getattr(model, "score", None), nn.Linear):
            raise ValueError(
                f"path: expected a decoder whose scalar head is a layer `score`, got "
                f"{type(model).__name__} in {path}; such a model can be called from a reward "
                "function, rewards: {'my_package.rules:its_score': 1.0}"
            )
    else:
        model = build_scalar_model(_causal_lm(path, options), head_seed)
        _set_padding(model.config, path, options)
    return prepared(model, options, TaskType.SEQ_CLS, seed=head_seed)


def random_scalar_model(
    path: str | Path, options: ModelOptions | None = None, seed: int = 0
) -> LanguageModel:
    """A scalar model with random weights and the shape of the model at `path`.

    Args:
        path: Folder or hub id; only its config and tokenizer are read.
        options: How it is made; `None` takes the defaults.
        seed: Seed of all weights.

    Raises:
        ValueError: If `path` is neither a folder nor a hub id.
    """
    options = options or ModelOptions()
    config = read_config(path, options)
    config.num_labels = 1
    with private_rng(seed):
        model = AutoModelForSequenceClassification.from_config(  # type: ignore[no-untyped-call]
            config,
            dtype=options.torch_dtype,
            attn_implementation=options.attn_implementation,
            trust_remote_code=options.trust_remote_code,
        )
    model.score = seeded_scalar_head(model.score.in_features, seed).to(model.dtype)
    _set_padding(model.config, path, options)
    return prepared(model, options, TaskType.SEQ_CLS, seed)


def load_lm_head(path: str | Path, options: ModelOptions | None = None) -> nn.Linear:
    """The output layer of a causal language model, for the language-model loss of Eq. 2.

    Its weights are its own, also when the model ties them to its embedding. Use it with
    `logits_from_hidden`. It is frozen when `options` asks for LoRA.

    Args:
        path: Folder or hub id of the causal language model.
        options: How it is loaded; `None` takes the defaults.

    Raises:
        ValueError: As `load_causal_lm`, and for an architecture whose logits `logits_from_hidden`
            does not reproduce.
    """
    options = options or ModelOptions()
    head = copy_lm_head(_causal_lm(path, options)).requires_grad_(options.lora_rank == 0)
    return optimize_forward(head)


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, padding on the left and with a padding token.

    Without one of its own, it pads with a special token of its vocabulary: one whose name says
    "pad", else the unknown token, else EOS. The vocabulary never grows, so no embedding is resized.

    Args:
        path: Folder or hub id.
        trust_remote_code: Run code that comes with the model.

    Raises:
        ValueError: If there is no tokenizer at `path`, or it has no EOS token.
    """
    check_path(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=trust_remote_code, padding_side="left"
        )
    except (OSError, ValueError) as error:
        if Path(path).is_dir():
            check_folder(Path(path))
        raise ValueError(f"path: expected a tokenizer at {path}, got none: {error}") from error
    if tokenizer.eos_token is None:
        raise ValueError(f"path: expected a tokenizer with an EOS token, got none at {path}")
    if tokenizer.pad_token is None:
        special = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
        pads = [token for token in special if "pad" in token.lower()]
        tokenizer.pad_token = (pads or [tokenizer.unk_token or tokenizer.eos_token])[0]
    return tokenizer


def _causal_lm(path: str | Path, options: ModelOptions) -> PreTrainedModel:
    config = read_config(path, options)
    _check_causal(config, path)
    model = _pretrained(AutoModelForCausalLM, path, options)
    if not options.differences:
        check_not_differences(model, config, path)
    return model


def _check_causal(config: PreTrainedConfig, path: str | Path) -> None:
    if is_classifier(config):
        raise ValueError(
            f"path: expected a causal language model, got a reward model or classifier in {path}"
        )


def _with_stored_head(
    path: str | Path, options: ModelOptions, config: PreTrainedConfig, head: StoredHead
) -> PreTrainedModel:
    """A scalar model from files with other names, or other content, than transformers' own."""
    # OpenRLHF leaves out num_labels, which is then 2
    config.num_labels = 1
    before = logging.get_verbosity()
    # its report names a language model's head and a bias as unexpected; what is missing, we see
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # untyped there
    try:
        names = head.renamed
        loaded = _pretrained(
            AutoModelForSequenceClassification, path, options, config=config, key_mapping=names
        )
    finally:
        logging.set_verbosity(before)
    # on another model: transformers would save this one under the names that it was loaded by
    model = build_scalar_model(loaded, head=head.layer())
    _set_padding(model.config, path, options)
    return model


def _pretrained(
    auto_class: AutoClass,
    path: str | Path,
    options: ModelOptions,
    **more: Any,
) -> PreTrainedModel:
    with private_rng(0):
        try:
            loaded: Any = auto_class.from_pretrained(
                str(path),
                dtype=options.torch_dtype,
                attn_implementation=options.attn_implementation,
                trust_remote_code=options.trust_remote_code,
                use_safetensors=None if options.pickled_weights else True,
                output_loading_info=True,
                **more,
            )
        except OSError as error:
            hint = (
                "; `lit_rlhf export` makes them of pytorch_model.bin"
                if has_pickled_weights(path)
                else ""
            )
            raise ValueError(
                f"path: expected a model with safetensors weights at {path}: {error}{hint}"
            ) from error
    model: PreTrainedModel = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    if missing:
        raise ValueError(
            f"path: expected all weights of {type(model).__name__} in {path}, "
            f"missing are {', '.join(missing)}"
        )
    return model


def _set_padding(config: PreTrainedConfig, path: str | Path, options: ModelOptions) -> None:
    """Give a new scalar model's config the padding id that plain transformers needs to pool."""
    try:
        tokenizer = load_tokenizer(path, options.trust_remote_code)
    except ValueError:
        return
    set_scalar_padding(config, tokenizer)


def set_scalar_padding(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set `config.pad_token_id` so that plain transformers reads the score where this project does.

    transformers pools at the last token that is not padding. Were EOS the padding token, it would
    pass over the EOS at which the score was trained: the id is then left open, and transformers
    refuses padded batches instead of returning other scores.
    """
    distinct = tokenizer.pad_token_id != tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id if distinct else None
