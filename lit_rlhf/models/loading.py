"""Loading policy, critic, reward model and tokenizer from a Hugging Face folder or hub id.

Weights come from safetensors only. Models come back in training mode; see `frozen` and
`disable_dropout` for the modes that PPO needs.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.pytorch_utils import Conv1D

from lit_rlhf.models.heads import detached_lm_head, scalar_model_from, seeded_scalar_head
from lit_rlhf.models.networks import LanguageModel
from lit_rlhf.models.options import ModelOptions

AutoClass: TypeAlias = type[AutoModelForCausalLM] | type[AutoModelForSequenceClassification]
HUB_ID = re.compile(r"(\w([\w.-]*\w)?/)?\w([\w.-]*\w)?", re.ASCII)


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
    return _prepared(model, options, TaskType.CAUSAL_LM, seed=0)


def causal_lm_positions(path: str | Path, options: ModelOptions | None = None) -> int | None:
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
    config = _causal_lm_config(path, options or ModelOptions())
    limit: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit


def load_scalar_model(
    path: str | Path, options: ModelOptions | None = None, head_seed: int = 0
) -> LanguageModel:
    """A trunk with a scalar head: critic or reward model.

    From a scalar model's folder (`AutoModelForSequenceClassification` with one label) trunk and
    head are loaded. From a causal language model's, the trunk is loaded and the head is new, see
    `scalar_model_from`.

    Args:
        path: Folder or hub id.
        options: How it is loaded; `None` takes the defaults.
        head_seed: Seed of a new head's weights, and of LoRA adapters.

    Returns:
        The model, inside LoRA adapters if `options.lora_rank` is positive; its head is then trained
        in full.

    Raises:
        ValueError: If `path` is neither a folder nor a hub id, is a classifier's with other than
            one label, or holds no complete safetensors weights.
    """
    options = options or ModelOptions()
    config = _config(path, options)
    if _is_classifier(config):
        if config.num_labels != 1:
            raise ValueError(
                f"path: expected a model with 1 label, got {config.num_labels} in {path}"
            )
        model = _pretrained(AutoModelForSequenceClassification, path, options)
    else:
        model = scalar_model_from(_causal_lm(path, options), head_seed)
        _set_padding(model.config, path, options)
    return _prepared(model, options, TaskType.SEQ_CLS, seed=head_seed)


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
    config = _config(path, options)
    config.num_labels = 1
    with _private_rng(seed):
        model = AutoModelForSequenceClassification.from_config(  # type: ignore[no-untyped-call]
            config,
            dtype=options.torch_dtype,
            attn_implementation=options.attn_implementation,
            trust_remote_code=options.trust_remote_code,
        )
    model.score = seeded_scalar_head(model.score.in_features, seed).to(model.dtype)
    _set_padding(model.config, path, options)
    return _prepared(model, options, TaskType.SEQ_CLS, seed)


def lm_head_of(path: str | Path, options: ModelOptions | None = None) -> nn.Linear:
    """The output layer of a causal language model, for the language-model loss of Eq. 2.

    Its weights are its own, also when the model ties them to its embedding. Use it with
    `head_logits`. It is frozen when `options` asks for LoRA.

    Args:
        path: Folder or hub id of the causal language model.
        options: How it is loaded; `None` takes the defaults.

    Raises:
        ValueError: As `load_causal_lm`, and for an architecture whose logits `head_logits` does not
            know how to make.
    """
    options = options or ModelOptions()
    return detached_lm_head(_causal_lm(path, options)).requires_grad_(options.lora_rank == 0)


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
    _check_path(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=trust_remote_code, padding_side="left"
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"path: expected a tokenizer at {path}, got none: {error}") from error
    if tokenizer.eos_token is None:
        raise ValueError(f"path: expected a tokenizer with an EOS token, got none at {path}")
    if tokenizer.pad_token is None:
        special = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
        pads = [token for token in special if "pad" in token.lower()]
        tokenizer.pad_token = (pads or [tokenizer.unk_token or tokenizer.eos_token])[0]
    return tokenizer


def _check_path(path: str | Path) -> None:
    """Refuse a mistyped folder here: transformers would ask the network for it, several times."""
    if path != "" and Path(path).is_dir():
        _check_folder(Path(path))
        return
    if Path(path).is_file():
        raise ValueError(
            f"path: expected a folder with a model, got the file {path}; from a checkpoint "
            "`lit_rlhf export` makes such a folder"
        )
    expected = (
        "path: expected a folder with a model or a hub id (name or owner/name), got "
        f"{str(path)!r}, which is no folder here and "
    )
    if isinstance(path, Path) or Path(path).exists() or HUB_ID.fullmatch(path) is None:
        raise ValueError(expected + "has no hub id's form")
    owner, _, name = path.partition("/")
    if name and Path(owner).is_dir():
        raise ValueError(expected + f"no hub id either, as {owner!r} is a folder without {name!r}")


def _check_folder(folder: Path) -> None:
    """Refuse what people take for a model's folder; transformers' own errors name other causes."""
    if (folder / "config.json").is_file():
        return
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"path: expected a folder with a whole model, got {folder} with a LoRA adapter alone; "
            "merge it into its base model first (peft's `merge_and_unload`, then "
            "`save_pretrained` of model and tokenizer)"
        )
    if folder.suffix == ".ckpt" or any(folder.glob("*.ckpt")):  # engines save a folder each
        raise ValueError(
            f"path: expected a folder with a model, got {folder} with a checkpoint of a run; from "
            "a checkpoint `lit_rlhf export` makes such a folder"
        )


def _config(path: str | Path, options: ModelOptions) -> PreTrainedConfig:
    _check_path(path)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            str(path), trust_remote_code=options.trust_remote_code
        )
        return config
    except (OSError, ValueError) as error:
        raise ValueError(f"path: expected a model at {path}, got none: {error}") from error


def _is_classifier(config: PreTrainedConfig) -> bool:
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or [])


def _causal_lm_config(path: str | Path, options: ModelOptions) -> PreTrainedConfig:
    config = _config(path, options)
    if _is_classifier(config):
        raise ValueError(
            f"path: expected a causal language model, got a reward model or classifier in {path}"
        )
    return config


def _causal_lm(path: str | Path, options: ModelOptions) -> PreTrainedModel:
    _causal_lm_config(path, options)
    return _pretrained(AutoModelForCausalLM, path, options)


def _pretrained(auto_class: AutoClass, path: str | Path, options: ModelOptions) -> PreTrainedModel:
    with _private_rng(0):
        try:
            loaded: Any = auto_class.from_pretrained(
                str(path),
                dtype=options.torch_dtype,
                attn_implementation=options.attn_implementation,
                trust_remote_code=options.trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
            )
        except OSError as error:
            raise ValueError(
                f"path: expected a model with safetensors weights at {path}: {error}"
            ) from error
    model: PreTrainedModel = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    if missing:
        raise ValueError(
            f"path: expected all weights of {type(model).__name__} in {path}, "
            f"missing are {', '.join(missing)}"
        )
    return model


def _prepared(
    model: PreTrainedModel, options: ModelOptions, task: TaskType, seed: int
) -> LanguageModel:
    """Gradient checkpointing and adapters, as the options say."""
    model.train()
    if options.gradient_checkpointing:
        model.activation_checkpointing_enable()
    if options.lora_rank == 0:
        return model
    config = LoraConfig(
        task_type=task,
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=options.lora_dropout,
        target_modules=options.lora_targets,
        # GPT-2's layers hold their weight transposed
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    with _private_rng(seed), warnings.catch_warnings():
        # peft 0.21 asks transformers 5.23 for this by its old name; nothing a user could change
        warnings.filterwarnings(
            "ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning
        )
        return get_peft_model(model, config)


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


@contextmanager
def _private_rng(seed: int) -> Iterator[None]:
    """Seeds weights drawn on the CPU inside the context; the caller's generator is untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
