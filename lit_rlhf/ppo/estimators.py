"""Advantages of the tokens without a critic, by the option `advantages.estimator`."""

from torch import Tensor

from lit_rlhf.functional import (
    group_advantages,
    leave_one_out_advantages,
    masked_sum,
    reinforce_plus_plus_advantages,
)
from lit_rlhf.ppo.options import AdvantageOptions
from lit_rlhf.stats import global_masked_moments


def critic_free_advantages(
    options: AdvantageOptions, rewards: Tensor, mask: Tensor, loss_mask: Tensor, group_size: int
) -> Tensor:
    """Advantages `[B, T]` of this rank's rollouts, 0 outside the loss mask; a collective.

    Rewards and masks are `[B, T]`. The responses to a prompt are `group_size` adjacent rows, and
    all of them are on this rank. Whitening is over the tokens of all ranks.
    """
    if options.estimator == "reinforce_plus_plus":
        return reinforce_plus_plus_advantages(
            rewards, mask, options.gamma, loss_mask, global_masked_moments
        )
    # the response is one action, whose return has the KL penalties of all of its tokens
    returns, learned = masked_sum(rewards, mask, 1), loss_mask.any(1)
    if options.estimator == "rloo":
        advantages = leave_one_out_advantages(returns, group_size, learned)
    else:
        advantages = group_advantages(returns, group_size, learned, options.estimator == "grpo")
    return advantages.unsqueeze(1) * loss_mask
