"""Accuracy, length bias and calibration of a reward model, and the report that has them all.

Numpy arrays `[N]` have one entry for each of `N` pairs. The difference of a pair is the score of
its chosen response minus the score of its rejected one; the model is right where it is above 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torchmetrics.functional import pearson_corrcoef, spearman_corrcoef
from torchmetrics.functional.classification import binary_calibration_error

from lit_rlhf.checks import check_count
from lit_rlhf.data import DataSource, PreferenceRecord, RecordError, parse_row, turns_as_dicts
from lit_rlhf.functional import pairwise_reward_loss, preference_probability, wilson_interval
from lit_rlhf.tools.evaluation.outcomes import ScoreSummary, score_summary
from lit_rlhf.tools.evaluation.output import to_json_types
from lit_rlhf.tools.evaluation.reward_report.scores import ScoredPairs

_CONFIDENCE_BINS = 15  # over [0, 1], as for the metric val/reward/calibration_error
_HISTOGRAM_BARS = 40

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Accuracy(NamedTuple):
    """Share of pairs in which the chosen response scores higher; a tie is a miss.

    Attributes:
        pairs: Number of pairs.
        accuracy: The share, in [0, 1].
        low: Lower end of its 95 % interval (Wilson).
        high: Upper end of the interval.
        margin: Mean difference of the scores.
        longer: Share of pairs in which the chosen response is longer; equal lengths count half.
    """

    pairs: int
    accuracy: float
    low: float
    high: float
    margin: float
    longer: float


class LengthBucket(NamedTuple):
    """Accuracy on the pairs of a range of length differences, chosen minus rejected, in tokens.

    Attributes:
        low: Smallest difference; `None` for no bound.
        high: Largest difference; `None` for no bound.
        accuracy: Accuracy on these pairs.
    """

    low: int | None
    high: int | None
    accuracy: Accuracy

    @property
    def label(self) -> str:
        """The bounds in words, for example `-5 or less` or `1 to 4`."""
        if self.low is None:
            return f"{self.high} or less"
        if self.high is None:
            return f"{self.low} or more"
        return str(self.low) if self.low == self.high else f"{self.low} to {self.high}"


class ReliabilityBin(NamedTuple):
    """The pairs in which the model is about equally confident, and how often people agreed.

    Attributes:
        pairs: Number of pairs.
        confidence: Mean probability that the model gives to the response it prefers, in [0.5, 1].
        accuracy: Share of pairs in which people preferred the same response.
        low: Lower end of the 95 % interval of the accuracy (Wilson).
        high: Upper end of the interval.
    """

    pairs: int
    confidence: float
    accuracy: float
    low: float
    high: float


def accuracy(differences: Floats, length_differences: Integers) -> Accuracy:
    """Compute the accuracy of the scores with its interval, and of preferring longer responses.

    Args:
        differences: Score of the chosen response less the score of the rejected one, `[N]`.
        length_differences: The same difference of the lengths in tokens, `[N]`.
    """
    right = int((differences > 0).sum())
    interval = wilson_interval(right, len(differences))
    return Accuracy(
        pairs=len(differences),
        accuracy=right / len(differences),
        low=interval.low,
        high=interval.high,
        margin=float(differences.mean()),
        longer=float(longer_is_right(length_differences).mean()),
    )


def longer_is_right(length_differences: Integers) -> Floats:
    """Say where a rule that prefers the longer response is right: 1 there, else 0.

    Args:
        length_differences: Chosen less rejected, in tokens, `[N]`. Equal lengths count 0.5.
    """
    return np.sign(length_differences) / 2 + 0.5


def length_buckets(differences: Floats, length_differences: Integers) -> list[LengthBucket]:
    """Compute accuracy by length difference: terciles of its size on either side of 0, and 0.

    Args:
        differences: Score of the chosen response less the score of the rejected one, `[N]`.
        length_differences: The same difference of the lengths in tokens, `[N]`.

    Returns:
        The buckets with pairs, from the shortest to the longest chosen response.
    """
    sizes = np.abs(length_differences[length_differences != 0])
    near, far = np.quantile(sizes, [1 / 3, 2 / 3]).astype(int) if len(sizes) else (1, 1)
    # Of few different sizes both terciles may be equal: the bucket between them is then empty.
    tops = [int(near), max(int(far), int(near))]
    positive = [(1, tops[0]), (tops[0] + 1, tops[1]), (tops[1] + 1, None)]
    # The same sizes on the other side: one rule for both, whichever side has more pairs.
    negative = [(None if high is None else -high, -low) for low, high in reversed(positive)]
    buckets = []
    for low, high in [*negative, (0, 0), *positive]:
        inside = np.ones(len(differences), dtype=bool)
        if low is not None:
            inside &= length_differences >= low
        if high is not None:
            inside &= length_differences <= high
        if inside.any():
            buckets.append(
                LengthBucket(
                    low=low,
                    high=high,
                    accuracy=accuracy(differences[inside], length_differences[inside]),
                )
            )
    return buckets


def reliability(differences: Floats) -> list[ReliabilityBin]:
    """Compute accuracy by confidence, in bins of equal width; empty bins are left out.

    Args:
        differences: Score differences of the pairs, `[N]`.
    """
    confidence = _confidence(differences)
    right = differences > 0
    # A confidence of 1 belongs to the last bin.
    place = np.minimum((confidence * _CONFIDENCE_BINS).astype(int), _CONFIDENCE_BINS - 1)
    bins = []
    for number in np.unique(place):
        inside = place == number
        hits = int(right[inside].sum())
        pairs = int(inside.sum())
        interval = wilson_interval(hits, pairs)
        bins.append(
            ReliabilityBin(
                pairs=pairs,
                confidence=float(confidence[inside].mean()),
                accuracy=hits / pairs,
                low=interval.low,
                high=interval.high,
            )
        )
    return bins


def calibration_error(differences: Floats) -> float:
    """Compute the expected calibration error: the mean distance of confidence and accuracy.

    Args:
        differences: Score differences of the pairs, `[N]`. They are binned as in `reliability`.
    """
    error = binary_calibration_error(
        torch.from_numpy(_confidence(differences)),
        torch.from_numpy((differences > 0).astype(np.int64)),
        n_bins=_CONFIDENCE_BINS,
    )
    return float(error)


def histogram(differences: Floats, sources: Sequence[str]) -> dict[str, Any]:
    """Count pairs by difference, in about 40 bars of a round width.

    Args:
        differences: Score differences of the pairs, `[N]`. The first and the last bar include the
            pairs beyond them.
        sources: Where each pair comes from, `[N]`.

    Returns:
        `counts` of bars `[K]` by source, between `edges` `[K + 1]`.
    """
    # A single outlier must not squeeze all other pairs into a few bars.
    reach = float(np.quantile(np.abs(differences), 0.995)) or 1.0
    width = _round_up(2 * reach / _HISTOGRAM_BARS)
    bars = int(np.ceil(reach / width))
    edges = np.arange(-bars, bars + 1) * width
    inside = np.clip(differences, edges[0], edges[-1])  # numpy's last bar includes its upper edge
    names = np.array(sources)
    return {
        "edges": [float(f"{edge:.10g}") for edge in edges],
        "counts": {
            name: np.histogram(inside[names == name], edges)[0].tolist()
            for name in dict.fromkeys(sources)
        },
    }


def correlation(a: NDArray[np.generic], b: NDArray[np.generic]) -> dict[str, float | None]:
    """Compute the Pearson and the Spearman correlation of two series.

    Args:
        a: One series, `[N]`.
        b: The other, `[N]`.

    Returns:
        `pearson` and `spearman` in [-1, 1]; `None` if one series does not vary.
    """
    x, y = (torch.from_numpy(np.asarray(values, dtype=np.float64)) for values in (a, b))
    # torchmetrics warns of constant input and returns NaN.
    if len(x) < 2 or bool((x == x[0]).all()) or bool((y == y[0]).all()):
        return {"pearson": None, "spearman": None}
    return {"pearson": float(pearson_corrcoef(x, y)), "spearman": float(spearman_corrcoef(x, y))}


def _confidence(differences: Floats) -> Floats:
    """Probability that the model gives to the response it prefers, in [0.5, 1]."""
    return preference_probability(torch.from_numpy(np.abs(differences))).numpy()


def _round_up(width: float) -> float:
    """Round up to 1, 2 or 5 times a power of ten."""
    size = 10.0 ** np.floor(np.log10(width))
    return float(next(step * size for step in (1, 2, 5, 10) if step * size >= width * (1 - 1e-9)))


def read_strengths(path: str) -> list[dict[str, Any]]:
    """Read the rows in a file of `lit_rlhf reward strength`, with the prompt as turns.

    Raises:
        RecordError: If a line is no pair, or has no strength.
    """
    rows: list[dict[str, Any]] = []
    for row in DataSource(path).read_rows():
        if isinstance(row, RecordError):
            raise row
        (record,) = parse_row(row, "pairs", "preference")
        assert isinstance(record, PreferenceRecord)  # for mypy: the kind that was asked for
        if not isinstance(row.get("strength"), float):
            raise row.error("not a number of `lit_rlhf reward strength`", field="strength")
        rows.append(
            {
                "source": record.source,
                "location": str(record.location),
                **row.fields,
                "prompt": turns_as_dicts(record.prompt),
            }
        )
    return rows


def strength_by_source(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Summarize rows of `read_strengths` by source.

    Returns:
        By source the number of `pairs`, the `mean` strength, and the share of `negative` ones.
    """
    by_source = {}
    for source in dict.fromkeys(row["source"] for row in rows):
        strengths = np.array([row["strength"] for row in rows if row["source"] == source])
        by_source[source] = {
            "pairs": len(strengths),
            "mean": float(strengths.mean()),
            "negative": float((strengths < 0).mean()),
        }
    return by_source


