"""Reward functions: plain Python callables as rewards, with a time limit and readable failures.

Notation: `B` responses.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lit_rlhf.imports import import_function
from lit_rlhf.rollout import RolloutBatch, decode_responses
from lit_rlhf.time_limit import call_with_timeout

MAX_SHOWN = 200
"""Characters of a prompt, response or answer that a message shows."""

OPTIONAL_ARGUMENTS = ("terminated", "lengths")
"""Fields of `Samples` that a reward function gets if it has a parameter of that name."""


class RewardFunction(Protocol):
    """A user's reward: rendered prompts and decoded responses in, one score each out.

    A function with a parameter `terminated` also gets which responses ended with EOS (a list of
    bool), one with a parameter `lengths` the tokens of each response, EOS included (a list of int).
    """

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> Sequence[float]:
        """Score `responses` to `prompts`."""


class RewardError(RuntimeError):
    """Raised by a reward function whose message already names the response or request at fault.

    After any other exception `CallableReward` calls the function on one response at a time to find
    the one that fails.
    """


class Samples(NamedTuple):
    """Rollouts as a reward function sees them, each field with `B` entries.

    Attributes:
        prompts: Rendered prompts.
        responses: Decoded responses, without special tokens.
        terminated: Whether a response ended with EOS.
        lengths: Tokens of each response, EOS included.
    """

    prompts: list[str]
    responses: list[str]
    terminated: list[bool]
    lengths: list[int]

    def select(self, row: int) -> Samples:
        """A single sample."""
        return Samples(*([values[row]] for values in self))  # type: ignore[arg-type]  # by field

    def describe(self, row: int) -> str:
        """Prompt and response of a sample for a message, shortened."""
        return f"prompt {shorten(self.prompts[row])} and response {shorten(self.responses[row])}"


class CallableReward(nn.Module):
    """Scores from a callable: a user's function or a ready-made rule.

    Args:
        label: Name in messages.
        function: The callable, see `RewardFunction`.
        tokenizer: The policy's; decodes the responses.
        timeout: Seconds that a call may take; `None` for no limit. With a limit the call runs in
            another thread, see `call_with_timeout`.
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
        parameters = inspect.signature(function).parameters
        self.optional_arguments = [name for name in OPTIONAL_ARGUMENTS if name in parameters]

    def forward(
        self,
        rollouts: RolloutBatch,
        prompts: Sequence[str],
        max_tokens_per_forward: int | None = None,
    ) -> Tensor:
        """Score rollouts; a score that is not finite is reported by a warning.

        Args:
            rollouts: `B` responses.
            prompts: Their rendered prompts.
            max_tokens_per_forward: Not used here: a callable gets all responses at once.

        Returns:
            `[B]` float32.

        Raises:
            RewardError: If the callable changes its arguments or torch's gradient mode.
            RuntimeError: If the callable raises, or calls `sys.exit`; chained to its exception.
            TimeoutError: If the call takes longer than `timeout`.
            ValueError: If it returns anything but one number per response.
        """
        samples = decode_samples(rollouts, prompts, self.tokenizer)
        returned = self._call(samples)
        expected = f"expected {len(prompts)} scores, one for each response"
        call = _describe_call(samples)
        try:
            scores = torch.as_tensor(returned, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{self.label}: {expected}, got {returned!r:.100}; called with {call}"
            ) from error
        if scores.shape != (len(prompts),):
            raise ValueError(
                f"{self.label}: {expected}, got shape {tuple(scores.shape)}; called with {call}"
            )
        warn_about_non_finite(self.label, scores, samples)
        return scores.to(rollouts.response_ids.device)

    def _call(self, samples: Samples) -> Any:  # noqa: ANN401  # whatever the callable returns
        attempt = self._attempt(samples)
        call = _describe_call(samples)
        if not attempt.done():
            raise TimeoutError(
                f"{self.label}: no scores after {self.timeout:g} seconds (reward_timeout) for "
                f"{call}"
            )
        error = attempt.exception()
        if error is None:
            return attempt.result()
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            raise error  # the training step explains it, with the settings that save memory
        if isinstance(error, RewardError):
            raise RewardError(f"{self.label}: {error}") from error
        culprit = self._find_culprit(samples)
        raise RuntimeError(
            f"{self.label} raised {type(error).__name__}: {error}. Called with "
            + (f"{call}; none fails alone" if culprit is None else culprit.describe(0))
        ) from error

    def _attempt(self, samples: Samples) -> Future[Any]:
        return call_with_timeout(partial(self._call_guarded, samples), self.timeout)

    def _call_guarded(self, samples: Samples) -> Any:  # noqa: ANN401  # whatever it returns
        """Call the function on copies, and see that it leaves them and the gradient mode alone.

        Raises:
            RewardError: If it does not.
        """
        names = ("prompts", "responses", *self.optional_arguments)
        prompts, responses, *others = copies = [list(getattr(samples, name)) for name in names]
        optional = dict(zip(self.optional_arguments, others, strict=True))
        grad_enabled = torch.is_grad_enabled()
        try:
            returned = self.function(prompts, responses, **optional)
        finally:
            # without a time limit it runs in the thread that trains
            changes_mode = torch.is_grad_enabled() != grad_enabled
            torch.set_grad_enabled(grad_enabled)
        if changes_mode:
            raise RewardError(
                "expected a function that leaves torch's gradient mode as it is, got one that "
                f"turns it {'off' if grad_enabled else 'on'}; use `with torch.no_grad():` in it"
            )
        for name, copy in zip(names, copies, strict=True):
            if copy != getattr(samples, name):
                raise RewardError(
                    f"expected a function that leaves its argument {name!r} as it is, got one that "
                    "changes it; let it work on a copy"
                )
        return returned

    def _find_culprit(self, samples: Samples) -> Samples | None:
        """Call the function on one sample at a time; the first that raises or takes too long."""
        for row in range(len(samples.prompts)):
            sample = samples.select(row)
            attempt = self._attempt(sample)
            if not attempt.done() or attempt.exception() is not None:
                return sample
        return None


class FunctionReward(CallableReward):
    """Scores from the Python function that a configuration names.

    Args:
        path: `package.module:function`.
        tokenizer: The policy's; decodes the responses.
        timeout: Seconds that a call may take; `None` for no limit.
    """

    def __init__(
        self, path: str, tokenizer: PreTrainedTokenizerBase, timeout: float | None = None
    ) -> None:
        function = import_function(path, "reward function")
        super().__init__(f"reward function {path!r}", function, tokenizer, timeout)


def decode_samples(
    rollouts: RolloutBatch, prompts: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> Samples:
    """Rollouts as text, with what reward functions may ask for."""
    return Samples(
        list(prompts),
        decode_responses(rollouts, tokenizer),
        rollouts.terminated.tolist(),
        rollouts.lengths.tolist(),
    )


def warn_about_non_finite(label: str, scores: Tensor, samples: Samples) -> None:
    """Warn if a score `[B]` is NaN or infinite, on the rank that has it."""
    rows = (~torch.isfinite(scores)).nonzero().flatten().tolist()
    if rows:
        warnings.warn(
            f"{label}: expected finite scores, got {scores[rows[0]]:g} for "
            f"{samples.describe(rows[0])}; {len(rows)} of {len(scores)} are not finite",
            stacklevel=2,
        )


def shorten(text: str) -> str:
    """The beginning of `text`, quoted, for a message."""
    return repr(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")


def _describe_call(samples: Samples) -> str:
    return f"{len(samples.prompts)} responses, the first: {samples.describe(0)}"
