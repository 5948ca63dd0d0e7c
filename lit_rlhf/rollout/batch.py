"""Prompts with sampled responses as tensors, and the experience of one PPO iteration.

Notation: `B` samples, `P` prompt tokens, `T` response tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lit_rlhf.checks import check_count

# a forward without gradients of this many tokens keeps the device busy and still fits its memory
CPU_TOKENS_PER_FORWARD = 2048
GPU_TOKENS_PER_FORWARD = 16384


def default_tokens_per_forward(device: torch.device) -> int:
    """Real tokens per forward without gradients where the caller sets no limit."""
    return CPU_TOKENS_PER_FORWARD if device.type == "cpu" else GPU_TOKENS_PER_FORWARD


def split_by_tokens(lengths: Sequence[int], max_tokens: int) -> Iterator[slice]:
    """Split rows of `lengths` tokens into consecutive parts of at most `max_tokens`, or one row."""
    start = 0
    tokens = 0
    for row, length in enumerate(lengths):
        if row > start and tokens + length > max_tokens:
            yield slice(start, row)
            start = row
            tokens = 0
        tokens += length
    yield slice(start, len(lengths))


class PolicyStatistics(NamedTuple):
    """Log-probs and entropies of responses under a policy, at one temperature.

    Attributes:
        logprobs: `[B, T]` float32, nats; 0 outside the response mask.
        entropy: Entropy of the distribution over each token, `[B, T]` float32, nats; 0 outside the
            response mask.
        temperature: Temperature of the distributions.
    """

    logprobs: Tensor
    entropy: Tensor
    temperature: float


class RolloutBatch(NamedTuple):
    """`B` prompts with one sampled response each.

    Attributes:
        prompt_ids: Prompts, `[B, P]` long, padded on the left.
        prompt_mask: Tokens of the prompts, `[B, P]` bool.
        response_ids: Responses, `[B, T]` long, padded on the right.
        response_mask: Tokens of the responses, EOS included, `[B, T]` bool: a prefix of each row
            with at least one token.
        terminated: Whether a response ended by EOS, `[B]` bool. Others were cut off at the length
            limit.
        statistics: Statistics under the policy that sampled; `None` where sampling computed them
            less precisely than a separate forward.
        sampler_logprobs: Log-probs of the distribution that the tokens were drawn from, `[B, T]`
            nats, 0 outside the response mask; `None` where it was the policy itself, or is not
            known.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    response_mask: Tensor
    terminated: Tensor
    statistics: PolicyStatistics | None = None
    sampler_logprobs: Tensor | None = None

    @property
    def sequence_ids(self) -> Tensor:
        """Prompts followed by responses, `[B, P+T]` long."""
        return torch.cat([self.prompt_ids, self.response_ids], dim=1)

    @property
    def sequence_mask(self) -> Tensor:
        """Prompt and response tokens, `[B, P+T]` bool."""
        return torch.cat([self.prompt_mask, self.response_mask], dim=1)

    @property
    def sequence_shape(self) -> torch.Size:
        """Number of sequences and tokens of each, `(B, P+T)`."""
        n_tokens = self.prompt_ids.shape[1] + self.response_ids.shape[1]
        return torch.Size((len(self.prompt_ids), n_tokens))

    @property
    def lengths(self) -> Tensor:
        """Tokens of each response, EOS included, `[B]` long."""
        return self.response_mask.sum(dim=1)

    def to_sequence_mask(self, response_mask: Tensor) -> Tensor:
        """Extend a mask of response tokens `[B, T]` to `[B, P+T]`; False on the prompt."""
        return torch.cat([torch.zeros_like(self.prompt_mask), response_mask], dim=1)

    def statistics_at(self, temperature: float) -> PolicyStatistics | None:
        """The policy's statistics, or `None` unless they were computed at this temperature."""
        if self.statistics is None or self.statistics.temperature != temperature:
            return None
        return self.statistics

    def split(self, max_tokens_per_forward: int | None = None) -> Iterator["RolloutBatch"]:
        """Split into parts of consecutive samples, without statistics.

        Args:
            max_tokens_per_forward: Real tokens of a part, at most; a part has one sample at least.
                `None` takes 2048 on a CPU and 16384 on a GPU.
        """
        limit = max_tokens_per_forward
        if limit is None:
            limit = default_tokens_per_forward(self.prompt_ids.device)
        check_count("max_tokens_per_forward", limit)
        for rows in split_by_tokens(self.sequence_mask.sum(dim=1).tolist(), limit):
            yield self.select(rows)

    def select(
        self, rows: slice | Tensor, prompt: slice = slice(None), response: slice = slice(None)
    ) -> "RolloutBatch":
        """Select samples, and columns of them, without statistics.

        Args:
            rows: The samples, as a slice or `[n]` long.
            prompt: Columns of the prompts.
            response: Columns of the responses.
        """
        return RolloutBatch(
            prompt_ids=self.prompt_ids[rows, prompt],
            prompt_mask=self.prompt_mask[rows, prompt],
            response_ids=self.response_ids[rows, response],
            response_mask=self.response_mask[rows, response],
            terminated=self.terminated[rows],
        )


