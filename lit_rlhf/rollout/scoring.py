"""Log-probs, entropies and values of sampled responses, under policy, reference and critic.

Every function here runs its networks without gradients and in evaluation mode. Notation: `B`
samples, `T` response tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from peft import PeftModel
from torch import Tensor

from lit_rlhf.forward import (
    LanguageModel,
    LowerStates,
    Offloaded,
    eval_mode,
    gathered,
    has_lower_layers_of,
    map_target_logits,
    on_device,
    token_values,
    trunk_of,
)
from lit_rlhf.functional import token_logprobs_and_entropy
from lit_rlhf.rollout.batch import PolicyStatistics, RolloutBatch


class TokenStatistics(NamedTuple):
    """Log-probs, entropies and values of responses before an update.

    Tensors are float32. Those of tokens, `[B, T]`, are 0 outside the response mask. Log-probs and
    entropies are at the sampling temperature, in nats.

    Attributes:
        logprobs: Log-probs under the policy, `[B, T]`.
        ref_logprobs: Log-probs under the reference, `[B, T]`.
        entropy: Entropies of the policy's distributions, `[B, T]`.
        values: The critic's V(s_t), read before token t, `[B, T]`; 0 without a critic.
        next_values: V(s_{T+1}), read at each response's last token, `[B]`: an estimate of what
            would follow a response that was cut off. It has no meaning for one that ended.
        ref_prompt_entropy: Entropy of the reference's distribution over the first response token,
            `[B]`: a statistic of the prompt, which no policy changes.
        policy_lower: What the policy's layers below the trained ones give for the sequences,
            `[B, P+T, H]`; `None` where the update computes it.
        critic_lower: The same of the critic.
    """

    logprobs: Tensor
    ref_logprobs: Tensor
    entropy: Tensor
    values: Tensor
    next_values: Tensor
    ref_prompt_entropy: Tensor
    policy_lower: Tensor | None = None
    critic_lower: Tensor | None = None


class ResponseValues(NamedTuple):
    """The critic's values of responses, float32.

    Attributes:
        values: V(s_t), read before token t, `[B, T]`; 0 outside the response mask.
        next_values: V(s_{T+1}), read at each response's last token, `[B]`.
    """

    values: Tensor
    next_values: Tensor


def score_rollouts(
    policy: LanguageModel,
    reference: LanguageModel | Offloaded | None,
    critic: LanguageModel | None,
    rollouts: RolloutBatch,
    *,
    temperature: float = 1.0,
    max_tokens_per_forward: int | None = None,
) -> TokenStatistics:
    """Compute the log-probs, entropies and values that an update needs.

    Args:
        policy: The policy. Its log-probs and entropies are reused from sampling where the rollouts
            have them.
        reference: The reference; `None`: the policy with its LoRA adapters off.
        critic: A scalar model; `None`: values are 0.
        rollouts: Prompts and responses.
        temperature: Temperature that the responses were sampled at, positive.
        max_tokens_per_forward: Real tokens of a forward, at most, see `RolloutBatch.split`.
    """
    mask = rollouts.sequence_mask
    shares_trunk = critic is not None and trunk_of(critic) is trunk_of(policy)
    policy_lower = None if shares_trunk else LowerStates.of(policy, mask)  # it is the critic's
    critic_lower = None if critic is None else LowerStates.of(critic, mask)
    reference_lower = None
    statistics = rollouts.statistics_at(temperature)
    if statistics is None:
        statistics = compute_policy_statistics(
            policy,
            rollouts,
            temperature=temperature,
            max_tokens_per_forward=max_tokens_per_forward,
            lower=policy_lower,
        )
    elif policy_lower and (reference is None or has_lower_layers_of(reference, policy)):
        reference_lower = policy_lower
    if critic is None:
        values = ResponseValues(
            values=torch.zeros_like(statistics.logprobs),
            next_values=statistics.logprobs.new_zeros(len(statistics.logprobs)),
        )
    else:
        with gathered(policy if shares_trunk else critic):
            values = compute_values(critic, rollouts, max_tokens_per_forward, critic_lower)
    reference_statistics = compute_reference_statistics(
        policy,
        reference,
        rollouts,
        temperature=temperature,
        max_tokens_per_forward=max_tokens_per_forward,
        lower=reference_lower,
    )
    return TokenStatistics(
        logprobs=statistics.logprobs,
        ref_logprobs=reference_statistics.logprobs,
        entropy=statistics.entropy,
        values=values.values,
        next_values=values.next_values,
        ref_prompt_entropy=reference_statistics.entropy[:, 0],
        policy_lower=None if policy_lower is None else policy_lower.states(),
        critic_lower=None if critic_lower is None else critic_lower.states(),
    )


@torch.no_grad()
def compute_policy_statistics(
    model: LanguageModel,
    rollouts: RolloutBatch,
    temperature: float = 1.0,
    max_tokens_per_forward: int | None = None,
    lower: LowerStates | None = None,
) -> PolicyStatistics:
    """Compute log-probs and entropies of the responses under a policy.

    Args:
        model: The policy.
        rollouts: Prompts and responses.
        temperature: Temperature of the distributions, positive.
        max_tokens_per_forward: Real tokens of a forward, at most, see `RolloutBatch.split`.
        lower: Keeps what the model's lower layers give.
    """
    length = rollouts.response_ids.shape[1]
    parts = []
    with eval_mode(model):
        for part in rollouts.split(max_tokens_per_forward):
            with lower.recording(model, part.sequence_mask) if lower else nullcontext():
                logprobs, entropy = map_target_logits(
                    model,
                    part.sequence_ids,
                    part.sequence_mask,
                    part.to_sequence_mask(part.response_mask),
                    lambda logits, ids: token_logprobs_and_entropy(logits, ids, temperature),
                )
            parts.append(PolicyStatistics(logprobs, entropy, temperature))
    return PolicyStatistics(
        logprobs=torch.cat([part.logprobs for part in parts])[:, -length:],
        entropy=torch.cat([part.entropy for part in parts])[:, -length:],
        temperature=temperature,
    )


def compute_reference_statistics(
    policy: LanguageModel,
    reference: LanguageModel | Offloaded | None,
    rollouts: RolloutBatch,
    *,
    temperature: float = 1.0,
    max_tokens_per_forward: int | None = None,
    lower: LowerStates | None = None,
) -> PolicyStatistics:
    """Compute log-probs and entropies of the responses under the reference.

    Args:
        policy: The policy.
        reference: The reference. An offloaded one is on the rollouts' device during the forward.
            `None`: the policy with its LoRA adapters off.
        rollouts: Prompts and responses.
        temperature: Temperature of the distributions, positive.
        max_tokens_per_forward: Real tokens of a forward, at most, see `RolloutBatch.split`.
        lower: Keeps what the reference's lower layers give.
    """
    with reference_model(policy, reference, rollouts.response_ids.device) as model:
        return compute_policy_statistics(
            model,
            rollouts,
            temperature=temperature,
            max_tokens_per_forward=max_tokens_per_forward,
            lower=lower,
        )


@contextmanager
def reference_model(
    policy: LanguageModel, reference: LanguageModel | Offloaded | None, device: torch.device
) -> Iterator[LanguageModel]:
    """The network of the reference, ready for use inside the context.

    Args:
        policy: The policy.
        reference: The reference. An offloaded one is on the device inside the context. `None`: the
            policy with its LoRA adapters off.
        device: Where it computes.
    """
    if reference is not None:
        with on_device(reference, device) as network:
            yield network
        return
    if not isinstance(policy, PeftModel):
        raise ValueError(
            "reference: expected a model, or None for a policy with LoRA adapters, got None and a "
            f"{type(policy).__name__} without adapters"
        )
    # gathered while adapters require gradients: what it is then decides on how they are reduced
    with gathered(policy), policy.disable_adapter():
        yield policy


@torch.no_grad()
def compute_values(
    model: LanguageModel,
    rollouts: RolloutBatch,
    max_tokens_per_forward: int | None = None,
    lower: LowerStates | None = None,
) -> ResponseValues:
    """Compute the critic's values of the responses.

    Args:
        model: The critic, a scalar model.
        rollouts: Prompts and responses.
        max_tokens_per_forward: Real tokens of a forward, at most, see `RolloutBatch.split`.
        lower: Keeps what the model's lower layers give.
    """
    length = rollouts.response_ids.shape[1]
    parts = []
    with eval_mode(model):
        for part in rollouts.split(max_tokens_per_forward):
            with lower.recording(model, part.sequence_mask) if lower else nullcontext():
                values = token_values(model, part.sequence_ids, part.sequence_mask)
            parts.append(values[:, -length - 1 :])
    # Column 0 is the last prompt token, whose value is V(s_1); column t is response token t, whose
    # value is V(s_{t+1}). So the columns before the last are read before each token, and the value
    # at column `length of the response` follows its last token.
    after_tokens = torch.cat(parts)
    return ResponseValues(
        values=after_tokens[:, :-1].masked_fill(~rollouts.response_mask, 0.0),
        next_values=after_tokens.gather(1, rollouts.lengths.unsqueeze(1)).squeeze(1),
    )
