"""Models from weights at hand, from a folder of adapters, and with their adapters merged in."""

import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, TaskType, get_peft_model
from safetensors import safe_open
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from lit_rlhf.files import check_model_files
from lit_rlhf.forward import LanguageModel, unwrap_model
from lit_rlhf.models.config import ModelOptions, read_config
from lit_rlhf.models.heads import check_whole, set_heads
from lit_rlhf.models.interop import find_stored_head
from lit_rlhf.models.loading import list_names, load_causal_lm, load_scalar_model
from lit_rlhf.models.prepare import add_adapters, check_rank, ignore_peft_warning, private_rng
from lit_rlhf.models.saving import SCORE_WEIGHT, match_score_bias
from lit_rlhf.models.tying import assign_weights
from lit_rlhf.sandbox import SandboxError, match_names, try_in_fork

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def build_for_saving(
    path: str | Path, options: ModelOptions, weights: Mapping[str, Tensor], *, scalar: bool
) -> LanguageModel:
    """Build a model around given weights, so that it can be saved.

    Unless it is in 4 bits, it cannot run: buffers that are in no state dict have no content.

    Args:
        path: Folder or hub id of a model of the same shape. Only its config is read, or for a model
            in 4 bits its weights, too.
        options: The options that decide on the names of the weights, such as LoRA.
        weights: State dict, with its adapters. Its tensors are used and not copied.
        scalar: Whether the head is a scalar one, or as many as `weights` have, as opposed to a
            language model's.
    """
    heads = next((len(w) for name, w in weights.items() if SCORE_WEIGHT.search(name)), 1)
    if options.load_in_4bit:
        # a state dict has no 4-bit weights: they are loaded from the folder
        scalar_loader = partial(load_scalar_model, head_seed=0, heads=heads)
        load: Callable[..., LanguageModel] = scalar_loader if scalar else load_causal_lm
        model = load(path, options)
        model.load_state_dict(weights)
        return model
    config = read_config(path, options)
    auto: Any = AutoModelForCausalLM
    if scalar:
        auto = AutoModelForSequenceClassification
        set_heads(config, heads)
    task = TaskType.SEQ_CLS if scalar else TaskType.CAUSAL_LM
    with torch.device("meta"):
        inner = auto.from_config(config, trust_remote_code=options.trust_remote_code)
        match_score_bias(inner, weights)
        # no more of `prepare_model` than what gives the weights their names
        model = add_adapters(inner, options, task, seed=0)
    try:
        assign_weights(model, weights)
    except RuntimeError as error:
        raise ValueError(
            f"path: expected a model of the weights' shape, got {type(inner).__name__} of {path}: "
            f"{error}"
        ) from error
    return model


def load_adapter_folder(
    path: str | Path,
    options: ModelOptions,
    base: str | None = None,
    *,
    pickled_weights: bool = False,
) -> PeftModel:
    """Load a folder of LoRA adapters, with the model below them.

    Args:
        path: The folder.
        options: How the model below the adapters is loaded.
        base: Folder or hub id of that model; `None` for the one that the adapters name.
        pickled_weights: As for `load_causal_lm`.
    """
    file = Path(path) / ADAPTER_WEIGHTS
    if not file.is_file():
        raise ValueError(f"path: expected adapters with safetensors weights, got no {file}")
    check_model_files(Path(path))
    check_whole(file)
    config = PeftConfig.from_pretrained(str(path))
    source = base or _require_base(config, path)
    model = _load_below(config, source, file, options, pickled_weights=pickled_weights)
    patterns = config.to_dict()
    try:
        try_in_fork(lambda: match_names(patterns, dict(unwrap_model(model).named_modules())))
    except SandboxError as error:
        raise ValueError(
            f"path: expected names of modules in {Path(path) / ADAPTER_CONFIG}, got a regular "
            "expression that takes very long"
        ) from error
    inner = unwrap_model(model)
    config.inference_mode = True
    config.base_model_name_or_path = inner.name_or_path
    try:
        if isinstance(config, LoraConfig):
            for rank in (config.r, *(config.rank_pattern or {}).values()):
                check_rank(f"rank in {ADAPTER_CONFIG}", rank, inner)
        with ignore_peft_warning():
            adapted: PeftModel = get_peft_model(inner, config, low_cpu_mem_usage=True)
            # `PeftModel.from_pretrained` would not tell which weights it has no place for
            loaded = adapted.load_adapter(str(path), "default", low_cpu_mem_usage=True)
    except (ValueError, TypeError, RuntimeError, KeyError) as error:  # the last: a head is missing
        raise ValueError(
            f"path: expected adapters in {path} that fit {type(inner).__name__} of {source}, got "
            f"{textwrap.shorten(str(error), 1000)}"
        ) from error
    missing = [name for name, weight in adapted.named_parameters() if weight.is_meta]
    if missing:
        raise ValueError(
            f"path: expected the weights of all adapters that {ADAPTER_CONFIG} names in {file}, "
            f"got none of {len(missing)}, the first {missing[0]}"
        )
    if unused := sorted(loaded.unexpected_keys):
        raise ValueError(
            f"path: expected that {ADAPTER_CONFIG} names all modules whose adapters are in {file}, "
            f"got no place for {list_names(unused)}"
        )
    return adapted


