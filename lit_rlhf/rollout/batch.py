"""Prompts with sampled responses, as tensors.

Notation: `B` samples, `P` prompt tokens, `T` response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# a forward without gradients of this many tokens keeps the device busy and still fits its memory
CPU_TOKENS_PER_FORWARD, GPU_TOKENS_PER_FORWARD = 2048, 16384


def default_tokens_per_forward(device: torch.device) -> int:
    """Real tokens per forward without gradients where the caller sets no limit."""
    return CPU_TOKENS_PER_FORWARD if device.type == "cpu" else GPU_TOKENS_PER_FORWARD


def split_by_tokens(lengths: Sequence[int], max_tokens: int) -> Iterator[slice]:
    """Split rows into consecutive parts of at most `max_tokens` tokens, or of a single row.

    Args:
        lengths: Tokens of each row.
        max_tokens: Limit of a part. A row that is longer forms a part by itself.

    Yields:
        Ranges of rows.
    """
    start, tokens = 0, 0
    for row, length in enumerate(lengths):
        if row > start and tokens + length > max_tokens:
            yield slice(start, row)
            start, tokens = row, 0
        tokens += length
    yield slice(start, len(lengths))


class PolicyStatistics(NamedTuple):
    """Log-probs and entropies of responses under a policy.

    Attributes:
        logprobs: Log-prob of each token, `[B, T]` float32, nats; 0 outside the response mask.
        entropy: Entropy of the distribution that each token was sampled from, `[B, T]` float32,
            nats; 0 outside the response mask.
        temperature: Sampling temperature that both were computed at.
    """

    logprobs: Tensor
    entropy: Tensor
    temperature: float


class RolloutBatch(NamedTuple):
    """`B` prompts with one sampled response each.

    Attributes:
        prompt_ids: `[B, P]` long, padded on the left.
        prompt_mask: Prompt tokens, `[B, P]` bool.
        response_ids: `[B, T]` long, padded on the right.
        response_mask: Response tokens, `[B, T]` bool: a prefix of each row with at least one token,
            EOS included.
        terminated: Whether the response ended with EOS, `[B]` bool; otherwise it was cut off at
            the length limit.
        statistics: Log-probs and entropies under the policy that sampled the responses. `None`
            where sampling computed them less precisely than a separate forward would.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    response_mask: Tensor
    terminated: Tensor
    statistics: PolicyStatistics | None = None

    @property
    def sequence_ids(self) -> Tensor:
        """Prompts followed by responses, `[B, P+T]` long."""
        return torch.cat([self.prompt_ids, self.response_ids], dim=1)

    @property
    def sequence_mask(self) -> Tensor:
        """Prompt and response tokens, `[B, P+T]` bool."""
        return torch.cat([self.prompt_mask, self.response_mask], dim=1)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each response, EOS included, `[B]` long."""
        return self.response_mask.sum(dim=1)

    def to_sequence_mask(self, response_mask: Tensor) -> Tensor:
        """Extend a mask of response tokens to the whole sequence; False on the prompt.

        Args:
            response_mask: `[B, T]` bool.

        Returns:
            `[B, P+T]` bool.
        """
        return torch.cat([torch.zeros_like(self.prompt_mask), response_mask], dim=1)

    def statistics_at(self, temperature: float) -> PolicyStatistics | None:
        """The policy's statistics, or `None` unless they were computed at this temperature."""
        if self.statistics is None or self.statistics.temperature != temperature:
            return None
        return self.statistics

    def split(self, max_tokens_per_forward: int | None = None) -> Iterator[RolloutBatch]:
        """Split into consecutive samples for one forward each.

        Args:
            max_tokens_per_forward: Limit on the real tokens of a part; a longer sample forms a part
                by itself. `None` takes 2048 on a CPU and 16384 on a GPU.

        Yields:
            Rollouts with all columns.

        Raises:
            ValueError: If `max_tokens_per_forward` is below 1.
        """
        limit = max_tokens_per_forward
        if limit is None:
            limit = default_tokens_per_forward(self.prompt_ids.device)
        if limit < 1:
            raise ValueError(f"max_tokens_per_forward: expected an integer >= 1, got {limit}")
        for rows in split_by_tokens(self.sequence_mask.sum(dim=1).tolist(), limit):
            yield self.select(rows)

    def select(self, rows: slice) -> RolloutBatch:
        """The samples at `rows`, with all columns."""
        return self.map(lambda tensor: tensor[rows])

    def map(self, function: Callable[[Tensor], Tensor]) -> RolloutBatch:
        """Apply `function` to every tensor."""
        statistics = self.statistics
        if statistics is not None:
            statistics = statistics._replace(
                logprobs=function(statistics.logprobs), entropy=function(statistics.entropy)
            )
        return RolloutBatch(
            prompt_ids=function(self.prompt_ids),
            prompt_mask=function(self.prompt_mask),
            response_ids=function(self.response_ids),
            response_mask=function(self.response_mask),
            terminated=function(self.terminated),
            statistics=statistics,
        )
