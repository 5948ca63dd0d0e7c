"""Loading what an evaluation needs: policies, their encoders and rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lit_rlhf.data import DialogueEncoder, TextContract
from lit_rlhf.forward import LanguageModel, freeze
from lit_rlhf.models import ModelOptions, load_causal_lm, load_tokenizer, max_positions
from lit_rlhf.rewards import WeightedReward, shorten_names
from lit_rlhf.rollout import SamplingOptions

DEFAULT_PROMPT_LENGTH = 512


def load_shared_encoder(
    policies: Sequence[str],
    chat_template: str = "tokenizer",
    max_prompt_length: int | None = None,
    options: ModelOptions | None = None,
) -> DialogueEncoder:
    """The one encoder of several policies, the first one's.

    Raises:
        ValueError: If a policy would be shown text otherwise than its folder says it was trained,
            or otherwise than the first policy; with both renderings.
    """
    trust_remote_code = (options or ModelOptions()).trust_remote_code
    encoders: list[DialogueEncoder] = []
    for path in policies:
        saved = TextContract.find(path)
        limit = max_prompt_length
        if limit is None:
            limit = DEFAULT_PROMPT_LENGTH if saved is None else saved.max_length
        tokenizer = load_tokenizer(path, trust_remote_code)
        try:
            encoder = DialogueEncoder(tokenizer, chat_template, limit)
        except ValueError as error:
            raise ValueError(f"policy {path!r}: {error}") from error
        mismatch = None if saved is None else saved.mismatch(encoder.contract)
        if mismatch is not None:
            raise ValueError(
                f"model {path!r}: expected to show it text as in its training (here), got other "
                f"text (there): {mismatch}"
            )
        mismatch = None if not encoders else encoder.contract.mismatch(encoders[0].contract)
        if mismatch is not None:
            raise ValueError(
                f"model {path!r} (here): expected one that reads text as the first one, "
                f"{policies[0]!r} (there), does, or they cannot be compared: {mismatch}"
            )
        encoders.append(encoder)
    return encoders[0]


def load_reward(
    source: str,
    weight: float | Mapping[str, Any],
    options: ModelOptions,
    encoder: DialogueEncoder,
) -> WeightedReward:
    """One reward by itself, times its weight.

    Raises:
        ValueError: If there is no such reward, or it is a reward model that was trained on text
            rendered otherwise than the policies'.
    """
    reward = WeightedReward({source: weight}, options, encoder.tokenizer).eval()
    for model in reward.models:
        model.check_contract(encoder.contract)
    return reward


def short_names(sources: Sequence[str], argument: str) -> list[str]:
    """The last part of each path or function name, or the whole where two would be equal.

    Raises:
        ValueError: If a source is named twice, or there is none.
    """
    if not sources or len(set(sources)) < len(sources):
        raise ValueError(f"{argument}: expected one or more, each once, got {list(sources)}")
    return list(shorten_names(sources).values())


def load_encoder(
    path: str,
    sampling: SamplingOptions,
    chat_template: str = "tokenizer",
    max_prompt_length: int | None = None,
    options: ModelOptions | None = None,
) -> DialogueEncoder:
    """The encoder of a model, whose prompts leave room for a response.

    Args:
        path: Folder or hub id.
        sampling: Says how long a response may become.
        chat_template: `tokenizer` for the model's own, or the name of a built-in one.
        max_prompt_length: Longest prompt in tokens; `None` takes what the model's positions leave
            beside a response, but no more than the longest sequence that it was trained on if its
            folder says so. Where neither is known, 512.
        options: How the model is loaded; `None` takes the defaults.

    Raises:
        ValueError: If there is no causal language model at `path`, it has no chat template, it
            would be shown text otherwise than its folder says it was trained, or prompt and
            response do not fit into its positions.
    """
    positions = max_positions(path, options)
    room = None if positions is None else positions - sampling.max_new_tokens
    if room is not None and room < (max_prompt_length or 2):
        raise ValueError(
            f"model {path!r}: expected prompt and response within its {positions} positions, got "
            f"max_new_tokens={sampling.max_new_tokens} beside prompts of "
            f"{max_prompt_length or 'at least 2'} tokens; give a smaller max_new_tokens"
        )
    limit = max_prompt_length
    if limit is None and TextContract.find(path) is None:
        limit = DEFAULT_PROMPT_LENGTH if room is None else room
    encoder = load_shared_encoder([path], chat_template, limit, options)
    encoder.max_prompt_length = min(encoder.max_length, room or encoder.max_length)
    return encoder


def load_policy(path: str, options: ModelOptions, device: torch.device) -> LanguageModel:
    """A policy that is only sampled from and read.

    Raises:
        ValueError: If there is no causal language model at `path`.
    """
    model = freeze(load_causal_lm(path, options))
    module: nn.Module = model  # transformers' own `to` is typed for one model class only
    module.to(device)
    return model


def choose_device(name: str) -> torch.device:
    """The device that `name` stands for; `auto` is the first CUDA device, or else the CPU.

    Raises:
        ValueError: If there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device: expected 'auto' or a device of this machine, got {name!r}: {error}"
        ) from error
    return device
