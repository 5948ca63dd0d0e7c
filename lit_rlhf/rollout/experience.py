"""The experience of one PPO iteration, and its minibatches.

Notation: `B` samples, `P` prompt tokens, `T` response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_rlhf.rollout.batch import RolloutBatch


@dataclass(frozen=True)
class Experience:
    """`B` scored responses: everything that the update of policy and critic reads.

    Attributes:
        rollouts: Prompts and responses.
        old_logprobs: Log-probs of the policy that the ratio is taken against, `[B, T]` nats.
        old_values: The critic's V(s_t) before the update, `[B, T]`.
        advantages: Of GAE, `[B, T]`.
        returns: Targets of the critic, `[B, T]`.
        loss_mask: Tokens to learn from, `[B, T]` bool: the response's, except for responses that
            the truncation rule leaves out.
    """

    rollouts: RolloutBatch
    old_logprobs: Tensor
    old_values: Tensor
    advantages: Tensor
    returns: Tensor
    loss_mask: Tensor

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.loss_mask)

    def select(self, index: Tensor) -> Experience:
        """The samples at `index`, without the columns that are padding in all of them."""
        prompt_mask = self.rollouts.prompt_mask[index]
        response_mask = self.rollouts.response_mask[index]
        first = int(prompt_mask.any(0).int().argmax())  # prompts are padded on the left
        length = max(int(response_mask.sum(1).max()), 1)
        rollouts = RolloutBatch(
            prompt_ids=self.rollouts.prompt_ids[index, first:],
            prompt_mask=prompt_mask[:, first:],
            response_ids=self.rollouts.response_ids[index, :length],
            response_mask=response_mask[:, :length],
            terminated=self.rollouts.terminated[index],
        )
        return Experience(
            rollouts,
            old_logprobs=self.old_logprobs[index, :length],
            old_values=self.old_values[index, :length],
            advantages=self.advantages[index, :length],
            returns=self.returns[index, :length],
            loss_mask=self.loss_mask[index, :length],
        )


def check_minibatch_size(n_samples: int, size: int) -> None:
    """Check that the samples of an iteration can be cut into minibatches of one size.

    Raises:
        ValueError: If `size` does not divide `n_samples`.
    """
    if size < 1 or n_samples % size:
        raise ValueError(
            f"minibatch_size: expected a divisor of the {n_samples} rollouts of an iteration "
            f"(data.batch_size times responses_per_prompt), got {size}"
        )


def iterate_minibatches(n_samples: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Iterate over the samples once, in random minibatches.

    Args:
        n_samples: Samples of the iteration on this rank.
        size: Samples of a minibatch.
        generator: Source of the order.

    Yields:
        Indices of samples, `[size]` long.

    Raises:
        ValueError: If `size` does not divide `n_samples`: samples of a smaller last minibatch would
            weigh more than the others.
    """
    check_minibatch_size(n_samples, size)
    order = torch.randperm(n_samples, generator=generator)
    for start in range(0, n_samples, size):
        yield order[start : start + size]
