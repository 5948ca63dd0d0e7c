"""What the networks say of responses that were sampled: log-probs, entropies, values.

All without gradients and in evaluation mode. Notation: `B` samples, `T` response tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lit_rlhf.forward import LanguageModel, eval_mode, map_target_logits, token_values
from lit_rlhf.forward.chunked_logits import LogitsFunction
from lit_rlhf.forward.outputs import last_columns
from lit_rlhf.functional import token_logprobs, token_logprobs_and_entropy
from lit_rlhf.rollout.batch import ResponseStatistics, RolloutBatch


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
    max_tokens: int | None = None,
) -> ResponseStatistics:
    """Log-probs and entropies of the responses under a policy.

    Args:
        model: Policy or reference.
        rollouts: Prompts and responses.
        temperature: That of sampling.
        max_tokens: Real tokens per forward, see `RolloutBatch.parts`.

    Raises:
        ValueError: If `temperature` or `max_tokens` is not positive.
    """
    logprobs, entropy = _readings(
        model,
        rollouts,
        lambda logits, ids: token_logprobs_and_entropy(logits, ids, temperature),
        max_tokens,
    )
    return ResponseStatistics(logprobs, entropy, temperature)


@torch.no_grad()
def response_logprobs(
    model: LanguageModel,
    rollouts: RolloutBatch,
    temperature: float = 1.0,
    max_tokens: int | None = None,
) -> Tensor:
    """Log-probs of the responses under a policy; as `response_statistics`, without the entropies.

    Args:
        model: Policy or reference.
        rollouts: Prompts and responses.
        temperature: That of sampling.
        max_tokens: Real tokens per forward, see `RolloutBatch.parts`.

    Returns:
        `[B, T]` float32, nats; 0 behind the response.

    Raises:
        ValueError: If `temperature` or `max_tokens` is not positive.
    """
    (logprobs,) = _readings(
        model,
        rollouts,
        lambda logits, ids: (token_logprobs(logits, ids, temperature),),
        max_tokens,
    )
    return logprobs


@torch.no_grad()
def response_value_estimates(
    model: LanguageModel, rollouts: RolloutBatch, max_tokens: int | None = None
) -> ResponseValues:
    """Values of the responses' states under a critic.

    Args:
        model: A scalar model.
        rollouts: Prompts and responses.
        max_tokens: Real tokens per forward, see `RolloutBatch.parts`.

    Raises:
        ValueError: If `max_tokens` is not positive, or `model` has no scalar head.
    """
    length = rollouts.response_ids.shape[1]
    parts = []
    with eval_mode(model):
        for part in rollouts.parts(max_tokens):
            mask = part.sequence_mask
            asked = last_columns(mask, length + 1)
            values = token_values(model, part.sequence_ids, mask, asked)
            parts.append(values[:, -length - 1 :])
    readings = torch.cat(parts)
    # reading t is V(s_{t+1}) of the response's token t, and reading 0 that of the last prompt token
    bootstrap = readings.gather(1, rollouts.lengths.unsqueeze(1)).squeeze(1)
    return ResponseValues(
        values=readings[:, :-1].masked_fill(~rollouts.response_mask, 0.0),
        bootstrap_values=bootstrap,
    )


def _readings(
    model: LanguageModel, rollouts: RolloutBatch, read: LogitsFunction, max_tokens: int | None
) -> tuple[Tensor, ...]:
    """What is read of the responses' logits, each `[B, T]`."""
    length = rollouts.response_ids.shape[1]
    with eval_mode(model):
        parts = [
            map_target_logits(
                model,
                part.sequence_ids,
                part.sequence_mask,
                part.on_sequence(part.response_mask),
                read,
            )
            for part in rollouts.parts(max_tokens)
        ]
    return tuple(torch.cat(readings)[:, -length:] for readings in zip(*parts, strict=True))
