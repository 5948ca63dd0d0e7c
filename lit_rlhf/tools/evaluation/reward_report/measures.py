"""Accuracy, length bias and calibration of a reward model, from its scores of preference pairs.

All functions take numpy arrays `[N]` with one entry for each of `N` pairs. The difference of a pair
is the score of its chosen response minus that of its rejected one; the model is right where it is
above 0.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torchmetrics.functional import pearson_corrcoef, spearman_corrcoef
from torchmetrics.functional.classification import binary_calibration_error

from lit_rlhf.functional import preference_probability, wilson_interval

_CONFIDENCE_BINS = 15  # over [0, 1], as for the metric val/reward/calibration_error
_HISTOGRAM_BARS = 40

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Accuracy(NamedTuple):
    """Share of pairs in which the chosen response scores higher; a tie is a miss.

    `low` to `high` is its 95 % interval (Wilson), `margin` the mean difference of the scores, and
    `longer` the share of pairs in which the chosen response is longer; equal lengths count half.
    """

    pairs: int
    accuracy: float
    low: float
    high: float
    margin: float
    longer: float


class LengthBucket(NamedTuple):
    """Accuracy on the pairs whose length difference in tokens is from `low` to `high`.

    The difference is chosen minus rejected; `None` is no bound.
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

    `confidence` is the mean probability that the model gives to the response it prefers; `low` to
    `high` is the 95 % interval of the accuracy (Wilson).
    """

    pairs: int
    confidence: float
    accuracy: float
    low: float
    high: float


def accuracy(differences: Floats, length_differences: Integers) -> Accuracy:
    """Accuracy of the scores with its interval, and of preferring the longer response."""
    right = int((differences > 0).sum())
    low, high = wilson_interval(right, len(differences))
    return Accuracy(
        pairs=len(differences),
        accuracy=right / len(differences),
        low=low,
        high=high,
        margin=float(differences.mean()),
        longer=float(longer_is_right(length_differences).mean()),
    )


def longer_is_right(length_differences: Integers) -> Floats:
    """1 where the chosen response is longer, 0 where it is shorter, 0.5 for equal lengths."""
    return np.sign(length_differences) / 2 + 0.5


def length_buckets(differences: Floats, length_differences: Integers) -> list[LengthBucket]:
    """Accuracy by length difference: terciles of its size on either side of 0, and equal lengths.

    Buckets are those that are not empty, from the shortest to the longest chosen response.
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
            found = accuracy(differences[inside], length_differences[inside])
            buckets.append(LengthBucket(low, high, found))
    return buckets


def reliability(differences: Floats) -> list[ReliabilityBin]:
    """Accuracy by confidence, in bins of equal width; empty bins are left out."""
    confidence = _confidence(differences)
    right = differences > 0
    # A confidence of 1 belongs to the last bin.
    place = np.minimum((confidence * _CONFIDENCE_BINS).astype(int), _CONFIDENCE_BINS - 1)
    bins = []
    for number in np.unique(place):
        inside = place == number
        hits, pairs = int(right[inside].sum()), int(inside.sum())
        low, high = wilson_interval(hits, pairs)
        bins.append(
            ReliabilityBin(pairs, float(confidence[inside].mean()), hits / pairs, low, high)
        )
    return bins


def calibration_error(differences: Floats) -> float:
    """Expected calibration error: mean distance of confidence and accuracy over the same bins."""
    error = binary_calibration_error(
        torch.from_numpy(_confidence(differences)),
        torch.from_numpy((differences > 0).astype(np.int64)),
        n_bins=_CONFIDENCE_BINS,
    )
    return float(error)


def histogram(differences: Floats, sources: Sequence[str]) -> dict[str, Any]:
    """Numbers of pairs by difference: `counts` of bars `[K]` by source, between `edges` `[K + 1]`.

    About 40 bars have a round width; the first and the last include the pairs beyond them.
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
    """Pearson and Spearman correlation of two quantities; `None` if one does not vary."""
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