def _load_below(
    config: PeftConfig, source: str, file: Path, options: ModelOptions, *, pickled_weights: bool
) -> LanguageModel:
    """Load the model below adapters, with the scalar head that they need.

    Args:
        config: Config of the adapters.
        source: Folder or hub id of the model.
        file: Weights of the adapters.
        options: How the model is loaded.
        pickled_weights: As for `load_causal_lm`.
    """
    if config.task_type == TaskType.CAUSAL_LM:
        return load_causal_lm(source, options, pickled_weights=pickled_weights)
    if config.task_type != TaskType.SEQ_CLS:
        raise ValueError(
            f"path: expected adapters for CAUSAL_LM or SEQ_CLS in {file.parent}, got "
            f"{config.task_type}"
        )
    n_heads = _count_trained_heads(file)
    if n_heads is None and find_stored_head(source, read_config(source, options)) is None:
        raise ValueError(
            f"path: expected adapters with a scalar head, or a model below them that has one, "
            f"got neither in {file.parent} and {source}"
        )
    # the adapters' head, if there is one, replaces the new one
    return load_scalar_model(
        source, options, head_seed=0, heads=n_heads or 1, pickled_weights=pickled_weights
    )


def find_base(path: str | Path) -> str:
    """Find the folder or hub id of the model that the adapters in a folder name."""
    return _require_base(PeftConfig.from_pretrained(str(path)), path)


def _require_base(config: PeftConfig, path: str | Path) -> str:
    """The folder or hub id of the model that adapters name, or an error if they name none.

    Args:
        config: Config of the adapters.
        path: Their folder, for the error.
    """
    base: str | None = config.base_model_name_or_path
    if not base:
        raise ValueError(
            f"base: expected the model below the adapters, got none, and {ADAPTER_CONFIG} in "
            f"{path} names none"
        )
    return base


def _count_trained_heads(file: Path) -> int | None:
    """Number of scalar heads among a file's adapters; `None` if they leave the head as it is.

    A head that has adapters itself, instead of being trained in full, counts as one.
    """
    with safe_open(file, framework="pt") as adapters:
        names = [name for name in adapters.keys() if "score" in name]  # noqa: SIM118
        for name in names:
            if SCORE_WEIGHT.search(name):
                return int(adapters.get_slice(name).get_shape()[0])
    return 1 if names else None


def build_untrained_llama(
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    *,
    layers: int,
    heads: int,
    hidden: int,
    intermediate: int,
    positions: int,
) -> LlamaForCausalLM:
    """Build a Llama with random weights in float32.

    Args:
        tokenizer: Tokenizer whose tokens the model embeds.
        seed: Seed of the weights.
        layers: Number of layers.
        heads: Attention heads of a layer.
        hidden: Width of the hidden states.
        intermediate: Width of the MLPs.
        positions: Longest sequence in tokens.
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with private_rng(seed):
        return LlamaForCausalLM(config)