def describe_strengths(rows: Sequence[Mapping[str, Any]], limit: int) -> dict[str, Any]:
    """Summarize rows of `read_strengths`: by source, as a histogram, and the pairs below 0.

    Args:
        rows: The rows. A strength below 0 says that the models contradict the label.
        limit: Number of contradicted pairs that are listed at most, the weakest first.
    """
    doubtful = [row for row in rows if row["strength"] < 0]
    return {
        "by_source": strength_by_source(rows),
        "histogram": histogram(
            np.array([row["strength"] for row in rows]), [row["source"] for row in rows]
        ),
        "n_negative": len(doubtful),
        "weakest": sorted(doubtful, key=lambda row: float(row["strength"]))[:limit],
    }


@dataclass(frozen=True)
class RewardReport:
    """Measurements of a reward model on preference data. Intervals are 95 %.

    Attributes:
        model: Folder or hub id of the reward model.
        sources: Path of each source by its name.
        accuracy: Accuracy over all pairs.
        by_source: Accuracy by source.
        by_length: Accuracy by length difference.
        length_baseline: `longer` or `shorter`: the length rule that is right more often.
        gain: Accuracy of the model minus the accuracy of the length rule (bootstrap over pairs).
        pairwise_loss: Mean loss of Eq. 1 in nats, without margins.
        chosen_scores: Mean score of the chosen responses.
        rejected_scores: Mean score of the rejected responses.
        histogram: Histogram of the differences (Figure 2 of arXiv 2307.04964).
        reliability: Accuracy by confidence.
        calibration_error: Expected calibration error.
        difference_by_length: Correlation of score and length differences, over pairs.
        score_by_length: Correlation of scores and lengths, over all responses.
        perplexity: Perplexity of the chosen responses under the `reward model` and the
            `language model`, over the tokens of `all` pairs and `by_source`.
        lm_head: Folder of the output layer on the model's trunk.
        mistakes: The pairs in which the rejected response scores highest above the chosen one, the
            worst first. Lengths are in tokens, EOS counted; `probability` is the model's that
            people prefer the rejected response.
        n_mistakes: Number of all mistakes, including ties.
        skipped: Number of pairs that cannot be read, by reason.
        left_out: Number of pairs with a response that is too long without its prompt, by reason.
        shortened: Number of pairs that were cut to fit.
        differences: Score differences of all pairs; not in the JSON file.
        length_differences: Length differences of all pairs; not in the JSON file.
        strengths: Strengths in a file of `lit_rlhf reward strength`, see `describe_strengths`;
            empty without one.
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
    differences: Floats
    length_differences: Integers
    strengths: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Convert the report to JSON types; `None` replaces inf and nan."""
        left_out = ("differences", "length_differences")
        return dict(to_json_types({k: v for k, v in vars(self).items() if k not in left_out}))


