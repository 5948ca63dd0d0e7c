"""Where a score comes from: a reward model, or a callable."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lit_rlhf.data import TextContract
from lit_rlhf.data.contract import CONTRACT_FILE, tokenizer_hash
from lit_rlhf.forward import LanguageModel, Offloaded, freeze, on_device, sequence_scores
from lit_rlhf.models import ModelOptions, load_scalar_model, load_tokenizer
from lit_rlhf.rewards.calls import (
    RewardError,
    Samples,
    attempted,
    samples_of,
    warn_of_non_finite,
)
from lit_rlhf.rollout.batch import RolloutBatch

ON_DEMAND = ("terminated", "lengths")  # what a callable is told if it has a parameter of that name


class RewardFunction(Protocol):
    """A user's reward: rendered prompts and decoded responses in, one score each out.

    A function with a parameter `terminated` is also told which responses ended by themselves, one
    with a parameter `lengths` how many tokens each response has, EOS included.
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


class CallableReward(nn.Module):
    """Scores from a callable: a user's function or a ready-made rule.

    Args:
        label: What messages call it.
        function: The callable, see `RewardFunction`.
        tokenizer: The policy's.
        timeout: Seconds that a call may take; `None`: as long as it likes. With a limit it runs in
            a thread of its own (`attempted` says what that means).
    """

    def __init__(
        self,
        label: str,
        function: Callable[..., Any],
        tokenizer: PreTrainedTokenizerBase,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        self.label = label
        self.function = function
        self.tokenizer = tokenizer
        self.timeout = timeout
        self.wants = [name for name in ON_DEMAND if name in inspect.signature(function).parameters]

    def forward(
        self, rollouts: RolloutBatch, prompts: Sequence[str], max_tokens_per_forward: int | None
    ) -> Tensor:
        """Scores `[B]`, float32; a warning shows one that is not finite.

        Args:
            rollouts: `B` responses.
            prompts: Their rendered prompts.
            max_tokens_per_forward: For models; a callable sees all responses at once.

        Raises:
            RuntimeError: If the callable raises; from its own error.
            TimeoutError: If it takes too long.
            ValueError: If it returns other than one number for each response.
        """
        samples = samples_of(rollouts, prompts, self.tokenizer)
        returned = self.returned(samples)
        expected = f"expected {len(prompts)} scores, one for each response"
        asked = f"{len(prompts)} responses, the first: {samples.shown(0)}"
        try:
            scores = torch.as_tensor(returned, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{self.label}: {expected}, got {returned!r:.100}; called with {asked}"
            ) from error
        if scores.shape != (len(prompts),):
            raise ValueError(
                f"{self.label}: {expected}, got shape {tuple(scores.shape)}; called with {asked}"
            )
        warn_of_non_finite(self.label, scores, samples)
        return scores.to(rollouts.response_ids.device)

    def returned(self, samples: Samples) -> Any:  # noqa: ANN401  # whatever the callable returns
        """What the callable returns for `samples`.

        Raises:
            RuntimeError: If it raises; names the first sample that it raises on alone.
            TimeoutError: If it takes too long.
        """
        attempt = self.attempt(samples)
        asked = f"{len(samples.prompts)} responses, the first: {samples.shown(0)}"
        if not attempt.done():
            raise TimeoutError(
                f"{self.label}: no scores after {self.timeout:g} seconds (reward_timeout) for "
                f"{asked}"
            )
        error = attempt.exception()
        if error is None:
            return attempt.result()
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            raise error  # explained by the phase
        if isinstance(error, RewardError):
            raise RewardError(f"{self.label}: {error}") from error
        alone = (samples.only(row) for row in range(len(samples.prompts)))
        culprit = next((s for s in alone if self.fails(s)), None)
        raise RuntimeError(
            f"{self.label} raised {type(error).__name__}: {error}. Called with "
            + (f"{asked}; none fails alone" if culprit is None else f"{culprit.shown(0)}")
        ) from error

    def attempt(self, samples: Samples) -> Future[Any]:
        """Call the callable."""
        extra = {name: getattr(samples, name) for name in self.wants}
        call = partial(self.function, samples.prompts, samples.responses, **extra)
        return attempted(call, self.timeout)

    def fails(self, samples: Samples) -> bool:
        """Whether the callable raises or takes too long."""
        attempt = self.attempt(samples)
        return not attempt.done() or attempt.exception() is not None


class FunctionReward(CallableReward):
    """Scores from the Python function that a configuration names.

    Args:
        path: `package.module:name` of it.
        tokenizer: The policy's.
        timeout: Seconds that a call may take; `None`: as long as it likes.
    """

    def __init__(
        self, path: str, tokenizer: PreTrainedTokenizerBase, timeout: float | None = None
    ) -> None:
        super().__init__(f"reward function {path!r}", load_function(path), tokenizer, timeout)


class ModelReward(nn.Module):
    """Scores from a frozen reward model that shares the policy's tokenizer.

    Args:
        path: Its folder or hub id.
        options: How it is loaded, LoRA and gradient checkpointing apart.
        offload: Keep it in CPU memory between uses.
    """

    model: LanguageModel | Offloaded

    def __init__(self, path: str, options: ModelOptions, offload: bool = False) -> None:
        super().__init__()
        self.path = path
        # The policy's adapters and checkpointing are for training; a reward model is used as it is.
        plain = replace(options, lora_rank=0, gradient_checkpointing=False)
        model = freeze(load_scalar_model(path, plain))
        self.model = Offloaded(model) if offload else model
        self.trust_remote_code = options.trust_remote_code

    @torch.no_grad()
    def forward(
        self, rollouts: RolloutBatch, prompts: Sequence[str], max_tokens_per_forward: int | None
    ) -> Tensor:
        """Scores `[B]`, float32, read at each response's last token."""
        with on_device(self.model, rollouts.response_ids.device) as model:
            return torch.cat(
                [
                    sequence_scores(model, part.sequence_ids, part.sequence_mask)
                    for part in rollouts.split(max_tokens_per_forward)
                ]
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