SEQUENCE_FIELDS = ("policy_lower", "critic_lower")
"""Fields of `Experience` that are `[B, P+T, H]`, if they are there."""
TOKEN_FIELDS = (
    "old_logprobs",
    "old_values",
    "advantages",
    "returns",
    "loss_mask",
    "ref_logprobs",
    "importance",
)
"""Fields of `Experience` that are `[B, T]`, if they are there."""


@dataclass(frozen=True)
class Experience:
    """`B` scored responses: everything that the update of policy and critic reads.

    Attributes:
        rollouts: Prompts and responses.
        old_logprobs: Log-probs of the policy that the ratio is taken against, `[B, T]` nats.
        old_values: The critic's V(s_t) before the update, `[B, T]`.
        advantages: `[B, T]`.
        returns: Targets of the critic, `[B, T]`; without one, the advantages.
        loss_mask: Tokens to learn from, `[B, T]` bool: the response's, except for responses that
            the truncation rule leaves out.
        policy_lower: See `TokenStatistics`.
        critic_lower: See `TokenStatistics`.
        ref_logprobs: Log-probs of the reference, `[B, T]` nats, where the loss needs them.
        weights: Weights of the responses in the policy's loss, `[B]`, see `response_weights`;
            `None`: 1.
        importance: Weights of the tokens that another distribution than the policy drew, `[B, T]`,
            see `truncated_importance`; `None`: 1.
    """

    rollouts: RolloutBatch
    old_logprobs: Tensor
    old_values: Tensor
    advantages: Tensor
    returns: Tensor
    loss_mask: Tensor
    policy_lower: Tensor | None = None
    critic_lower: Tensor | None = None
    ref_logprobs: Tensor | None = None
    weights: Tensor | None = None
    importance: Tensor | None = None

    def __len__(self) -> int:
        return len(self.loss_mask)

    def select(self, index: Tensor) -> "Experience":
        """Select the samples at `index`, without columns that are padding in all of them."""
        rows = self.rollouts.select(index)
        first = int(rows.prompt_mask.any(0).int().argmax())  # prompts are padded on the left
        length = max(int(rows.lengths.max()), 1)
        response_columns = slice(length)
        sequence_columns = slice(first, rows.prompt_ids.shape[1] + length)
        parts: dict[str, Tensor] = {}
        for name in TOKEN_FIELDS + SEQUENCE_FIELDS:
            if (values := getattr(self, name)) is not None:
                columns = sequence_columns if name in SEQUENCE_FIELDS else response_columns
                parts[name] = values[index, columns]
        rollouts = rows.select(slice(None), prompt=slice(first, None), response=response_columns)
        weights = None if self.weights is None else self.weights[index]
        return replace(self, rollouts=rollouts, weights=weights, **parts)


def check_minibatch_size(n_samples: int, *, size: int) -> None:
    """Raise ValueError unless `n_samples` can be split into minibatches of `size` samples.

    Samples of a smaller last minibatch would weigh more than the others.
    """
    if size < 1 or n_samples % size:
        raise ValueError(
            f"minibatch_size: expected a divisor of the {n_samples} rollouts of an iteration "
            f"(data.batch_size times responses_per_prompt), got {size}"
        )


def iterate_minibatches(
    n_samples: int, *, size: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """Iterate over the samples of a rank once, in random minibatches of indices `[size]`.

    Args:
        n_samples: Number of samples of the rank.
        size: Samples of a minibatch; a divisor of `n_samples`.
        generator: Draws the order.
    """
    check_minibatch_size(n_samples, size=size)
    order = torch.randperm(n_samples, generator=generator)
    for start in range(0, n_samples, size):
        yield order[start : start + size]
