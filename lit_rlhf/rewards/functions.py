"""Reward functions: plain Python callables as rewards, with a time limit and readable failures.

Notation: `B` responses.
"""

import asyncio
import inspect
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from time import monotonic
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lit_rlhf.errors import UserError
from lit_rlhf.imports import function_path, import_function
from lit_rlhf.rewards.process_guard import guard_process, keep_random_numbers
from lit_rlhf.rewards.scores import Votes
from lit_rlhf.rollout import RolloutBatch, decode_responses
from lit_rlhf.terminal import shorten
from lit_rlhf.time_limit import call_with_timeout

_SEARCH_SECONDS = 10.0  # that the search for the sample behind an error takes at most
_OPTIONAL_ARGUMENTS = ("terminated", "lengths")  # columns of `Samples`, by a parameter's name


class RewardFunction(Protocol):
    """A user's reward: rendered prompts and decoded responses in, one score each out.

    `None` in place of a score is an abstention: the reward has no vote for that response, and the
    sum is over the others.

    It may be an `async def`, which is awaited in a new event loop for each call.

    A parameter `terminated` gets which responses ended with EOS (a list of bool), `lengths` the
    tokens of each response, EOS included (a list of int). A parameter of any other name gets the
    field of that name of each prompt's record (a list, with `None` where a record does not have
    it), and a `**` parameter gets all fields. An object may instead name the fields that it needs
    in an attribute `record_fields`, and take them by `**`.
    """

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> Sequence[float | None]:
        """Score `responses` to `prompts`."""


class RewardError(UserError):
    """Raised by a reward function whose message already names the response or request at fault.

    After any other exception `CallableReward` calls the function on one response at a time, to
    find the one that fails.
    """


class Samples(NamedTuple):
    """Rollouts as a reward function sees them, each column with `B` entries.

    Attributes:
        prompts: Rendered prompts.
        responses: Responses, decoded without special tokens.
        terminated: Whether each response ended with EOS.
        lengths: Tokens of each response, EOS included.
        records: Fields of each prompt's record by name.
    """

    prompts: list[str]
    responses: list[str]
    terminated: list[bool]
    lengths: list[int]
    records: list[Mapping[str, Any]]

    def describe(self, row: int) -> str:
        """Prompt and response of a sample for a message, shortened."""
        return f"prompt {shorten(self.prompts[row])} and response {shorten(self.responses[row])}"


