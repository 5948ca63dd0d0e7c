"""Load what the tools run: policies and the encoders of their prompts."""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from lit_rlhf.data import DialogueEncoder, TextContract
from lit_rlhf.forward import LanguageModel, freeze, rule_out_ids_without_token
from lit_rlhf.models import (
    ModelOptions,
    check_embedding_size,
    load_causal_lm,
    load_tokenizer,
    max_positions,
)
from lit_rlhf.rewards import shorten_names
from lit_rlhf.rollout import SamplingOptions

CPU = torch.device("cpu")
"""Where models compute unless a caller names another device."""
_DEFAULT_PROMPT_LENGTH = 512  # tokens, for models that do not say what they were trained on


def load_policy(
    path: str,
    model_options: ModelOptions,
    device: torch.device,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> LanguageModel:
    """Load a causal language model for sampling and scoring, without gradients or dropout.

    Args:
        path: Folder or hub id.
        model_options: How the model is loaded.
        device: Where it computes.
        tokenizer: The model's tokenizer. Ids that it has no token for are ruled out. `None`: all
            ids of the model's vocabulary count, as in language-model losses.
    """
    model = freeze(load_causal_lm(path, model_options))
    if tokenizer is not None:
        rule_out_ids_without_token([model], tokenizer)
    nn.Module.to(model, device)  # transformers annotates its own `to` for one class only
    return model


def load_shared_encoder(
    policies: Sequence[str],
    *,
    chat_template: str = "tokenizer",
    max_prompt_length: int | None = None,
    model_options: ModelOptions = ModelOptions(),
) -> DialogueEncoder:
    """Load the first policy's encoder, and check that all policies read text the same way.

    An error shows both renderings.

    Args:
        policies: Folders or hub ids.
        chat_template: Template of the dialogues; `tokenizer` for the first policy's own.
        max_prompt_length: Longest prompt in tokens. `None`: the longest sequence that the first
            policy was trained on if its folder has a text contract, else 512.
        model_options: How the models are loaded.
    """
    encoders: list[DialogueEncoder] = []
    for path in policies:
        trained = TextContract.find(path)
        limit = max_prompt_length
        if limit is None:
            limit = _DEFAULT_PROMPT_LENGTH if trained is None else trained.max_length
        tokenizer = load_tokenizer(path, model_options.trust_remote_code)
        check_embedding_size(tokenizer, path, model_options)
        try:
            encoder = DialogueEncoder(tokenizer, chat_template, limit)
        except ValueError as error:
            raise ValueError(f"model {path!r}: {error}") from error
        mismatch = trained.mismatch(encoder.contract) if trained is not None else None
        if mismatch is not None:
            advice = "its tokenizer was changed after its training"
            if chat_template != "tokenizer":
                advice = "leave chat_template at 'tokenizer' to use the model's own"
            raise ValueError(
                f"model {path!r}: expected text as in its training (here), got other text (there); "
                f"{advice}: {mismatch}"
            )
        mismatch = encoder.contract.mismatch(encoders[0].contract) if encoders else None
        if mismatch is not None:
            raise ValueError(
                f"model {path!r} (here): expected a model that reads text like the first one, "
                f"{policies[0]!r} (there), because only such models can be compared: {mismatch}"
            )
        encoders.append(encoder)
    return encoders[0]


def load_encoder(
    path: str,
    sampling: SamplingOptions,
    *,
    chat_template: str = "tokenizer",
    max_prompt_length: int | None = None,
    model_options: ModelOptions = ModelOptions(),
) -> DialogueEncoder:
    """Load the encoder of one model, with prompts short enough to leave room for a response.

    The longest prompt is at most the model's positions less `max_new_tokens`.

    Args:
        path: Folder or hub id of the model.
        sampling: How responses are sampled.
        chat_template: Template of the dialogues; `tokenizer` for the model's own.
        max_prompt_length: Longest prompt in tokens. `None`: the longest sequence of the model's
            training if its folder has a text contract, else its positions, else 512.
        model_options: How the model is loaded.
    """
    positions = max_positions(path, model_options)
    room = None if positions is None else positions - sampling.max_new_tokens
    if room is not None and room < (max_prompt_length or 2):
        raise ValueError(
            f"model {path!r}: expected prompt and response within its {positions} positions, got "
            f"max_new_tokens={sampling.max_new_tokens} and prompts of "
            f"{max_prompt_length or 'at least 2'} tokens; reduce max_new_tokens"
        )
    limit = max_prompt_length
    if limit is None and TextContract.find(path) is None:
        limit = _DEFAULT_PROMPT_LENGTH if room is None else room
    encoder = load_shared_encoder(
        [path],
        chat_template=chat_template,
        max_prompt_length=limit,
        model_options=model_options,
    )
    # as long as in training, unless the model's positions leave less beside the response
    encoder.max_prompt_length = min(encoder.max_length, room or encoder.max_length)
    return encoder


def load_encoders(
    paths: Sequence[str],
    sampling: SamplingOptions,
    *,
    chat_template: str = "tokenizer",
    max_prompt_length: int | None = None,
    model_options: ModelOptions = ModelOptions(),
) -> list[DialogueEncoder]:
    """Load the encoder of each model, before any weights.

    Encoders take seconds and weights take minutes: an error in the last model's tokenizer has to
    come before the first model's weights are loaded.

    Args:
        paths: Folders or hub ids of the models.
        sampling: How responses are sampled.
        chat_template: Template of the dialogues; `tokenizer` for each model's own.
        max_prompt_length: Longest prompt in tokens; see `load_encoder`.
        model_options: How the models are loaded.
    """
    return [
        load_encoder(
            path,
            sampling,
            chat_template=chat_template,
            max_prompt_length=max_prompt_length,
            model_options=model_options,
        )
        for path in paths
    ]


def choose_device(name: str) -> torch.device:
    """Return the device called `name`; `auto` is the first CUDA device, or else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)  # torch.device("cuda:7") succeeds on a machine without one
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device: expected 'auto' or a device of this machine, got {name!r}: {error}"
        ) from error
    return device


def short_names(sources: Sequence[str], argument: str) -> list[str]:
    """Shorten paths and function names to their last part, where that tells them apart.

    Args:
        sources: The paths and names.
        argument: Where they come from, for errors.
    """
    if not sources or len(set(sources)) < len(sources):
        raise ValueError(f"{argument}: expected one or more, each once, got {list(sources)}")
    return list(shorten_names(sources).values())
