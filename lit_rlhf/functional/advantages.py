"""Advantages, estimated with a critic (Section 3.2.2 of arXiv 2307.04964) or without one.

Notation: `B` batch, `T` response tokens. The losses take advantages and returns as constants, so
these have no graph.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lit_rlhf.checks import check_count, check_positive, check_unit_interval
from lit_rlhf.functional.masking import (
    Moments,
    masked_mean,
    masked_moments,
    masked_sum,
    masked_whiten,
    safe_std,
)
from lit_rlhf.tensor_checks import check_floating, check_ids, check_mask

__all__ = [
    "AdvantagesAndReturns",
    "clipped_advantages",
    "gae",
    "group_advantages",
    "informative_groups",
    "leave_one_out_advantages",
    "length_adaptive_lam",
    "reinforce_plus_plus_advantages",
]


class AdvantagesAndReturns(NamedTuple):
    """Result of `gae` for each response token; 0 outside the mask, without a graph.

    Attributes:
        advantages: A_t, `[B, T]`, in the units of the rewards.
        returns: A_t + V(s_t), the targets of the critic, `[B, T]`, in the units of the rewards.
    """

    advantages: Tensor
    returns: Tensor


def gae(
    values: Tensor,
    rewards: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float | Tensor = 0.9,
    bootstrap_values: Tensor | None = None,
) -> AdvantagesAndReturns:
    """Generalized advantage estimation (Eqs. 7-12), without a graph.

    delta_t = r_t + gamma V(s_{t+1}) - V(s_t) and A_t = delta_t + gamma lam A_{t+1}, from the last
    token of each row backwards. The returns are A_t + V(s_t).

    Args:
        values: V(s_t), the critic's value *before* token t, `[B, T]`, in the units of the rewards.
        rewards: r_t, the reward for token t, `[B, T]`.
        mask: Response tokens, `[B, T]` bool: a prefix of each row, which may be empty.
        gamma: Discount from one token to the next, in [0, 1].
        lam: Lambda, in [0, 1]: 0 is one-step TD, 1 the full return (Monte Carlo). A tensor `[B]`
            has one lambda for each row.
        bootstrap_values: V(s_{T+1}) after the last token of each row, `[B]`: the critic's value for
            a response that was cut off, and 0 for one that ended. `None` means 0 for all rows.

    Returns:
        Advantages and returns, `[B, T]` each, 0 outside the mask.

    Examples:
        >>> values, rewards = torch.tensor([[0.5, 0.5, 9.0]]), torch.tensor([[0.0, 1.0, 9.0]])
        >>> advantages, returns = gae(values, rewards, torch.tensor([[True, True, False]]), lam=0.5)
        >>> advantages.tolist(), returns.tolist()
        ([[0.25, 0.5, 0.0]], [[0.75, 1.0, 0.0]])
    """
    check_floating(2, values=values, rewards=rewards)
    check_mask(values.shape, mask=mask)
    check_unit_interval("gamma", gamma)
    if isinstance(lam, Tensor):
        check_floating(values.shape[:1], lam=lam)
        check_unit_interval("lam", float(lam.amin()))
        check_unit_interval("lam", float(lam.amax()))
    else:
        check_unit_interval("lam", lam)
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise ValueError("mask: expected a prefix of each row, got a row with a gap")
    if bootstrap_values is not None:
        check_floating(values.shape[:1], bootstrap_values=bootstrap_values)
    values, rewards = (x.detach().masked_fill(~mask, 0.0) for x in (values, rewards))
    next_advantage = values.new_zeros(len(values))
    next_value = next_advantage if bootstrap_values is None else bootstrap_values.detach()
    advantages = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        # the loop meets the padding after a row's end first, which passes the initial values on
        step_mask = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = torch.where(
            step_mask, delta + gamma * lam * next_advantage, next_advantage
        )
        next_advantage = advantages[:, t]
        next_value = torch.where(step_mask, values[:, t], next_value)
    return AdvantagesAndReturns(advantages, returns=advantages + values)


def length_adaptive_lam(lengths: Tensor, alpha: float) -> Tensor:
    """Lambda of GAE that grows with the length l of a response: max(1 - 1 / (alpha l), 0).

    The weights lam^t of later errors then sum to alpha l, the same share of each response (VAPO,
    arXiv 2504.05118, Section 4.2).

    Args:
        lengths: Tokens of each response, `[B]` integers, at least 1.
        alpha: Share of a response over which later errors count, positive.

    Returns:
        One lambda for each response, `[B]` float32, in [0, 1).

    Examples:
        >>> length_adaptive_lam(torch.tensor([10, 100]), alpha=0.05).tolist()
        [0.0, 0.800000011920929]
    """
    check_ids(1, lengths=lengths)
    check_positive("alpha", alpha)
    return (1 - 1 / (alpha * lengths.float())).clamp(min=0.0)


def leave_one_out_advantages(scores: Tensor, group_size: int, sample_mask: Tensor) -> Tensor:
    """RLOO: the score of a response less the mean score of the other responses to its prompt.

    R_i - 1 / (k - 1) sum_{j != i} R_j (Ahmadian et al., arXiv 2402.14740, Section 3.3), which is
    k / (k - 1) times the distance from the mean of the whole group. k counts the responses of the
    group that the mask keeps.

    Args:
        scores: One score for each response, `[B]`. The responses to a prompt, a group, are adjacent
            rows.
        group_size: Responses to a prompt, at least 1; it divides `B`.
        sample_mask: Responses that count, `[B]` bool. The others enter no mean.

    Returns:
        Advantages, `[B]`; 0 outside the mask, and for the only kept response of a group.

    Examples:
        >>> scores, mask = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([True, True, True])
        >>> leave_one_out_advantages(scores, 3, mask).tolist()
        [-3.0, -1.5, 4.5]
    """
    advantages = group_advantages(scores, group_size, sample_mask, scale=False)
    count = sample_mask.view(-1, group_size).sum(1).repeat_interleave(group_size)
    return advantages * count / (count - 1).clamp(min=1)


def group_advantages(
    scores: Tensor, group_size: int, sample_mask: Tensor, *, scale: bool = True
) -> Tensor:
    """GRPO: the score of a response less its group's mean, over the group's standard deviation.

    (R_i - mean(R)) / std(R) (Shao et al., arXiv 2402.03300, Section 4.1.2). The standard deviation
    is the sample's (divisor k - 1), as in TRL and verl; one of 0 counts as 1.

    Args:
        scores: One score for each response, `[B]`. The responses to a prompt, a group, are adjacent
            rows.
        group_size: Responses to a prompt, at least 1; it divides `B`.
        sample_mask: Responses that count, `[B]` bool. The others enter no mean.
        scale: Whether to divide by the standard deviation. Without, it is the advantage of Dr.
            GRPO, R_i - mean(R) (Liu et al., arXiv 2503.20783, Section 3.2).

    Returns:
        Advantages, `[B]`; 0 outside the mask.

    Examples:
        >>> scores, mask = torch.tensor([1.0, 3.0, 5.0]), torch.tensor([True, True, True])
        >>> group_advantages(scores, 3, mask).tolist()
        [-1.0, 0.0, 1.0]
        >>> group_advantages(scores, 3, mask, scale=False).tolist()
        [-2.0, 0.0, 2.0]
    """
    check_floating(1, scores=scores)
    check_mask(scores.shape, sample_mask=sample_mask)
    check_count("group_size", group_size)
    if len(scores) % group_size:
        raise ValueError(f"group_size: expected a divisor of {len(scores)} rows, got {group_size}")
    group_mask = sample_mask.view(-1, group_size)
    grouped = scores.detach().double().view(-1, group_size)
    advantages = grouped - masked_mean(grouped, group_mask, 1).unsqueeze(1)
    if scale:
        squares = masked_sum(advantages.square(), group_mask, 1)
        std = (squares / (group_mask.sum(1) - 1).clamp(min=1)).sqrt()
        advantages = advantages / safe_std(std).unsqueeze(1)
    return advantages.masked_fill(~group_mask, 0.0).flatten().to(scores.dtype)


def informative_groups(scores: Tensor, group_size: int, sample_mask: Tensor) -> Tensor:
    """Whether the responses of a group differ in their scores.

    If all scores of a group are equal, its advantages are 0 and it teaches nothing. DAPO's dynamic
    sampling leaves such groups out (Yu et al., arXiv 2503.14476, Eq. 11, where scores are right or
    wrong).

    Args:
        scores: One score for each response, `[B]`. The responses to a prompt, a group, are adjacent
            rows.
        group_size: Responses to a prompt, at least 1; it divides `B`.
        sample_mask: Responses that count, `[B]` bool.

    Returns:
        One flag for each group, `[B / group_size]` bool.

    Examples:
        >>> scores, mask = torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([True] * 4)
        >>> informative_groups(scores, 2, mask).tolist()
        [False, True]
    """
    check_floating(1, scores=scores)
    # the mean of equal float32 numbers is exact in float64
    distances = group_advantages(scores.float(), group_size, sample_mask, scale=False)
    return distances.view(-1, group_size).ne(0).any(1)


def reinforce_plus_plus_advantages(
    rewards: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    loss_mask: Tensor | None = None,
    moments: Callable[[Tensor, Tensor], Moments] = masked_moments,
) -> Tensor:
    """REINFORCE++: the rewards from a token on, whitened over all tokens of the batch.

    A_t = r(x, y) - beta sum_{i >= t} KL_i, then (A_t - mean(A)) / std(A) (Hu, arXiv 2501.03262,
    Section 3).

    Args:
        rewards: The score at the last token and the KL penalty at every token, `[B, T]`.
        mask: Response tokens, `[B, T]` bool: a prefix of each row, which may be empty.
        gamma: Discount from one token to the next, in [0, 1].
        loss_mask: Tokens that get an advantage and count in the moments, `[B, T]` bool; `None`:
            the tokens of `mask`.
        moments: Takes values and a mask and returns their moments. With
            `lit_rlhf.stats.global_masked_moments` the tokens of all ranks count.

    Returns:
        Advantages, `[B, T]`; 0 outside the loss mask.

    Examples:
        >>> rewards, mask = torch.tensor([[1.0, 2.0]]), torch.tensor([[True, True]])
        >>> reinforce_plus_plus_advantages(rewards, mask).tolist()  # whitens 3 and 2
        [[1.0, -1.0]]
    """
    token_mask = mask if loss_mask is None else loss_mask
    check_floating(2, rewards=rewards)
    check_mask(rewards.shape, mask=mask, loss_mask=token_mask)
    # without values, advantages at lambda 1 are the sums of the rewards that follow
    returns = gae(torch.zeros_like(rewards), rewards, mask, gamma=gamma, lam=1.0).advantages
    return masked_whiten(returns, token_mask, moments=moments(returns, token_mask))


def clipped_advantages(advantages: Tensor, clip: float) -> Tensor:
    """Advantages clipped to [-clip, clip] (Section 5.3.1 of arXiv 2307.04964).

    Args:
        advantages: Advantages of any shape, whitened or not.
        clip: Largest absolute value, positive, in the units of the advantages.

    Returns:
        Advantages of the same shape, in [-clip, clip].

    Examples:
        >>> clipped_advantages(torch.tensor([-3.0, 0.5]), clip=2.0).tolist()
        [-2.0, 0.5]
    """
    check_positive("clip", clip)
    return advantages.clamp(-clip, clip)
