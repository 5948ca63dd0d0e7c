"""The report on a reward model, from its scores of preference pairs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lit_rlhf.checks import check_count
from lit_rlhf.functional import pairwise_reward_loss, preference_probability
from lit_rlhf.tools.evaluation.outcomes import ScoreSummary, score_summary
from lit_rlhf.tools.evaluation.output import to_json_types
from lit_rlhf.tools.evaluation.reward_report.measures import (
    Accuracy,
    LengthBucket,
    ReliabilityBin,
    accuracy,
    calibration_error,
    correlation,
    histogram,
    length_buckets,
    longer_is_right,
    reliability,
)
from lit_rlhf.tools.evaluation.reward_report.scores import ScoredPairs


@dataclass(frozen=True)
class RewardReport:
    """Measurements of a reward model on preference data.

    Intervals are 95 %. Pairs are `skipped` if they cannot be read, `left_out` if a response is too
    long without its prompt (both by reason), and `shortened` to fit. Accuracy is over all pairs, by
    source and by length difference.

    Attributes:
        length_baseline: `longer` or `shorter`: the length rule that is right more often.
        gain: Accuracy of the model minus that of the length rule (bootstrap over pairs).
        pairwise_loss: Mean loss of Eq. 1 in nats, without margins.
        histogram: Histogram of the differences (Figure 2 of arXiv 2307.04964).
        reliability: Accuracy by confidence.
        difference_by_length: Correlation of score and length differences, over pairs.
        score_by_length: Correlation of scores and lengths, over all responses.
        perplexity: Of the chosen responses, under the `reward model` and the `language model`:
            over the tokens of `all` pairs, and `by_source`.
        lm_head: Folder of the output layer on the model's trunk.
        mistakes: The pairs in which the rejected response scores highest above the chosen one, the
            worst first. Lengths are in tokens, EOS counted; `probability` is the model's that
            people prefer the rejected response.
        n_mistakes: Number of all mistakes, including ties.
        differences: Score differences of all pairs; not in the JSON file.
        length_differences: Length differences of all pairs; not in the JSON file.
    """

    model: str
    sources: dict[str, str]
    accuracy: Accuracy
    by_source: dict[str, Accuracy]
    by_length: list[LengthBucket]
    length_baseline: str
    gain: ScoreSummary
    pairwise_loss: float
    chosen_scores: ScoreSummary
    rejected_scores: ScoreSummary
    histogram: dict[str, Any]
    reliability: list[ReliabilityBin]
    calibration_error: float
    difference_by_length: dict[str, float | None]
    score_by_length: dict[str, float | None]
    perplexity: dict[str, dict[str, Any]]
    lm_head: str
    mistakes: list[dict[str, Any]]
    n_mistakes: int
    skipped: dict[str, int]
    left_out: dict[str, int]
    shortened: int
    differences: NDArray[np.float64]
    length_differences: NDArray[np.int64]

    def as_dict(self) -> dict[str, Any]:
        """Convert the report to JSON types; `None` replaces inf and nan."""
        left_out = ("differences", "length_differences")
        return dict(to_json_types({k: v for k, v in vars(self).items() if k not in left_out}))


def measure_reward_model(
    model: str, sources: dict[str, str], pairs: ScoredPairs, n_mistakes: int = 10, seed: int = 0
) -> RewardReport:
    """Measure a reward model by its scores of preference pairs, at least one.

    `model` and the path of each of `sources` by name are for the report; `n_mistakes` limits the
    mistakes to show; `seed` is the bootstrap's.
    """
    check_count("mistakes", n_mistakes, minimum=0)
    differences = pairs.chosen - pairs.rejected
    lengths = pairs.chosen_lengths - pairs.rejected_lengths
    names = [record.source for record in pairs.records]
    by_name = np.array(names)
    whole = accuracy(differences, lengths)
    longer = longer_is_right(lengths)
    # The model must beat the better of the two length rules to have learned more than length.
    shorter_wins = whole.longer < 0.5
    rule = 1.0 - longer if shorter_wins else longer
    loss = pairwise_reward_loss(torch.from_numpy(pairs.chosen), torch.from_numpy(pairs.rejected))
    return RewardReport(
        model=model,
        sources=sources,
        accuracy=whole,
        by_source={
            name: accuracy(differences[by_name == name], lengths[by_name == name])
            for name in dict.fromkeys(names)
        },
        by_length=length_buckets(differences, lengths),
        length_baseline="shorter" if shorter_wins else "longer",
        gain=score_summary((differences > 0) - rule, seed),
        pairwise_loss=float(loss.loss),
        chosen_scores=score_summary(pairs.chosen, seed),
        rejected_scores=score_summary(pairs.rejected, seed),
        histogram=histogram(differences, names),
        reliability=reliability(differences),
        calibration_error=calibration_error(differences),
        difference_by_length=correlation(lengths, differences),
        score_by_length=correlation(
            np.concatenate([pairs.chosen_lengths, pairs.rejected_lengths]),
            np.concatenate([pairs.chosen, pairs.rejected]),
        ),
        perplexity=_perplexities(pairs, names),
        lm_head=pairs.lm_head,
        mistakes=_mistakes(pairs, differences, n_mistakes),
        n_mistakes=int((differences <= 0).sum()),
        skipped=dict(pairs.skipped),
        left_out=dict(pairs.left_out),
        shortened=pairs.shortened,
        differences=differences,
        length_differences=lengths,
    )


def _perplexities(pairs: ScoredPairs, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    by_name, tokens = np.array(names), pairs.chosen_lengths

    def perplexity(logprobs: NDArray[np.float64], rows: NDArray[np.bool_]) -> float:
        loss = -logprobs[rows].sum() / tokens[rows].sum()
        return float(torch.tensor(loss, dtype=torch.float64).exp())

    return {
        reader: {
            "all": perplexity(logprobs, np.full(len(names), True)),
            "by_source": {
                name: perplexity(logprobs, by_name == name) for name in dict.fromkeys(names)
            },
        }
        for reader, logprobs in pairs.logprobs.items()
    }


def _mistakes(
    pairs: ScoredPairs, differences: NDArray[np.float64], limit: int
) -> list[dict[str, Any]]:
    worst = np.argsort(differences, kind="stable")[:limit].tolist()
    return [
        {
            "source": record.source,
            "location": str(record.location),
            "prompt": record.prompt,
            "chosen": record.chosen,
            "rejected": record.rejected,
            "chosen_score": float(pairs.chosen[row]),
            "rejected_score": float(pairs.rejected[row]),
            "chosen_length": int(pairs.chosen_lengths[row]),
            "rejected_length": int(pairs.rejected_lengths[row]),
            "probability": float(preference_probability(torch.tensor(-differences[row]))),
        }
        for row, record in ((row, pairs.records[row]) for row in worst)
        if differences[row] < 0  # a tie is a miss, but not a preference for the rejected response
    ]
