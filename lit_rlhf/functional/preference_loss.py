"""Losses of the reward model (Section 3.1 of arXiv 2307.04964).

Notation: `B` pairs.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import logsigmoid

from lit_rlhf.checks import check_dims, check_not_negative, check_same, check_shape


class PairwiseLoss(NamedTuple):
    """The pairwise loss and its diagnostics.

    Attributes:
        loss: To minimize, 0-dim.
        accuracy: Share of pairs whose chosen response scores higher, 0-dim, no graph; a tie counts
            as wrong.
        margin: Mean difference chosen - rejected, 0-dim, no graph.
    """

    loss: Tensor
    accuracy: Tensor
    margin: Tensor


def pairwise_reward_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor | None = None
) -> PairwiseLoss:
    """Mean negative log-likelihood of preferences under Bradley and Terry (Eq. 1).

    -log sigmoid(chosen - rejected - margin), in the form of `logsigmoid`, which keeps its gradient
    for a pair that is ranked very wrong.

    Args:
        chosen: Scores of the chosen responses, `[B]`, `B` at least 1.
        rejected: Scores of the rejected ones, `[B]`.
        margin: Difference that the chosen response has to reach, `[B]`; `None` for 0.

    Examples:
        >>> chosen, rejected = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0])
        >>> out = pairwise_reward_loss(chosen, rejected)
        >>> round(out.loss.item(), 4), out.accuracy.item(), out.margin.item()
        (0.5032, 0.5, 0.5)
    """
    check_dims("chosen", chosen, 1)
    check_same(chosen.shape, chosen=chosen, rejected=rejected)
    if len(chosen) == 0:
        raise ValueError("chosen: expected at least one pair, got none")
    difference = chosen - rejected
    logits = difference
    if margin is not None:
        check_same(chosen.shape, margin=margin)
        logits = difference - margin
    return PairwiseLoss(
        loss=-logsigmoid(logits).mean(),
        accuracy=(difference > 0).to(chosen.dtype).mean(),
        margin=difference.detach().mean(),
    )


def reward_model_loss(pairwise_loss: Tensor, lm_loss: Tensor, lm_coef: float) -> Tensor:
    """Loss of the reward model (Eq. 2), 0-dim: pairwise loss plus beta_rm times LM-imitation loss.

    Args:
        pairwise_loss: 0-dim.
        lm_loss: `language_model_loss` over the tokens of the chosen responses, 0-dim.
        lm_coef: beta_rm, at least 0.

    Examples:
        >>> reward_model_loss(torch.tensor(0.5), torch.tensor(2.0), lm_coef=0.25).item()
        1.0
    """
    check_shape("pairwise_loss", pairwise_loss, ())
    check_shape("lm_loss", lm_loss, ())
    check_not_negative("lm_coef", lm_coef)
    return pairwise_loss + lm_coef * lm_loss


def preference_probability(differences: Tensor) -> Tensor:
    """Probability that the first of two responses is preferred, under Bradley and Terry (Eq. 1).

    Args:
        differences: Score of the first minus score of the second, any shape.

    Examples:
        >>> preference_probability(torch.tensor([0.0, 100.0])).tolist()
        [0.5, 1.0]
    """
    return differences.sigmoid()
