"""Losses of the policy, the critic and the reward model, all to minimize (arXiv 2307.04964).

Notation: `B` batch, `T` response tokens. Old log-probs, old values, advantages and returns are
constants of every loss: no gradient flows into them.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lit_rlhf.checks import check_not_negative, check_number, check_positive
from lit_rlhf.functional.kl import kl_estimate
from lit_rlhf.functional.masking import Moments, masked_average, masked_mean, masked_moments
from lit_rlhf.tensor_checks import check_floating, check_ids, check_mask

__all__ = [
    "Aggregation",
    "PairwiseLoss",
    "PolicyLoss",
    "ValueLoss",
    "difference_loss",
    "entropy_loss",
    "explained_variance",
    "kl_penalty_loss",
    "pairwise_reward_loss",
    "policy_gradient_loss",
    "preference_probability",
    "reference_kl_loss",
    "response_weights",
    "reward_model_loss",
    "surrogate_loss",
    "truncated_importance",
    "value_loss",
]

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]
"""Ways to average the losses of tokens, which `response_weights` describes."""

_LARGEST_LOG_RATIO = 80.0  # exp overflows in float32 at 88


class PolicyLoss(NamedTuple):
    """A policy loss and its diagnostics.

    The diagnostics are means over the mask of the call, whatever the denominator, and have no
    graph. For an empty mask all are 0, the loss with a graph.

    Attributes:
        loss: To minimize, 0-dim.
        clip_fraction: Share of tokens whose gradient the clip cut off, 0-dim, in [0, 1].
        approx_kl: Estimate (k3) of KL(old policy || policy), 0-dim, nats per token.
        ratio_mean: Mean probability ratio policy / old policy, 0-dim.
    """

    loss: Tensor
    clip_fraction: Tensor
    approx_kl: Tensor
    ratio_mean: Tensor


class _TokenTerms(NamedTuple):
    """Terms of a policy's loss for each token, `[B, T]` each; finite outside the mask too.

    Attributes:
        ratio: Probability ratio policy / old policy.
        kl: Estimate (k3) of KL(old policy || policy), nats.
        advantages: Advantages, without a graph; 0 outside the mask.
    """

    ratio: Tensor
    kl: Tensor
    advantages: Tensor


def _token_terms(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> _TokenTerms:
    """Compute what the losses need of each token, from tensors `[B, T]`."""
    check_floating(2, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    check_mask(logprobs.shape, mask=mask)
    # before anything else: outside the mask, an infinite value times a gradient of 0 would be NaN
    new, old, weights = (
        x.masked_fill(~mask, 0.0) for x in (logprobs, old_logprobs.detach(), advantages.detach())
    )
    # an infinite ratio would turn the gradient of 0 behind the clip into NaN
    ratio = (new - old).clamp(max=_LARGEST_LOG_RATIO).exp()
    return _TokenTerms(ratio, kl=kl_estimate(old, new, "k3"), advantages=weights)


def surrogate_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    ratio_clip: float | None = 0.2,
    ratio_clip_high: float | None = None,
    dual_clip: float | None = None,
    denominator: Tensor | float | None = None,
) -> PolicyLoss:
    """The clipped surrogate of PPO (Eq. 15), or the unclipped one (the objective of Eq. 13).

    Per token max(-A rho, -A clip(rho, 1 - eps, 1 + eps)) with rho = exp(logprobs - old_logprobs):
    the larger loss of the two, so that leaving the interval gains nothing, while a ratio that has
    left it on the wrong side keeps the gradient that brings it back.

    That gradient has no bound: for A < 0 the loss grows with rho. Dual clip (arXiv 1912.09729,
    Eq. 5) bounds it there: min(max(-A rho, -A clip(rho, 1 - eps, 1 + eps)), -A c).

    Args:
        logprobs: Log-probs under the policy, with a graph, `[B, T]` nats.
        old_logprobs: Log-probs under the policy that the ratio is taken against, `[B, T]` nats.
        advantages: Advantages A, `[B, T]`.
        mask: Tokens to train on, `[B, T]` bool.
        ratio_clip: epsilon of the lower end, 1 - epsilon, in (0, 1), and of the upper end unless
            `ratio_clip_high` is given; `None` for no clipping.
        ratio_clip_high: epsilon of the upper end, 1 + epsilon, positive; `None` takes `ratio_clip`.
        dual_clip: c, above 1; `None` for no bound.
        denominator: Divisor of the sum over tokens, positive; `None` for the count of `mask`.

    Returns:
        The loss and its diagnostics.

    Examples:
        >>> old, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
        >>> new = torch.tensor([[1.5, 0.5]]).log()
        >>> out = surrogate_loss(new, old, advantages=torch.ones(1, 2), mask=mask)
        >>> round(out.loss.item(), 4), out.clip_fraction.item()  # -(1.2 + 0.5) / 2
        (-0.85, 0.5)
    """
    ratio, kl, advantages = _token_terms(logprobs, old_logprobs, advantages, mask)
    losses = -advantages * ratio
    clipped = torch.zeros_like(mask)
    if ratio_clip is not None:
        check_number(
            "ratio_clip", ratio_clip, "a number in (0, 1) or None", lambda clip: 0 < clip < 1
        )
        high = ratio_clip if ratio_clip_high is None else ratio_clip_high
        check_positive("ratio_clip_high", high)
        bounded = -advantages * ratio.clamp(1.0 - ratio_clip, 1.0 + high)
        # where the bounded loss is the larger one, it is constant and so has no gradient
        clipped = bounded > losses
        losses = torch.maximum(losses, bounded)
    if dual_clip is not None:
        check_number("dual_clip", dual_clip, "a number above 1 or None", lambda clip: clip > 1)
        largest = -advantages * dual_clip
        too_large = (advantages < 0) & (losses > largest)
        clipped = clipped | too_large
        losses = torch.where(too_large, largest, losses)
    return _policy_loss(
        losses=losses, clipped=clipped, kl=kl, ratio=ratio, mask=mask, denominator=denominator
    )


def truncated_importance(
    logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, *, cap: float
) -> Tensor:
    """Weights min(pi / mu, cap) of tokens that a sampler mu drew in place of the policy pi.

    Multiplied into the advantages, they correct the policy's loss for other kernels, another
    precision or a nucleus. The cap bounds their variance (Ionides 2008, truncated importance
    sampling).

    Args:
        logprobs: Log-probs under the policy pi, `[B, T]` nats.
        sampler_logprobs: Log-probs under the distribution mu that the tokens were drawn from,
            `[B, T]` nats.
        mask: Response tokens, `[B, T]` bool.
        cap: Largest weight, positive.

    Returns:
        Weights, `[B, T]`, in [0, cap], without a graph; 0 outside the mask.

    Examples:
        >>> policy, sampler = torch.tensor([[0.5, 0.8]]).log(), torch.tensor([[0.6, 0.2]]).log()
        >>> mask = torch.ones(1, 2, dtype=torch.bool)
        >>> [round(w, 4) for w in truncated_importance(policy, sampler, mask, cap=2.0)[0].tolist()]
        [0.8333, 2.0]
    """
    check_floating(2, logprobs=logprobs, sampler_logprobs=sampler_logprobs)
    check_mask(logprobs.shape, mask=mask)
    check_positive("cap", cap)
    log_ratio = (logprobs - sampler_logprobs).detach().masked_fill(~mask, -torch.inf)
    return log_ratio.exp().clamp(max=cap)


def kl_penalty_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    kl_penalty: float,
    denominator: Tensor | float | None = None,
) -> PolicyLoss:
    """PPO-penalty (Eq. 14): the unclipped surrogate plus a penalty on KL(old policy || policy).

    Per token -A rho + beta KL, with rho = exp(logprobs - old_logprobs). The tokens are samples of
    the old policy, so value and gradient of the k3 estimate of KL are unbiased.

    Args:
        logprobs: Log-probs under the policy, with a graph, `[B, T]` nats.
        old_logprobs: Log-probs under the old policy, `[B, T]` nats.
        advantages: Advantages A, `[B, T]`.
        mask: Tokens to train on, `[B, T]` bool.
        kl_penalty: beta, at least 0, in units of the advantages per nat.
        denominator: Divisor of the sum over tokens, positive; `None` for the count of `mask`.

    Returns:
        The loss and its diagnostics; the clip fraction is 0.

    Examples:
        >>> old, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
        >>> out = kl_penalty_loss(old.clone(), old, torch.ones(1, 1), mask, kl_penalty=0.1)
        >>> out.loss.item(), out.approx_kl.item()
        (-1.0, 0.0)
    """
    check_not_negative("kl_penalty", kl_penalty)
    ratio, kl, advantages = _token_terms(logprobs, old_logprobs, advantages, mask)
    losses = -advantages * ratio + kl_penalty * kl
    return _policy_loss(
        losses=losses,
        clipped=torch.zeros_like(mask),
        kl=kl,
        ratio=ratio,
        mask=mask,
        denominator=denominator,
    )


def policy_gradient_loss(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    denominator: Tensor | float | None = None,
) -> PolicyLoss:
    """The plain policy gradient: -A log pi per token, without importance sampling.

    Args:
        logprobs: Log-probs log pi under the policy, with a graph, `[B, T]` nats.
        advantages: Advantages A, `[B, T]`.
        mask: Tokens to train on, `[B, T]` bool.
        denominator: Divisor of the sum over tokens, positive; `None` for the count of `mask`.

    Returns:
        The loss and its diagnostics. There is no old policy, so clip fraction and KL are 0 and the
        ratio is 1.

    Examples:
        >>> logprobs, advantages = torch.tensor([[-0.5, -2.0]]), torch.tensor([[1.0, -1.0]])
        >>> mask = torch.ones(1, 2, dtype=torch.bool)
        >>> policy_gradient_loss(logprobs, advantages, mask).loss.item()  # (0.5 - 2) / 2
        -0.75
    """
    # with itself as old policy the ratio is 1; advantages are 0 outside the mask
    ratio, kl, advantages = _token_terms(logprobs, logprobs, advantages, mask)
    losses = -advantages * logprobs
    return _policy_loss(
        losses=losses,
        clipped=torch.zeros_like(mask),
        kl=kl,
        ratio=ratio,
        mask=mask,
        denominator=denominator,
    )


def reference_kl_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    weights: Tensor | None = None,
    denominator: Tensor | float | None = None,
) -> Tensor:
    """KL(policy || reference) as a term of the loss, by k3 (GRPO, arXiv 2402.03300, Eq. 4).

    On samples of the policy, the gradient of k3 is the gradient of KL(reference || policy). Near
    the reference this is about the gradient of KL(policy || reference). Unlike a penalty in the
    rewards, the term enters no advantage.

    Args:
        logprobs: Log-probs under the policy, with a graph, `[B, T]` nats.
        ref_logprobs: Log-probs under the reference, `[B, T]` nats.
        mask: Tokens to train on, `[B, T]` bool.
        weights: Weight of each response, `[B]`, from `response_weights`; `None` for 1 each.
        denominator: Divisor of the sum over tokens, positive; `None` for the count of `mask`.

    Returns:
        The term, 0-dim, nats per token.

    Examples:
        >>> logprobs, mask = torch.tensor([[0.5]]).log(), torch.tensor([[True]])
        >>> round(reference_kl_loss(logprobs, torch.tensor([[0.25]]).log(), mask).item(), 4)
        0.1931
    """
    check_floating(2, logprobs=logprobs, ref_logprobs=ref_logprobs)
    check_mask(logprobs.shape, mask=mask)
    # before exp: outside the mask, an infinite value times a gradient of 0 would be NaN
    new, ref = (x.masked_fill(~mask, 0.0) for x in (logprobs, ref_logprobs.detach()))
    kl = kl_estimate(new, ref, "k3")
    if weights is not None:
        check_floating(kl.shape[:1], weights=weights)
    return masked_average(kl if weights is None else kl * weights.unsqueeze(1), mask, denominator)


def response_weights(
    lengths: Tensor,
    *,
    tokens: Tensor,
    responses: Tensor,
    longest: int,
    aggregation: Aggregation = "token_mean",
) -> Tensor:
    """Weights of responses that turn a mean over tokens into another aggregation.

    A mean over `tokens` in which each token of response i counts w_i times is

    - `token_mean`: that mean (w_i = 1; PPO, DAPO);
    - `sequence_mean`: the mean over responses of the mean over their tokens (GRPO, arXiv
      2402.03300, Eq. 3);
    - `sequence_sum`: the mean over responses of the sum over their tokens, over the constant
      `longest` (Dr. GRPO, arXiv 2503.20783; up to that constant RLOO, arXiv 2402.14740).

    Args:
        lengths: Tokens to train on in each response, `[B]` integers, at least 0.
        tokens: Tokens to train on in the whole step, 0-dim.
        responses: Responses of the whole step with at least one such token, 0-dim.
        longest: The most tokens that a response may have, positive.
        aggregation: Which of the three.

    Returns:
        Weight of each response, `[B]`, at least 0.

    Examples:
        >>> lengths, tokens, responses = torch.tensor([1, 3]), torch.tensor(4.0), torch.tensor(2.0)
        >>> response_weights(
        ...     lengths, tokens=tokens, responses=responses, longest=8, aggregation="sequence_mean"
        ... ).tolist()
        [2.0, 0.6666666865348816]
    """
    check_ids(1, lengths=lengths)
    check_floating((), tokens=tokens, responses=responses)
    check_positive("longest", longest)
    per_response = (tokens / responses.clamp(min=1)).expand(len(lengths))
    match aggregation:
        case "token_mean":
            return torch.ones_like(per_response)
        case "sequence_mean":
            return per_response / lengths.clamp(min=1)
        case "sequence_sum":
            return per_response / longest
    raise ValueError(f"aggregation: expected one of {get_args(Aggregation)}, got {aggregation!r}")


def entropy_loss(
    entropy: Tensor,
    mask: Tensor,
    *,
    clip: float | None = None,
    denominator: Tensor | float | None = None,
) -> Tensor:
    """The entropy bonus as a loss: minus the mean entropy, with the clip of Appendix B.3.

    An unbounded bonus can drive the policy to noise, since entropy is easier to raise than reward.
    With a clip each token adds min(entropy, clip), so a token above it gets no gradient and the
    bonus only widens distributions that are too narrow. The clip acts on each token and not on the
    mean, so that micro-batches add up to the whole batch.

    Args:
        entropy: Entropy of the distribution that predicts each token, `[B, T]` nats, with a graph.
        mask: Tokens to train on, `[B, T]` bool.
        clip: Largest entropy with a bonus, nats per token, positive; `None` for no limit.
        denominator: Divisor of the sum over tokens, positive; `None` for the count of `mask`.

    Returns:
        The loss, 0-dim, nats per token.

    Examples:
        >>> mask = torch.ones(1, 2, dtype=torch.bool)
        >>> entropy_loss(torch.tensor([[0.5, 3.0]]), mask, clip=1.0).item()
        -0.75
    """
    check_floating(2, entropy=entropy)
    if clip is not None:
        check_positive("clip", clip)
        entropy = entropy.clamp(max=clip)
    return -masked_average(entropy, mask, denominator)


def _policy_loss(
    *,
    losses: Tensor,
    clipped: Tensor,
    kl: Tensor,
    ratio: Tensor,
    mask: Tensor,
    denominator: Tensor | float | None,
) -> PolicyLoss:
    """Reduce the losses and diagnostics of the tokens, `[B, T]` each."""
    return PolicyLoss(
        loss=masked_average(losses, mask, denominator),
        clip_fraction=masked_mean(clipped.to(losses.dtype), mask),
        approx_kl=masked_mean(kl.detach(), mask),
        ratio_mean=masked_mean(ratio.detach(), mask),
    )


class ValueLoss(NamedTuple):
    """The critic's loss and its diagnostic.

    Attributes:
        loss: To minimize, 0-dim, in squared units of the rewards.
        clip_fraction: Share of tokens whose gradient the clip cut off, 0-dim, in [0, 1]; without a
            graph, and over the mask of the call whatever the denominator.
    """

    loss: Tensor
    clip_fraction: Tensor


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    value_clip: float | None = 0.2,
    denominator: Tensor | float | None = None,
) -> ValueLoss:
    """Half the squared error of the critic, clipped (Eq. 16).

    Per token 0.5 max((V - R)^2, (V_clip - R)^2), where V_clip is V clipped to within `value_clip`
    of the value at the rollout. The larger error counts, so that leaving the interval gains
    nothing.

    Args:
        values: Values V of the critic, with a graph, `[B, T]`, in the units of the rewards.
        old_values: Values at the rollout, `[B, T]`, in the same units.
        returns: Returns R, the targets, `[B, T]`, in the same units.
        mask: Tokens to train on, `[B, T]` bool.
        value_clip: Largest distance from the old value, positive, in the same units; `None` for no
            clipping.
        denominator: Divisor of the sum over tokens, positive; `None` for the count of `mask`.

    Returns:
        The loss, 0 with a graph if the mask is empty, and the share of clipped tokens.

    Examples:
        >>> values, old_values = torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 1.0]])
        >>> returns, mask = torch.tensor([[2.0, 3.0]]), torch.ones(1, 2, dtype=torch.bool)
        >>> loss, clip_fraction = value_loss(values, old_values, returns, mask, value_clip=1.0)
        >>> loss.item(), clip_fraction.item()  # (1 + 1) / 4: the second value counts as 2
        (0.5, 0.5)
    """
    check_floating(2, values=values, old_values=old_values, returns=returns)
    check_mask(values.shape, mask=mask)
    # before the squares: values outside the mask could overflow and make the gradient NaN
    values, old_values, returns = (
        x.masked_fill(~mask, 0.0) for x in (values, old_values.detach(), returns.detach())
    )
    errors = (values - returns).square()
    clipped = torch.zeros_like(mask)
    if value_clip is not None:
        check_positive("value_clip", value_clip)
        bounded = old_values + (values - old_values).clamp(-value_clip, value_clip)
        bounded_errors = (bounded - returns).square()
        # within the interval both errors are equal up to rounding, which must not count as clipped
        clipped = (bounded_errors > errors) & ((values - old_values).abs() > value_clip)
        errors = torch.maximum(errors, bounded_errors)
    clip_fraction = masked_mean(clipped.to(errors.dtype), mask)
    return ValueLoss(0.5 * masked_average(errors, mask, denominator), clip_fraction)


def explained_variance(
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    moments: Callable[[Tensor, Tensor], Moments] = masked_moments,
) -> Tensor:
    """Share of the returns' variance that the critic explains: 1 - Var(R - V) / Var(R).

    Args:
        values: Values V of the critic, `[B, T]`, in the units of the rewards.
        returns: Returns R, `[B, T]`, in the same units.
        mask: Tokens that count, `[B, T]` bool.
        moments: Takes values and a mask and returns their moments. With
            `lit_rlhf.stats.global_masked_moments` the tokens of all ranks count.

    Returns:
        The share, 0-dim, at most 1, without a graph: 1 for a perfect critic, 0 for a constant one,
        and 0 if the returns have no variance to explain.

    Examples:
        >>> returns, mask = torch.tensor([[1.0, 3.0]]), torch.ones(1, 2, dtype=torch.bool)
        >>> explained_variance(torch.tensor([[1.5, 2.5]]), returns, mask).item()
        0.75
    """
    check_floating(2, values=values, returns=returns)
    total = moments(returns, mask).var
    unexplained = moments(returns.double() - values.double(), mask).var
    explained = 1.0 - unexplained / torch.where(total > 0, total, torch.ones_like(total))
    return torch.where(total > 0, explained, torch.zeros_like(total)).to(values.dtype)


class PairwiseLoss(NamedTuple):
    """The loss of a reward model on preference pairs, and its diagnostics without a graph.

    Attributes:
        loss: To minimize, 0-dim, nats per pair.
        accuracy: Share of pairs with a higher score for the chosen response, 0-dim, in [0, 1]; a
            tie is wrong.
        margin: Mean score of the chosen minus the rejected responses, 0-dim.
    """

    loss: Tensor
    accuracy: Tensor
    margin: Tensor


def pairwise_reward_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    margin: Tensor | None = None,
    label_smoothing: float = 0.0,
    center_coef: float = 0.0,
    head_mask: Tensor | None = None,
) -> PairwiseLoss:
    """Mean negative log-likelihood of preferences under Bradley and Terry (Eq. 1).

    -log sigmoid(z) with z = chosen - rejected - margin, in the form of `logsigmoid`, which keeps
    its gradient for a pair that is ranked very wrong.

    Args:
        chosen: Scores of the preferred responses, `[B]`, `B` at least 1; or `[B, K]` of `K` heads.
            The losses of heads are averaged; accuracy and margin are of their mean score.
        rejected: Scores of the other responses, in the same shape.
        margin: How far the chosen response has to be ahead, `[B]`, in units of the scores; `None`
            for 0.
        label_smoothing: Share e of labels taken as flipped, in [0, 0.5):
            -(1 - e) log sigmoid(z) - e log sigmoid(-z), the form of cDPO (Mitchell, "A note on DPO
            with noisy preferences and relationship to IPO", 2023).
        center_coef: Weight of (chosen + rejected)^2, at least 0, which keeps scores around 0
            (Eisenstein et al., arXiv 2312.09244); TRL's `center_rewards_coefficient`.
        head_mask: Which head learns from which pair, `[B, K]` bool; `None` for each from all.

    Returns:
        The loss and its diagnostics.

    Examples:
        >>> chosen, rejected = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0])
        >>> out = pairwise_reward_loss(chosen, rejected)
        >>> round(out.loss.item(), 4), out.accuracy.item(), out.margin.item()
        (0.5032, 0.5, 0.5)
    """
    check_floating(2 if chosen.dim() == 2 else 1, chosen=chosen, rejected=rejected)
    if len(chosen) == 0:
        raise ValueError("chosen: expected at least one pair, got none")
    difference = chosen - rejected
    logits = difference
    if margin is not None:
        check_floating(chosen.shape[:1], margin=margin)
        logits = difference - (margin if chosen.dim() == 1 else margin.unsqueeze(1))
    check_number("label_smoothing", label_smoothing, "a number in [0, 0.5)", lambda e: 0 <= e < 0.5)
    check_not_negative("center_coef", center_coef)
    losses = -logsigmoid(logits)
    if label_smoothing:
        # -log sigmoid(-z) = z - log sigmoid(z)
        losses = losses + label_smoothing * logits
    if center_coef:
        losses = losses + center_coef * (chosen + rejected).square()
    if head_mask is not None:
        check_mask(chosen.shape, head_mask=head_mask)
    mean_difference = difference.detach().view(len(chosen), -1).mean(1)  # over heads
    return PairwiseLoss(
        loss=losses.mean() if head_mask is None else masked_mean(losses, head_mask),
        accuracy=(mean_difference > 0).to(chosen.dtype).mean(),
        margin=mean_difference.mean(),
    )


def difference_loss(first: Tensor, second: Tensor) -> Tensor:
    """Mean sigmoid of |first - second|: how well scores tell two responses to a prompt apart.

    J of MetaRM (Section 4 of arXiv 2401.06080, and 2405.00438) for two responses to each prompt,
    less its constant factor.

    Args:
        first: Scores of one response to each prompt, `[B]`, or `[B, K]` of `K` heads.
        second: Scores of the other response, in the same shape.

    Returns:
        The mean, 0-dim, in [0.5, 1], with a graph.

    Examples:
        >>> round(difference_loss(torch.tensor([0.0, 2.0]), torch.tensor([0.0, 5.0])).item(), 4)
        0.7263
    """
    check_floating(first.shape, first=first, second=second)
    return (first - second).abs().sigmoid().mean()


def reward_model_loss(pairwise_loss: Tensor, lm_loss: Tensor, *, lm_coef: float) -> Tensor:
    """Loss of the reward model (Eq. 2): pairwise loss plus beta_rm times the LM-imitation loss.

    Args:
        pairwise_loss: Loss on preference pairs, 0-dim.
        lm_loss: Language-model loss on the chosen responses, 0-dim.
        lm_coef: beta_rm, at least 0.

    Returns:
        The loss, 0-dim.

    Examples:
        >>> reward_model_loss(torch.tensor(0.5), torch.tensor(2.0), lm_coef=0.25).item()
        1.0
    """
    check_floating((), pairwise_loss=pairwise_loss, lm_loss=lm_loss)
    check_not_negative("lm_coef", lm_coef)
    return pairwise_loss + lm_coef * lm_loss


def preference_probability(differences: Tensor) -> Tensor:
    """Probability that the first of two responses is preferred, under Bradley and Terry (Eq. 1).

    sigmoid(difference), with the difference of the two scores.

    Args:
        differences: Score of the first response minus score of the second, any shape.

    Returns:
        Probabilities in the same shape, in [0, 1].

    Examples:
        >>> preference_probability(torch.tensor([0.0, 100.0])).tolist()
        [0.5, 1.0]
    """
    return differences.sigmoid()