class CallableReward(nn.Module):
    """Scores from a callable: a ready-made rule, or a function.

    Args:
        function: The callable, or a function as `package.module:function`.
        tokenizer: The policy's tokenizer, which decodes the responses.
        timeout: Seconds that a call may take; it then runs in another thread, see
            `call_with_timeout`. `None`: no limit.
        label: Name of the reward in messages. Default: the function's path.
    """

    def __init__(
        self,
        function: str | Callable[..., Any],
        tokenizer: PreTrainedTokenizerBase,
        *,
        timeout: float | None = None,
        label: str = "",
    ) -> None:
        super().__init__()
        if isinstance(function, str):
            path = function
            function = _import_guarded(path)
        else:
            path = function_path(function)
        self.label = label or f"reward function {path!r}"  # for messages
        self.function = function
        self.tokenizer = tokenizer
        self.timeout = timeout
        parameters = list(inspect.signature(function).parameters.values())
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        others = [p for p in parameters[2:] if p in named and p.name not in _OPTIONAL_ARGUMENTS]
        self.optional_arguments = [p.name for p in named if p.name in _OPTIONAL_ARGUMENTS]
        self.required_fields = [p.name for p in others if p.default is p.empty]
        self.required_fields += getattr(function, "record_fields", ())
        self.optional_fields = [p.name for p in others if p.default is not p.empty]
        takes_others = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.takes_all_fields = takes_others and not hasattr(function, "record_fields")
        # names of other arguments, which a `**` parameter cannot get
        self._taken = {"prompts", "responses", *_OPTIONAL_ARGUMENTS, *(p.name for p in named)}

    def forward(
        self,
        rollouts: RolloutBatch,
        prompts: Sequence[str],
        max_tokens_per_forward: int | None = None,
        records: Sequence[Mapping[str, Any]] = (),
    ) -> Tensor:
        """Score rollouts, as `vote` does.

        Args:
            rollouts: `B` responses.
            prompts: Rendered prompts, `B` of them.
            max_tokens_per_forward: Not used: only a reward model has forwards.
            records: Fields of each prompt's record by name; empty for none.

        Returns:
            Scores `[B]`, float32; NaN for an abstention.
        """
        return self.vote(rollouts, prompts, records).scores

    def vote(
        self,
        rollouts: RolloutBatch,
        prompts: Sequence[str],
        records: Sequence[Mapping[str, Any]] = (),
    ) -> Votes:
        """Score rollouts, and tell abstentions from scores.

        A score that is not finite is reported by a warning.

        Args:
            rollouts: `B` responses, which the callable gets all at once.
            prompts: Rendered prompts, `B` of them.
            records: Fields of each prompt's record by name; empty for none.
        """
        samples = decode_samples(rollouts, prompts, self.tokenizer, records)
        if not any(samples.records):
            self.check_fields((), "the prompts")
        returned = self._call(samples)
        expected = f"expected {len(prompts)} scores, one for each response"
        call = _describe_call(samples)
        try:
            scores, mask = _read_votes(returned)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(
                f"{self.label}: {expected}, got {returned!r:.100}; called with {call}"
            ) from error
        if scores.shape != (len(prompts),):
            raise ValueError(
                f"{self.label}: {expected}, got shape {tuple(scores.shape)}; called with {call}"
            )
        warn_about_non_finite(self.label, scores.masked_fill(~mask, 0.0), samples)
        device = rollouts.response_ids.device
        return Votes(scores.float().to(device), mask.to(device))

    def check_fields(self, available: Collection[str], where: str) -> None:
        """Check that the records `where` have every field that the callable needs."""
        if missing := [name for name in self.required_fields if name not in available]:
            fields = f"have {', '.join(sorted(available))}" if available else "have no fields"
            raise ValueError(
                f"{self.label}: expected records with the field {missing[0]!r}, which it takes as "
                f"an argument, but {where} {fields}; rename the argument or the field, or give a "
                "parameter that it can do without a default"
            )

    def _call(self, samples: Samples) -> Any:  # noqa: ANN401  # whatever the callable returns
        with keep_random_numbers(_hash_call(samples)):
            attempt = call_with_timeout(partial(self._call_guarded, samples), self.timeout)
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
        raise RewardError(
            f"{self.label} raised {type(error).__name__}: {error}. Called with "
            f"{self._find_culprit(samples) or f'{call}; none fails alone'}"
        ) from error

    def _call_guarded(self, samples: Samples) -> Any:  # noqa: ANN401  # whatever it returns
        """Call the function on copies; raise `RewardError` if it changes them or the process."""
        names = ("prompts", "responses", *self.optional_arguments)
        copies = {name: list(getattr(samples, name)) for name in names}
        # with a time limit the end may come late, when the process has moved on
        with guard_process(restore=self.timeout is None) as changes, _no_exit():
            returned = self.function(
                copies["prompts"],
                copies["responses"],
                **{name: copies[name] for name in self.optional_arguments},
                **self._fields(samples),
            )
            if inspect.isawaitable(returned):
                # In a new thread: a notebook's has a loop already. `run` takes only coroutines.
                coroutine = asyncio.wait_for(returned, timeout=None)
                with ThreadPoolExecutor(1) as thread:
                    returned = thread.submit(asyncio.run, coroutine).result()
        if changes:
            raise RewardError(
                f"expected a function that leaves {changes[0]} as it is, got one that changes it"
            )
        for name, copy in copies.items():
            if copy != getattr(samples, name):
                raise RewardError(
                    f"expected a function that leaves its argument {name!r} as it is, got one that "
                    "changes it; let it work on a copy"
                )
        return returned

    def _fields(self, samples: Samples) -> dict[str, list[Any]]:
        """Copy the columns of the records that the callable gets."""
        present = {name for record in samples.records for name in record}
        names = {*self.required_fields, *(name for name in self.optional_fields if name in present)}
        if self.takes_all_fields:
            names |= present - self._taken
        return {
            name: [deepcopy(record.get(name)) for record in samples.records]
            for name in sorted(names)
        }

    def _find_culprit(self, samples: Samples) -> str:
        """Describe the first sample that raises or takes too long by itself; empty for none.

        The search ends after `_SEARCH_SECONDS`: the error that it is for is known already.
        """
        deadline = monotonic() + _SEARCH_SECONDS
        for row in range(len(samples.prompts)):
            sample = Samples(*([column[row]] for column in samples))  # type: ignore[arg-type]
            if (seconds_left := deadline - monotonic()) <= 0:
                return ""
            timeout = seconds_left if self.timeout is None else min(self.timeout, seconds_left)
            attempt = call_with_timeout(partial(self._call_guarded, sample), timeout)
            if not attempt.done() or attempt.exception() is not None:
                return samples.describe(row)
        return ""