def measure_reward_model(
    model: str,
    sources: dict[str, str],
    pairs: ScoredPairs,
    *,
    n_mistakes: int = 10,
    seed: int = 0,
    strengths: Sequence[Mapping[str, Any]] = (),
) -> RewardReport:
    """Measure a reward model by its scores of preference pairs.

    Args:
        model: Folder or hub id of the model, for the report.
        sources: Path of each source by its name, for the report.
        pairs: Scores of at least one pair.
        n_mistakes: Largest number of mistakes, and of pairs below strength 0, to show.
        seed: Seed of the bootstrap.
        strengths: Rows of `read_strengths` about these pairs or others.
    """
    check_count("mistakes", n_mistakes, minimum=0)
    differences = pairs.chosen - pairs.rejected
    lengths = pairs.chosen_lengths - pairs.rejected_lengths
    names = [record.source for record in pairs.records]
    by_name = np.array(names)
    overall = accuracy(differences, lengths)
    longer = longer_is_right(lengths)
    # The model must beat the better of the two length rules to have learned more than length.
    shorter_wins = overall.longer < 0.5
    rule = 1.0 - longer if shorter_wins else longer
    loss = pairwise_reward_loss(torch.from_numpy(pairs.chosen), torch.from_numpy(pairs.rejected))
    return RewardReport(
        model=model,
        sources=sources,
        accuracy=overall,
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
        strengths=describe_strengths(strengths, n_mistakes) if strengths else {},
    )


def _perplexities(pairs: ScoredPairs, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Compute the perplexity of the chosen responses under each language model."""
    by_name = np.array(names)
    tokens = pairs.chosen_lengths

    def perplexity(logprobs: Floats, rows: Flags) -> float:
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


def _mistakes(pairs: ScoredPairs, differences: Floats, limit: int) -> list[dict[str, Any]]:
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
