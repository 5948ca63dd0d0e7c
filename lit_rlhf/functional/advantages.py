"""Generalized advantage estimation (Section 3.2.2 of arXiv 2307.04964).

Notation: `B` batch, `T` response tokens. Advantages and returns have no graph, as they
are constants of the losses.
"""

import torch
from torch import Tensor

from lit_rlhf.checks import check_positive, check_tensors, check_unit_interval

__all__ = ["clipped_advantages", "gae"]


def gae(
    values: Tensor,
    rewards: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    lam: float = 0.9,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Eqs. 7-12), without a graph.

    delta_t = r_t + gamma V(s_{t+1}) - V(s_t) and A_t = delta_t + gamma lam A_{t+1}, from the last
    token of each row backwards; the returns are A_t + V(s_t).

    `values` are V(s_t), read *before* token t, `[B, T]`, and so are `rewards`. The mask is a prefix
    of each row, `[B, T]`, which may be empty. `gamma` and `lam` are in [0, 1]: lam 0 is one-step
    TD, 1 the full return (Monte Carlo). `bootstrap_values` are V(s_{T+1}) after each row's last
    token, `[B]`: the critic's value for a response that was cut off, and 0 for one that ended, as
    for `None`. Advantages and returns are `[B, T]`, 0 outside the mask.

    Examples:
        >>> values, rewards = torch.tensor([[0.5, 0.5, 9.0]]), torch.tensor([[0.0, 1.0, 9.0]])
        >>> advantages, returns = gae(values, rewards, torch.tensor([[True, True, False]]), lam=0.5)
        >>> advantages.tolist(), returns.tolist()
        ([[0.25, 0.5, 0.0]], [[0.75, 1.0, 0.0]])
    """
    check_tensors(2, values=values, rewards=rewards, mask=mask)
    check_unit_interval("gamma", gamma)
    check_unit_interval("lam", lam)
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise ValueError("mask: expected a prefix of each row, got a row with a gap")
    if bootstrap_values is not None:
        check_tensors(values.shape[:1], bootstrap_values=bootstrap_values)
    values, rewards = (x.detach().masked_fill(~mask, 0.0) for x in (values, rewards))
    next_advantage = values.new_zeros(len(values))
    next_value = next_advantage if bootstrap_values is None else bootstrap_values.detach()
    advantages = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        # the loop meets the padding after a row's end first, which passes the initial values on
        kept = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = torch.where(kept, delta + gamma * lam * next_advantage, next_advantage)
        next_advantage = advantages[:, t]
        next_value = torch.where(kept, values[:, t], next_value)
    return advantages, advantages + values


def clipped_advantages(advantages: Tensor, clip: float) -> Tensor:
    """Advantages of any shape, clipped to [-clip, clip].

    Examples:
        >>> clipped_advantages(torch.tensor([-3.0, 0.5]), clip=2.0).tolist()
        [-2.0, 0.5]
    """
    check_positive("clip", clip)
    return advantages.clamp(-clip, clip)
