"""Where a score comes from: reward models, Python callables, or a weighted sum of several."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lit_rlhf.data import TextContract
from lit_rlhf.data.contract import CONTRACT_FILE, tokenizer_hash
from lit_rlhf.models import (
    ModelOptions,
    frozen,
    load_scalar_model,
    load_tokenizer,
    sequence_scores,
)
from lit_rlhf.rollout.batch import RolloutBatch
from lit_rlhf.rollout.samples import decoded_responses


class RewardFunction(Protocol):
    """A user's reward: rendered prompts and decoded responses in, one score each out.

    A function with a parameter `terminated` is also told which responses ended by themselves.
    """

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> Sequence[float]:
        """Scores of `responses` to `prompts`."""


def load_function(path: str) -> Callable[..., Any]:
    """The function that `package.module:name` names.

    Raises:
        ValueError: If there is no such module or name, or it is not callable.
    """
    module_name, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"reward function {path!r}: expected 'package.module:function'; {error}"
        ) from error
    if not callable(function):
        raise ValueError(
            f"reward function {path!r}: expected a callable, got {type(function).__name__}"
        )
    return function  # type: ignore[no-any-return]


class FunctionReward(nn.Module):
    """Scores from a Python callable."""

    def __init__(self, path: str, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self.path = path
        self.function = load_function(path)
        self.tokenizer = tokenizer
        self.wants_terminated = "terminated" in inspect.signature(self.function).parameters

    def forward(
        self, rollouts: RolloutBatch, prompts: Sequence[str], batch_size: int | None
    ) -> Tensor:
        """Scores `[B]`, float32. `batch_size` is for models; a callable sees all responses at once.

        Raises:
            ValueError: If the callable returns other than one finite number for each response.
        """
        responses = decoded_responses(rollouts, self.tokenizer)
        extra = {"terminated": rollouts.terminated.tolist()} if self.wants_terminated else {}
        returned = self.function(list(prompts), responses, **extra)
        try:
            scores = torch.as_tensor(returned, dtype=torch.float32)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"reward function {self.path!r}: expected {len(responses)} scores, one for each "
                f"response, got {returned!r:.100}"
            ) from error
        if scores.shape != (len(responses),):
            raise ValueError(
                f"reward function {self.path!r}: expected {len(responses)} scores, one for each "
                f"response, got shape {tuple(scores.shape)}"
            )
        bad = (~torch.isfinite(scores)).nonzero().flatten().tolist()
        if bad:
            raise ValueError(
                f"reward function {self.path!r}: expected finite scores, got {scores[bad[0]]} for "
                f"prompt {prompts[bad[0]]!r} and response {responses[bad[0]]!r}"
            )
        return scores.to(rollouts.response_ids.device)


class ModelReward(nn.Module):
    """Scores from a frozen reward model that shares the policy's tokenizer."""

    def __init__(self, path: str, options: ModelOptions) -> None:
        super().__init__()
        self.path = path
        # The policy's adapters and checkpointing are for training; a reward model is used as it is.
        plain = replace(options, lora_rank=0, gradient_checkpointing=False)
        self.model = frozen(load_scalar_model(path, plain))
        self.trust_remote_code = options.trust_remote_code

    @torch.no_grad()
    def forward(
        self, rollouts: RolloutBatch, prompts: Sequence[str], batch_size: int | None
    ) -> Tensor:
        """Scores `[B]`, float32, read at each response's last token."""
        ids, mask = rollouts.sequence_ids, rollouts.sequence_mask
        size = batch_size or len(ids)
        starts = range(0, len(ids), size)
        return torch.cat(
            [sequence_scores(self.model, ids[s : s + size], mask[s : s + size]) for s in starts]
        )

    def check_contract(self, policy: TextContract) -> None:
        """Refuse a reward model that was trained on differently rendered text than the policy's.

        Without a contract there is only the tokenizer to compare, and a warning says so.

        Raises:
            ValueError: With both renderings, when they differ; for another tokenizer.
        """
        has_contract = (Path(self.path) / CONTRACT_FILE).is_file()
        if has_contract:
            mismatch = TextContract.load(self.path).mismatch(policy)
        else:
            mismatch = self.tokenizer_mismatch(policy)
        if mismatch is not None:
            raise ValueError(
                f"reward model {self.path!r} does not read what the policy writes: {mismatch}"
            )
        if not has_contract:
            rank_zero_warn(
                f"reward model {self.path!r} has no {CONTRACT_FILE}: its tokenizer is the "
                "policy's, but whether it was trained with the policy's chat template cannot be "
                f"checked. The policy writes {policy.rendered()!r}",
                category=UserWarning,
            )

    def tokenizer_mismatch(self, policy: TextContract) -> str | None:
        """How the tokenizer in the model's folder differs from the policy's, in words.

        Raises:
            ValueError: If there is none.
        """
        tokenizer = load_tokenizer(self.path, self.trust_remote_code)
        if tokenizer_hash(tokenizer) == policy.tokenizer_hash:
            return None
        return (
            f"it has another tokenizer, of {len(tokenizer)} tokens here and {policy.vocab_size} "
            "there, which differ in the vocabulary or split text differently"
        )


class WeightedReward(nn.Module):
    """A weighted sum of rewards.

    Args:
        rewards: Weight by source: a reward model's folder or hub id, or `package.module:function`.
        options: How reward models are loaded.
        tokenizer: The policy's.

    Raises:
        ValueError: If there is no source.
    """

    def __init__(
        self,
        rewards: Mapping[str, float],
        options: ModelOptions,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        super().__init__()
        if not rewards:
            raise ValueError(
                "rewards: expected at least one source, a reward model's folder or "
                "'package.module:function', with its weight; got none"
            )
        self.weights = list(rewards.values())
        self.sources = nn.ModuleList(
            FunctionReward(source, tokenizer)
            if is_function(source)
            else ModelReward(source, options)
            for source in rewards
        )

    def forward(
        self, rollouts: RolloutBatch, prompts: Sequence[str], batch_size: int | None
    ) -> Tensor:
        """Weighted scores `[B]`, float32."""
        return torch.stack(
            [
                weight * source(rollouts, prompts, batch_size)
                for weight, source in zip(self.weights, self.sources, strict=True)
            ]
        ).sum(0)

    @property
    def models(self) -> list[ModelReward]:
        """The sources that are reward models."""
        return [source for source in self.sources if isinstance(source, ModelReward)]


def is_function(source: str) -> bool:
    """Whether a reward source names a Python function rather than a model."""
    return ":" in source and not Path(source).exists()
