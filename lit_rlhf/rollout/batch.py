"""What a rollout yields: prompts and sampled responses.

Notation: `B` samples, `P` prompt tokens, `T` response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

CPU_TOKENS, GPU_TOKENS = 2048, 16384


def tokens_at_once(device: torch.device) -> int:
    """Tokens that a network without gradients reads at once: what fills a GPU or fits a CPU."""
    return CPU_TOKENS if device.type == "cpu" else GPU_TOKENS


def consecutive(lengths: Sequence[int], max_tokens: int) -> Iterator[slice]:
    """Cut rows of these lengths into parts of up to `max_tokens`, and of one row at least."""
    start, tokens = 0, 0
    for row, length in enumerate(lengths):
        if row > start and tokens + length > max_tokens:
            yield slice(start, row)
            start, tokens = row, 0
        tokens += length
    yield slice(start, len(lengths))


class ResponseStatistics(NamedTuple):
    """A policy's view of responses.

    Attributes:
        logprobs: Log-probability of each token, `[B, T]` float32, nats; 0 behind the response.
        entropy: Entropy of the distribution the token is from, `[B, T]` float32, nats; alike.
        temperature: That both are at.
    """

    logprobs: Tensor
    entropy: Tensor
    temperature: float


class RolloutBatch(NamedTuple):
    """`B` prompts and a sampled response to each.

    Attributes:
        prompt_ids: `[B, P]` long, padded on the left.
        prompt_mask: Real tokens, `[B, P]` bool.
        response_ids: `[B, T]` long, padded on the right.
        response_mask: Real tokens, `[B, T]` bool: a prefix of each row, EOS included, never empty.
        terminated: Whether the response ended with EOS, `[B]` bool; otherwise it was cut off.
        statistics: What the policy that sampled the responses thought of them, at the temperature
            of sampling, if that is known to the precision of another forward.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    response_mask: Tensor
    terminated: Tensor
    statistics: ResponseStatistics | None = None

    @property
    def sequence_ids(self) -> Tensor:
        """Prompt and response, `[B, P+T]`."""
        return torch.cat([self.prompt_ids, self.response_ids], dim=1)

    @property
    def sequence_mask(self) -> Tensor:
        """Real tokens of prompt and response, `[B, P+T]` bool."""
        return torch.cat([self.prompt_mask, self.response_mask], dim=1)

    def on_sequence(self, response_mask: Tensor) -> Tensor:
        """A mask of response tokens `[B, T]` as one of prompt and response, `[B, P+T]` bool."""
        return torch.cat([torch.zeros_like(self.prompt_mask), response_mask], dim=1)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each response, EOS included, `[B]` long."""
        return self.response_mask.sum(dim=1)

    def known(self, temperature: float) -> ResponseStatistics | None:
        """The statistics, if they are known at this temperature."""
        at_hand = self.statistics
        return at_hand if at_hand is not None and at_hand.temperature == temperature else None

    def parts(self, max_tokens: int | None = None) -> Iterator[RolloutBatch]:
        """Consecutive rows of up to `max_tokens` real tokens, and of one row at least.

        Args:
            max_tokens: `None` takes `tokens_at_once`.

        Raises:
            ValueError: If `max_tokens` is not positive.
        """
        if max_tokens is None:
            max_tokens = tokens_at_once(self.prompt_ids.device)
        if max_tokens < 1:
            raise ValueError(f"max_tokens: expected an integer >= 1, got {max_tokens}")
        for rows in consecutive(self.sequence_mask.sum(dim=1).tolist(), max_tokens):
            yield self.rows(rows)

    def rows(self, rows: slice) -> RolloutBatch:
        """Some of the samples, with all columns."""
        return self.each(lambda tensor: tensor[rows])

    def each(self, function: Callable[[Tensor], Tensor]) -> RolloutBatch:
        """The rollouts with every tensor put through `function`."""
        known = self.statistics
        return RolloutBatch(
            prompt_ids=function(self.prompt_ids),
            prompt_mask=function(self.prompt_mask),
            response_ids=function(self.response_ids),
            response_mask=function(self.response_mask),
            terminated=function(self.terminated),
            statistics=known
            and known._replace(logprobs=function(known.logprobs), entropy=function(known.entropy)),
        )
