"""What policy, reference and critic make of a rollout, before an update."""

from __future__ import annotations

from typing import NamedTuple

from peft import PeftModel
from torch import Tensor

from lit_rlhf.forward import LanguageModel, Offloaded, on_device
from lit_rlhf.rollout.batch import RolloutBatch
from lit_rlhf.rollout.scoring import (
    response_logprobs,
    response_statistics,
    response_value_estimates,
)


class TokenStatistics(NamedTuple):
    """Log-probs and values of `B` responses of up to `T` tokens; 0 behind a response.

    Attributes:
        logprobs: Of the policy at the sampling temperature, `[B, T]` float32, nats.
        ref_logprobs: Of the reference, alike.
        entropy: Of the policy's next-token distributions, `[B, T]` float32, nats.
        values: The critic's V(s_t), read before token t, `[B, T]` float32.
        next_values: V(s_{T+1}), read at the response's last token, `[B]` float32.
    """

    logprobs: Tensor
    ref_logprobs: Tensor
    entropy: Tensor
    values: Tensor
    next_values: Tensor


def reference_logprobs(
    policy: LanguageModel,
    reference: LanguageModel | Offloaded | None,
    rollouts: RolloutBatch,
    temperature: float,
    max_tokens: int | None,
) -> Tensor:
    """Log-probs `[B, T]` of the reference; without one, of the policy with its adapters off.

    Raises:
        ValueError: If there is no reference and the policy has no adapters.
    """
    if reference is not None:
        with on_device(reference, rollouts.response_ids.device) as network:
            return response_logprobs(network, rollouts, temperature, max_tokens)
    if not isinstance(policy, PeftModel):
        raise ValueError(
            f"reference: expected one, or a policy with adapters, got {type(policy).__name__}"
        )
    with policy.disable_adapter():
        return response_logprobs(policy, rollouts, temperature, max_tokens)


def score_rollouts(
    policy: LanguageModel,
    reference: LanguageModel | Offloaded | None,
    critic: LanguageModel,
    rollouts: RolloutBatch,
    temperature: float = 1.0,
    max_tokens: int | None = None,
) -> TokenStatistics:
    """Evaluate rollouts with the three networks, without gradients.

    What the policy thought of its responses when it sampled them is taken where it is known.

    Args:
        policy: The policy that sampled them.
        reference: The SFT policy; `None`: the policy with its LoRA adapters off.
        critic: The critic.
        rollouts: Prompts and responses.
        temperature: That of sampling.
        max_tokens: Real tokens per forward, see `RolloutBatch.parts`.
    """
    statistics = rollouts.known(temperature)
    if statistics is None:
        statistics = response_statistics(policy, rollouts, temperature, max_tokens)
    values = response_value_estimates(critic, rollouts, max_tokens)
    return TokenStatistics(
        statistics.logprobs,
        reference_logprobs(policy, reference, rollouts, temperature, max_tokens),
        statistics.entropy,
        values.values,
        values.bootstrap_values,
    )