def _import_guarded(path: str) -> Callable[..., Any]:
    """Import a function, and put back what its module changes in the process."""
    with guard_process() as changed, keep_random_numbers():
        function = import_function(path, "reward function")
    if changed:
        warnings.warn(
            f"importing the reward function {path!r} changes {', '.join(changed)}, which training "
            "uses; this was put back",
            stacklevel=2,
        )
    return function


def _hash_call(samples: Samples) -> int:
    """A seed for the random numbers of a call.

    A run that resumes from a checkpoint, which has the state of torch's, draws the same again.
    """
    seed = crc32(torch.get_rng_state().numpy().tobytes())
    for text in (*samples.prompts, *samples.responses):
        seed = crc32(text.encode("utf-8", "surrogatepass"), seed)
    return seed


def _read_votes(returned: Any) -> Votes:  # noqa: ANN401  # whatever a callable returns
    """Read what a callable returned; a `None` in a list or in an array of objects is no vote."""
    if isinstance(returned, np.ndarray):
        returned = returned.tolist()  # an array with None is one of objects
    abstained: list[bool] = []
    if isinstance(returned, list | tuple):
        abstained = [score is None for score in returned]
    if any(abstained):
        returned = [torch.nan if score is None else score for score in returned]
    # in float64, so that a warning shows a number beyond float32 as it was returned
    scores = torch.as_tensor(returned, dtype=torch.float64)
    mask = torch.ones(scores.shape[:1], dtype=torch.bool)
    return Votes(scores, ~torch.tensor(abstained) if abstained else mask)


@contextmanager
def _no_exit() -> Iterator[None]:
    """Refuse `os._exit`, which would end the run without a word. A fork may end like that."""
    system: Any = os
    end = system._exit
    process = os.getpid()

    def refuse(status: int) -> None:
        if os.getpid() != process:
            end(status)
        raise RewardError(
            f"expected a function that returns, got one that calls os._exit({status})"
        )

    system._exit = refuse
    try:
        yield
    finally:
        system._exit = end


def decode_samples(
    rollouts: RolloutBatch,
    prompts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    records: Sequence[Mapping[str, Any]] = (),
) -> Samples:
    """Decode rollouts for reward functions.

    Args:
        rollouts: `B` responses.
        prompts: Rendered prompts, `B` of them.
        tokenizer: The policy's tokenizer.
        records: Fields of each prompt's record by name; empty for none.
    """
    return Samples(
        prompts=list(prompts),
        responses=decode_responses(rollouts, tokenizer),
        terminated=rollouts.terminated.tolist(),
        lengths=rollouts.lengths.tolist(),
        records=list(records) or [{}] * len(prompts),
    )


def warn_about_non_finite(label: str, scores: Tensor, samples: Samples) -> None:
    """Warn if a score is NaN or infinite, on the rank that has it.

    Args:
        label: Name of the reward.
        scores: Scores `[B]`, of any type; those beyond float32 are infinite in training.
        samples: What was scored.
    """
    if rows := (~torch.isfinite(scores.float())).nonzero().flatten().tolist():
        warnings.warn(
            f"{label}: expected finite scores, got {scores[rows[0]]:g} for "
            f"{samples.describe(rows[0])}; {len(rows)} of {len(scores)} are not finite in float32",
            stacklevel=2,
        )


def _describe_call(samples: Samples) -> str:
    return f"{len(samples.prompts)} responses, the first: {samples.describe(0)}"
