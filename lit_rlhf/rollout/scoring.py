"""Log-probs, entropies and values of sampled responses, under policy, reference and critic.

Every function here runs its networks without gradients and in evaluation mode. Notation: `B`
samples, `T` response tokens.
"""

from contextlib import nullcontext
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
    """Log-probs, entropies and values of responses before an update; 0 outside the response mask.

    They are float32, `[B, T]` at the sampling temperature in nats (`values`: the critic's V(s_t),
    read before token t; 0 without a critic) but for these:

    Attributes:
        next_values: V(s_{T+1}), read at each response's last token, `[B]`: an estimate of what
            would follow a response that was cut off. It has no meaning for one that ended.
        ref_prompt_entropy: Entropy of the reference's distribution over the first response token,
            `[B]`, nats: a statistic of the prompt, which no policy changes.
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


def score_rollouts(
    policy: LanguageModel,
    reference: LanguageModel | Offloaded | None,
    critic: LanguageModel | None,
    rollouts: RolloutBatch,
    temperature: float = 1.0,
    max_tokens_per_forward: int | None = None,
) -> TokenStatistics:
    """Compute the log-probs, entropies and values that an update needs.

    The policy's log-probs and entropies are reused from sampling where the rollouts have them.
    Without a reference, it is the policy with its LoRA adapters off. The critic is a scalar model,
    and `max_tokens_per_forward` limits real tokens, see `RolloutBatch.split`.
    """
    limit, mask = max_tokens_per_forward, rollouts.sequence_mask
    shares_trunk = critic is not None and trunk_of(critic) is trunk_of(policy)
    policy_lower = None if shares_trunk else LowerStates.of(policy, mask)  # it is the critic's
    critic_lower = None if critic is None else LowerStates.of(critic, mask)
    statistics = rollouts.statistics_at(temperature)
    of_reference = None
    if statistics is None:
        statistics = compute_policy_statistics(policy, rollouts, temperature, limit, policy_lower)
    elif policy_lower and (reference is None or has_lower_layers_of(reference, policy)):
        of_reference = policy_lower
    if critic is None:
        values = torch.zeros_like(statistics.logprobs)
        next_values = values.new_zeros(len(values))
    else:
        with gathered(policy if shares_trunk else critic):
            values, next_values = compute_values(critic, rollouts, limit, critic_lower)
    ref = compute_reference_statistics(
        policy, reference, rollouts, temperature, limit, of_reference
    )
    return TokenStatistics(
        statistics.logprobs,
        ref.logprobs,
        statistics.entropy,
        values,
        next_values,
        ref.entropy[:, 0],
        *(None if lower is None else lower.states() for lower in (policy_lower, critic_lower)),
    )


@torch.no_grad()
def compute_policy_statistics(
    model: LanguageModel,
    rollouts: RolloutBatch,
    temperature: float = 1.0,
    max_tokens_per_forward: int | None = None,
    lower: LowerStates | None = None,
) -> PolicyStatistics:
    """Compute log-probs and entropies of the responses under a policy; `lower` keeps its states."""
    length = rollouts.response_ids.shape[1]
    parts = []
    with eval_mode(model):
        for part in rollouts.split(max_tokens_per_forward):
            targets = part.to_sequence_mask(part.response_mask)
            with lower.recording(model, part.sequence_mask) if lower else nullcontext():
                computed = map_target_logits(
                    model,
                    part.sequence_ids,
                    part.sequence_mask,
                    targets,
                    lambda logits, ids: token_logprobs_and_entropy(logits, ids, temperature),
                )
            parts.append(computed)
    logprobs, entropy = (torch.cat(of)[:, -length:] for of in zip(*parts, strict=True))
    return PolicyStatistics(logprobs, entropy, temperature)


def compute_reference_statistics(
    policy: LanguageModel,
    reference: LanguageModel | Offloaded | None,
    rollouts: RolloutBatch,
    temperature: float = 1.0,
    max_tokens_per_forward: int | None = None,
    lower: LowerStates | None = None,
) -> PolicyStatistics:
    """Compute log-probs and entropies of the responses under the reference.

    An offloaded reference is on the rollouts' device during the forward. `None` takes the policy
    with its LoRA adapters off.
    """
    arguments = (rollouts, temperature, max_tokens_per_forward, lower)
    if reference is not None:
        with on_device(reference, rollouts.response_ids.device) as network:
            return compute_policy_statistics(network, *arguments)
    if not isinstance(policy, PeftModel):
        raise ValueError(
            "reference: expected a model, or None for a policy with LoRA adapters, got None and a "
            f"{type(policy).__name__} without adapters"
        )
    # gathered while adapters require gradients: what it is then decides on how they are reduced
    with gathered(policy), policy.disable_adapter():
        return compute_policy_statistics(policy, *arguments)


@torch.no_grad()
def compute_values(
    model: LanguageModel,
    rollouts: RolloutBatch,
    max_tokens_per_forward: int | None = None,
    lower: LowerStates | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `values` and `next_values` of `TokenStatistics`."""
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
    next_values = after_tokens.gather(1, rollouts.lengths.unsqueeze(1)).squeeze(1)
    return after_tokens[:, :-1].masked_fill(~rollouts.response_mask, 0.0), next_values
