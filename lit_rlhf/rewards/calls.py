"""Calling a reward function: with a time limit, and with reports that name the sample."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from threading import Thread
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_rlhf.rollout.batch import RolloutBatch
from lit_rlhf.rollout.samples import decode_responses

SHOWN = 200  # characters of a text in a message


class RewardError(RuntimeError):
    """A reward function's error that says itself what it was asked: no sample is looked for."""


class Samples(NamedTuple):
    """What a reward function is asked about.

    Attributes:
        prompts: Rendered prompts.
        responses: Decoded responses.
        terminated: Which responses ended by themselves.
        lengths: Tokens of each response, EOS included.
    """

    prompts: list[str]
    responses: list[str]
    terminated: list[bool]
    lengths: list[int]

    def only(self, row: int) -> Samples:
        """One of them."""
        return Samples(*([values[row]] for values in self))  # type: ignore[arg-type]  # by field

    def shown(self, row: int) -> str:
        """One of them for a message, shortened."""
        return (
            f"prompt {shortened(self.prompts[row])} and response {shortened(self.responses[row])}"
        )


def samples_of(
    rollouts: RolloutBatch, prompts: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> Samples:
    """Rollouts as text."""
    return Samples(
        list(prompts),
        decode_responses(rollouts, tokenizer),
        rollouts.terminated.tolist(),
        rollouts.lengths.tolist(),
    )


def shortened(text: str) -> str:
    """The beginning of `text`, quoted."""
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")


def attempted(call: Callable[[], Any], timeout: float | None) -> Future[Any]:
    """Run `call`; what it returned or raised, or a future that is not done where it took too long.

    With a time limit it runs in a daemon thread: Python cannot end a thread, so one that took too
    long runs on until the process ends, which it does not hold up. Torch's current device, autocast
    and gradient mode belong to a thread, and are the defaults in this one.

    Args:
        call: What to run.
        timeout: Seconds; `None` runs it here, as long as it takes.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # raised by who asks for the result
            future.set_exception(error)

    if timeout is None:
        run()
    else:
        Thread(target=run, daemon=True).start()
        wait([future], timeout)
    return future


def warn_of_non_finite(source: str, scores: Tensor, samples: Samples) -> None:
    """Report scores `[B]` that are NaN or infinite, on the rank that has them."""
    rows = (~torch.isfinite(scores)).nonzero().flatten().tolist()
    if rows:
        warnings.warn(
            f"{source}: expected finite scores, got {scores[rows[0]]:g} for "
            f"{samples.shown(rows[0])}; {len(rows)} of {len(scores)} are not finite",
            stacklevel=2,
        )
