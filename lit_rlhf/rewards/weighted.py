"""A weighted sum of reward sources, each logged, and normalized where asked, by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lit_rlhf.functional import normalized_scores
from lit_rlhf.models import ModelOptions
from lit_rlhf.rewards.calls import samples_of, warn_of_non_finite
from lit_rlhf.rewards.functions import CallableReward, FunctionReward, ModelReward
from lit_rlhf.rewards.sources import RewardSource, parse_reward_sources
from lit_rlhf.rollout.batch import RolloutBatch
from lit_rlhf.stats import RunningMoments, global_sum


class WeightedReward(nn.Module):
    """A weighted sum of rewards.

    A source with `normalize` enters the sum less the mean and over the standard deviation of all
    its scores so far. In training mode the scores at hand count too, over all ranks, so that every
    rank has to call it; they are kept when `accept` is called. In evaluation mode nothing is
    learned; before any is, scores stay as they are.

    Args:
        rewards: A weight or a mapping by source, see `parse_reward_sources`.
        options: How reward models are loaded.
        tokenizer: The policy's.
        timeout: Seconds that a call of a function may take; `None`: as long as it likes.
        offload: Keep reward models in CPU memory between uses.

    Attributes:
        seconds: What each source has taken so far, by name.

    Raises:
        ValueError: If there is no source, or one is described wrongly.
    """

    def __init__(
        self,
        rewards: Mapping[str, float | Mapping[str, Any]],
        options: ModelOptions,
        tokenizer: PreTrainedTokenizerBase,
        timeout: float | None = None,
        offload: bool = False,
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.terms = parse_reward_sources(rewards)
        self.sources = nn.ModuleList(
            ModelReward(term.path, options, offload)
            if term.is_model
            else callable_reward(term, tokenizer, timeout)
            for term in self.terms
        )
        # Place and name: a checkpoint of other sources, or of the same in another order, does not
        # fit. A dot would split the name.
        self.moments = nn.ModuleDict(
            {
                f"{place}_{term.name}".replace(".", "_"): RunningMoments()
                for place, term in enumerate(self.terms)
                if term.normalize
            }
        )
        self.seconds = dict.fromkeys((term.name for term in self.terms), 0.0)
        self._raw: dict[str, Tensor] = {}
        self._pending: dict[str, RunningMoments] = {}

    def forward(
        self, rollouts: RolloutBatch, prompts: Sequence[str], max_tokens_per_forward: int | None
    ) -> Tensor:
        """Weighted scores `[B]`, float32; a warning shows one that is not finite."""
        self._raw = {}
        for term, source in zip(self.terms, self.sources, strict=True):
            start = perf_counter()
            scores = source(rollouts, prompts, max_tokens_per_forward)
            self.seconds[term.name] += perf_counter() - start
            if isinstance(source, ModelReward) and not bool(torch.isfinite(scores).all()):
                samples = samples_of(rollouts, prompts, self.tokenizer)
                warn_of_non_finite(f"reward model {source.path!r}", scores, samples)
            self._raw[term.name] = scores
        terms = zip(self.terms, self.normalized(), strict=True)
        return torch.stack([term.weight * scores for term, scores in terms]).sum(0)

    def normalized(self) -> list[Tensor]:
        """Each source's scores `[B]` of the last call as they enter the sum."""
        moments = dict(zip((t.name for t in self.terms if t.normalize), self.moments, strict=True))
        self._pending = {}
        if self.training and moments and self._all_finite(list(moments)):
            for name, key in moments.items():
                self._pending[key] = deepcopy(self._moments(key))
                self._pending[key].update(self._raw[name])
        scores = []
        for name, raw in self._raw.items():
            if name in moments:
                known = self._pending.get(moments[name], self._moments(moments[name]))
                raw = normalized_scores(raw, known.mean, known.std, clip=None)
            scores.append(raw)
        return scores

    def _moments(self, key: str) -> RunningMoments:
        moments = self.moments[key]
        assert isinstance(moments, RunningMoments)
        return moments

    def _all_finite(self, names: Sequence[str]) -> bool:
        """Whether these sources' scores are finite on all ranks; an iteration is skipped if not."""
        bad = torch.stack([(~torch.isfinite(self._raw[name])).sum() for name in names])
        return int(global_sum(bad).sum()) == 0

    def accept(self) -> None:
        """Keep the moments that the last call in training mode has come to."""
        for key, moments in self._pending.items():
            self._moments(key).load_state_dict(moments.state_dict())
        self._pending = {}

    def metrics(self) -> dict[str, Tensor]:
        """`rollout/score/<name>` of the last call: means of raw scores over all ranks' responses.

        Every rank has to call it; empty before the first call.
        """
        if not self._raw:
            return {}
        totals = [scores.double().sum() for scores in self._raw.values()]
        count = totals[0].new_tensor(len(next(iter(self._raw.values()))))
        *sums, n = global_sum(torch.stack([*totals, count])).unbind()
        return {
            f"rollout/score/{name}": total / n for name, total in zip(self._raw, sums, strict=True)
        }

    @property
    def models(self) -> list[ModelReward]:
        """The sources that are reward models."""
        return [source for source in self.sources if isinstance(source, ModelReward)]


def callable_reward(
    source: RewardSource, tokenizer: PreTrainedTokenizerBase, timeout: float | None
) -> CallableReward:
    """A function or a rule as a source of scores."""
    if source.rule is None:
        return FunctionReward(source.path, tokenizer, timeout)
    label = f"reward {source.name!r} (rule: {source.kind})"
    return CallableReward(label, source.rule, tokenizer, timeout)
