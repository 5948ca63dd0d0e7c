"""What the networks say of responses that were sampled: log-probs, entropies, values.

All without gradients and in evaluation mode. Notation: `B` samples, `T` response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lit_rlhf.functional import token_entropy, token_logprobs
from lit_rlhf.models import LanguageModel, evaluating, response_logits, token_values
from lit_rlhf.rollout.batch import RolloutBatch


class ResponseStatistics(NamedTuple):
    """A policy's view of responses.

    Attributes:
        logprobs: Log-probability of each token, `[B, T]` float32, nats; 0 behind the response.
        entropy: Entropy of the distribution the token is from, `[B, T]` float32, nats; alike.
    """

    logprobs: Tensor
    entropy: Tensor


class ResponseValues(NamedTuple):
    """A critic's view of responses.

    Attributes:
        values: V(s_t), read before token t, `[B, T]` float32; 0 behind the response.
        bootstrap_values: V(s_{T+1}), read at each response's last token, `[B]` float32: the value
            of what would follow a response that was cut off; for one that ended use 0.
    """

    values: Tensor
    bootstrap_values: Tensor


@torch.no_grad()
def response_statistics(
    model: LanguageModel,
    rollouts: RolloutBatch,
    temperature: float = 1.0,
    micro_batch_size: int | None = None,
) -> ResponseStatistics:
    """Log-probs and entropies of the responses under a policy.

    Args:
        model: Policy or reference.
        rollouts: Prompts and responses.
        temperature: That of sampling.
        micro_batch_size: Samples per forward; `None` takes all.

    Raises:
        ValueError: If `temperature` or `micro_batch_size` is not positive.
    """
    logprobs, entropy = [], []
    length = rollouts.response_ids.shape[1]
    with evaluating(model):
        for part in _micro_batches(rollouts, micro_batch_size):
            logits = response_logits(model, part.sequence_ids, part.sequence_mask, length)
            logprobs.append(token_logprobs(logits, part.response_ids, temperature))
            entropy.append(token_entropy(logits, temperature))
    outside = ~rollouts.response_mask
    return ResponseStatistics(
        torch.cat(logprobs).masked_fill(outside, 0.0), torch.cat(entropy).masked_fill(outside, 0.0)
    )


@torch.no_grad()
def response_logprobs(
    model: LanguageModel,
    rollouts: RolloutBatch,
    temperature: float = 1.0,
    micro_batch_size: int | None = None,
) -> Tensor:
    """Log-probs of the responses under a policy; as `response_statistics`, without the entropies.

    Args:
        model: Policy or reference.
        rollouts: Prompts and responses.
        temperature: That of sampling.
        micro_batch_size: Samples per forward; `None` takes all.

    Returns:
        `[B, T]` float32, nats; 0 behind the response.

    Raises:
        ValueError: If `temperature` or `micro_batch_size` is not positive.
    """
    logprobs = []
    length = rollouts.response_ids.shape[1]
    with evaluating(model):
        for part in _micro_batches(rollouts, micro_batch_size):
            logits = response_logits(model, part.sequence_ids, part.sequence_mask, length)
            logprobs.append(token_logprobs(logits, part.response_ids, temperature))
    return torch.cat(logprobs).masked_fill(~rollouts.response_mask, 0.0)


@torch.no_grad()
def response_value_estimates(
    model: LanguageModel, rollouts: RolloutBatch, micro_batch_size: int | None = None
) -> ResponseValues:
    """Values of the responses' states under a critic.

    Args:
        model: A scalar model.
        rollouts: Prompts and responses.
        micro_batch_size: Samples per forward; `None` takes all.

    Raises:
        ValueError: If `micro_batch_size` is not positive, or `model` has no scalar head.
    """
    length = rollouts.response_ids.shape[1]
    with evaluating(model):
        readings = torch.cat(
            [
                token_values(model, part.sequence_ids, part.sequence_mask)[:, -length - 1 :]
                for part in _micro_batches(rollouts, micro_batch_size)
            ]
        )
    # reading t is V(s_{t+1}) of the response's token t, and reading 0 that of the last prompt token
    bootstrap = readings.gather(1, rollouts.lengths.unsqueeze(1)).squeeze(1)
    return ResponseValues(
        values=readings[:, :-1].masked_fill(~rollouts.response_mask, 0.0),
        bootstrap_values=bootstrap,
    )


def _micro_batches(rollouts: RolloutBatch, size: int | None) -> Iterator[RolloutBatch]:
    if size is not None and size < 1:
        raise ValueError(f"micro_batch_size: expected an integer >= 1, got {size}")
    n_samples = len(rollouts.response_ids)
    for start in range(0, n_samples, size or n_samples):
        yield RolloutBatch(*(field[start : start + (size or n_samples)] for field in rollouts))
