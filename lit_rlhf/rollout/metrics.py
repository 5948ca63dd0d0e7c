"""Metrics of rollouts that tell a better policy from a collapsing one.

Reward and losses look healthy during a collapse; KL, response length and perplexity do not
(Section 5.2 of arXiv 2307.04964). Notation: `B` responses, `T` response tokens.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from lit_rlhf.functional import masked_sum
from lit_rlhf.stats import all_gather_rows, global_sum

OPENING = 4  # tokens at the start of a response that are compared
_COUNTED = {
    "rollout/kl_per_token": "tokens",
    "rollout/perplexity": "tokens",
    "rollout/ref_perplexity": "tokens",
    "rollout/entropy": "tokens",
    "rollout/distinct_2": "bigrams",
    "rollout/repeated_2": "bigrams",
}
"""What the metrics that are not per response are a mean or share of."""


class RolloutMetrics:
    """The `rollout/*` metrics of all responses that were added, on all ranks.

    Sums and counts are kept, and ratios are taken of them at the end. So a metric does not depend
    on how the responses are spread over batches and ranks, which a mean of their means would.
    """

    KEYS: ClassVar[tuple[str, ...]] = (
        "rollout/kl",
        "rollout/kl_per_token",
        "rollout/response_length",
        "rollout/truncation_rate",
        "rollout/perplexity",
        "rollout/ref_perplexity",
        "rollout/entropy",
        "rollout/distinct_2",
        "rollout/repeated_2",
        "rollout/opening_share",
        "rollout/responses",
    )
    """The metrics of any responses; the means of scores are added to them."""

    def __init__(self) -> None:
        self._score_names: tuple[str, ...] = ()
        self._sums: dict[str, Tensor] = {}
        self._bigrams: Tensor | None = None
        self._openings: list[Tensor] = []

    def update(
        self,
        *,
        logprobs: Tensor,
        ref_logprobs: Tensor,
        entropy: Tensor,
        response_mask: Tensor,
        response_ids: Tensor,
        terminated: Tensor,
        scores: Mapping[str, Tensor] | None = None,
        votes: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Add a batch of responses of this rank.

        Args:
            logprobs: Log-probs under the policy, `[B, T]` nats.
            ref_logprobs: Log-probs under the reference, `[B, T]` nats.
            entropy: Entropies of the policy's distributions, `[B, T]` nats.
            response_mask: Tokens of the responses, `[B, T]` bool.
            response_ids: The tokens, `[B, T]` long.
            terminated: Whether a response ended by EOS, `[B]` bool.
            scores: Scores of the responses, `[B]`, by the same names in every batch. The mean of
                each is the metric `rollout/<name>`.
            votes: Which responses have a score, `[B]` bool, by its name; all of them for a name
                that is missing.
        """
        scores = scores or {}
        votes = votes or {}
        self._score_names = tuple(scores)
        inside = response_mask[:, :-1] & response_mask[:, 1:]
        own_bigrams = _distinct_bigrams(response_ids, inside)
        batch = {
            "logprobs": masked_sum(logprobs, response_mask),
            "ref_logprobs": masked_sum(ref_logprobs, response_mask),
            "entropy": masked_sum(entropy, response_mask),
            "tokens": response_mask.sum(),
            "truncated": (~terminated).sum(),
            "responses": torch.tensor(len(terminated), device=terminated.device),
            "bigrams": inside.sum(),
            "own_bigrams": torch.tensor(len(own_bigrams), device=response_mask.device),
        }
        for name, values in scores.items():
            mask = votes.get(name, torch.ones_like(values, dtype=torch.bool))
            batch[f"score {name}"] = masked_sum(values.double(), mask)
            batch[f"votes {name}"] = mask.sum()
        for name, value in batch.items():
            value = value.detach().double()
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        bigrams = own_bigrams[:, 1:]
        all_bigrams = bigrams if self._bigrams is None else torch.cat([self._bigrams, bigrams])
        self._bigrams = torch.unique(all_bigrams, dim=0)
        opening = response_ids.masked_fill(~response_mask, -1)[:, :OPENING]
        # -1 behind the end of a response
        padding = (0, OPENING - opening.shape[1])
        self._openings.append(functional.pad(opening, padding, value=-1))

    def compute(self) -> dict[str, Tensor]:
        """Compute the metrics of all ranks, each of which has to call it after as many updates.

        They are 0-dim float64; none without an update. Means per response: `kl` (nats),
        `response_length` (tokens), `truncation_rate` and the scores; per token: `kl_per_token`,
        `entropy` (nats) and the perplexities. `distinct_2` is the share of distinct bigrams,
        `repeated_2` of bigrams that their response already had, and `opening_share` of responses
        with the commonest first tokens.

        A mean or share of nothing is left out: of bigrams if no response has two tokens, and of a
        score that no response has.
        """
        if self._bigrams is None:
            return {}
        # one reduction for all sums
        totals = global_sum(torch.stack(list(self._sums.values())))
        sums = dict(zip(self._sums, totals.unbind(), strict=True))
        n_responses = sums["responses"]
        n_tokens = sums["tokens"]
        n_bigrams = sums["bigrams"]
        n_distinct = len(torch.unique(all_gather_rows(self._bigrams), dim=0))
        openings = all_gather_rows(torch.cat(self._openings))
        commonest = torch.unique(openings, dim=0, return_counts=True)[1].max()
        kl = sums["logprobs"] - sums["ref_logprobs"]
        metrics = {
            "rollout/kl": kl / n_responses,
            "rollout/kl_per_token": kl / n_tokens,
            "rollout/response_length": n_tokens / n_responses,
            "rollout/truncation_rate": sums["truncated"] / n_responses,
            "rollout/perplexity": (-sums["logprobs"] / n_tokens).exp(),
            "rollout/ref_perplexity": (-sums["ref_logprobs"] / n_tokens).exp(),
            "rollout/entropy": sums["entropy"] / n_tokens,
            "rollout/distinct_2": n_distinct / n_bigrams,
            "rollout/repeated_2": (n_bigrams - sums["own_bigrams"]) / n_bigrams,
            "rollout/opening_share": commonest / n_responses,
            "rollout/responses": n_responses,
        }
        counts = {key: sums[name] for key, name in _COUNTED.items()}
        for name in self._score_names:
            metrics[f"rollout/{name}"] = sums[f"score {name}"] / sums[f"votes {name}"]
            counts[f"rollout/{name}"] = sums[f"votes {name}"]
        # the same on all ranks, because the sums are
        is_empty = dict(zip(counts, torch.stack(list(counts.values())).eq(0).tolist(), strict=True))
        return {key: value for key, value in metrics.items() if not is_empty.get(key)}


def _distinct_bigrams(response_ids: Tensor, inside: Tensor) -> Tensor:
    """The distinct pairs of neighbouring tokens in each response, `[m, 3]`.

    A row is the number of the response and the two tokens.

    Args:
        response_ids: Tokens, `[B, T]`.
        inside: Whether a token and the next one are both real, `[B, T - 1]`.
    """
    rows = torch.arange(len(response_ids), device=response_ids.device)[:, None]
    triples = [rows.expand_as(response_ids)[:, 1:], response_ids[:, :-1], response_ids[:, 1:]]
    distinct: Tensor = torch.unique(torch.stack(triples, -1)[inside], dim=0)
    return distinct
