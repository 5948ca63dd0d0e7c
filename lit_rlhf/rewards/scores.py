"""Scores of responses: the votes of one reward, and the weighted sum of several.

Notation: `B` responses, `K` heads of reward models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lit_rlhf.functional import normalized_scores
from lit_rlhf.stats import global_masked_moments


class Votes(NamedTuple):
    """Scores of one reward, which may abstain: it then has no vote for a response.

    Attributes:
        scores: The scores, `[B]`, or `[B, K]` of a reward model; NaN where there is no vote.
        mask: Whether there is a vote, `[B]` bool. A NaN with a vote is a reward that is broken.
    """

    scores: Tensor
    mask: Tensor


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of responses: their weighted sum, and what it is made of.

    Attributes:
        total: The weighted sum that PPO learns from, `[B]` float32: of the rewards that have a vote
            for a response.
        by_name: Scores `[B]` of each reward by its short name, before normalization and weights;
            NaN where it has no vote. A reward model's score is the mean over its heads.
        head_scores: Scores of the heads of all reward models, `[B, K]`, before normalization and
            weights; `None` without a reward model.
        uncounted: Scores of those responses that have one, by key of `WeightedReward.moments`, that
            these moments do not count yet, see `WeightedReward.commit_moments`. Empty in evaluation
            mode, and if one of them is not finite.
        votes: Whether each reward has a vote, `[B]` bool by its short name. One that is missing has
            a vote for all responses.
    """

    total: Tensor
    by_name: Mapping[str, Tensor] = field(default_factory=dict)
    head_scores: Tensor | None = None
    uncounted: Mapping[str, Tensor] = field(default_factory=dict)
    votes: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def concatenate(cls, parts: Sequence["Scores"]) -> "Scores":
        """Make one batch of several that were scored one after the other by the same rewards.

        Args:
            parts: Scores of each batch, at least one, in the order of the responses.
        """
        heads = [part.head_scores for part in parts if part.head_scores is not None]
        counted_together = set.intersection(*(set(part.uncounted) for part in parts))
        return cls(
            total=torch.cat([part.total for part in parts]),
            by_name={
                name: torch.cat([part.by_name[name] for part in parts]) for name in parts[0].by_name
            },
            head_scores=torch.cat(heads) if heads else None,
            uncounted={
                key: torch.cat([part.uncounted[key] for part in parts])
                for key in parts[0].uncounted
                if key in counted_together
            },
            votes={
                name: torch.cat([part.votes_of(name) for part in parts])
                for name in parts[0].by_name
            },
        )

    def votes_of(self, name: str) -> Tensor:
        """Whether a reward of `by_name` has a vote for each response, `[B]` bool."""
        return self.votes.get(name, torch.ones_like(self.total, dtype=torch.bool))

    def spread(self) -> Tensor | None:
        """Disagreement of the reward models on each response, `[B]`.

        It is the standard deviation over the models' heads of their scores, each less its mean and
        over its standard deviation over the responses of all ranks: 0 if they rank responses alike.
        `None` for fewer than two heads. Every rank has to call it.
        """
        if self.head_scores is None or self.head_scores.shape[1] < 2:
            return None
        standardized = []
        for raw in self.head_scores.unbind(1):
            moments = global_masked_moments(raw, torch.ones_like(raw, dtype=torch.bool))
            standardized.append(
                normalized_scores(raw, mean=moments.mean, std=moments.var.sqrt(), clip=None)
            )
        return torch.stack(standardized).std(dim=0, correction=0)
