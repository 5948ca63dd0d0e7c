"""The signals of a collapse in RLHF, each with the lines that fit most runs.

Keys are those of `lit_rlhf`; give another one to watch another module. The numbers were chosen on
runs of the built-in world of `lit_rlhf`; the README says what they did on runs they had not seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, quantiles
from typing import Any

from lit_callbacks.monitors import Monitor, Record


class KLMonitor(Monitor):
    """KL divergence of the policy to its reference, in nats per response.

    Long responses have more of it, so that a line must be chosen for the task;
    `KLPerTokenMonitor` carries over better.
    """

    signal, title, unit = "kl", "KL", "nats"

    def __init__(self, key: str = "rollout/kl", high: float | None = 10.0, **options: Any) -> None:
        super().__init__(key, high=high, **options)


class KLPerTokenMonitor(Monitor):
    """KL divergence of the policy to its reference, in nats per response token."""

    signal, title, unit = "kl", "KL per token", "nats"

    def __init__(
        self, key: str = "rollout/kl_per_token", high: float | None = 0.15, **options: Any
    ) -> None:
        super().__init__(key, high=high, **options)


class LengthMonitor(Monitor):
    """Length of the responses, in tokens, upwards and downwards."""

    signal, title, unit = "length", "length", "tokens"

    def __init__(
        self,
        key: str = "rollout/response_length",
        high_ratio: float | None = 1.6,
        low_ratio: float | None = 0.5,
        **options: Any,
    ) -> None:
        super().__init__(key, high_ratio=high_ratio, low_ratio=low_ratio, **options)


class TruncationMonitor(Monitor):
    """Share of the responses that were cut off at the length limit.

    Where many are from the start, the limit is short for the task: twice as many is too much then.
    """

    signal, title = "length", "truncation rate"

    def __init__(
        self,
        key: str = "rollout/truncation_rate",
        high: float | None = 0.3,
        high_ratio: float | None = 2.0,
        **options: Any,
    ) -> None:
        super().__init__(key, high=high, high_ratio=high_ratio, **options)


class PerplexityMonitor(Monitor):
    """Perplexity of the responses under the policy: an abnormal fall, and a rise."""

    signal, title = "perplexity", "perplexity"

    def __init__(
        self,
        key: str = "rollout/perplexity",
        low_ratio: float | None = 0.6,
        high_ratio: float | None = 2.0,
        **options: Any,
    ) -> None:
        super().__init__(key, high_ratio=high_ratio, low_ratio=low_ratio, **options)


class EntropyMonitor(Monitor):
    """Entropy of the policy's next-token distribution, in nats per token: a fall, and a rise."""

    signal, title, unit = "entropy", "entropy", "nats"

    def __init__(
        self,
        key: str = "rollout/entropy",
        low_ratio: float | None = 0.5,
        high_ratio: float | None = 2.0,
        **options: Any,
    ) -> None:
        super().__init__(key, high_ratio=high_ratio, low_ratio=low_ratio, **options)


class RepetitionMonitor(Monitor):
    """Share of distinct n-grams among those of the responses: repetition makes it fall."""

    signal, title = "repetition", "distinct bigrams"

    def __init__(
        self, key: str = "rollout/distinct_2", low_ratio: float | None = 0.6, **options: Any
    ) -> None:
        super().__init__(key, low_ratio=low_ratio, **options)


class ExplainedVarianceMonitor(Monitor):
    """Share of the returns' variance that the critic explains; a critic needs time to learn."""

    signal, title = "critic", "explained variance"

    def __init__(
        self,
        key: str = "ppo/explained_variance",
        low: float | None = 0.0,
        warmup: int = 20,
        patience: int = 5,
        **options: Any,
    ) -> None:
        super().__init__(key, low=low, warmup=warmup, patience=patience, **options)


class FirstRatioMonitor(Monitor):
    """Probability ratio in the first minibatch of an update, which is 1 where all is right.

    Anything else says that rollouts and updates compute log-probs differently (dropout, padding,
    temperature, precision). Updates that leave the policy alone do not log it.
    """

    signal, title = "ratio", "first ratio"

    def __init__(
        self,
        key: str = "ppo/ratio_first",
        high: float | None = 1.05,
        low: float | None = 0.95,
        optional: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(key, high=high, low=low, optional=optional, **options)


class NonFiniteMonitor(Monitor):
    """Number of logged metrics that are NaN or infinite; the one signal that needs no second.

    Args:
        patience: records in a row with such a metric that make a collapse.
    """

    signal, title = "non-finite", "non-finite metrics"
    decisive = True

    def __init__(self, patience: int = 2) -> None:
        super().__init__("non-finite", high=0.0, patience=patience, horizon=0)
        self.found: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """None: it looks at every logged metric."""
        return ()

    def read(self, record: Record) -> float:
        """How many metrics are not finite."""
        self.found = record.non_finite
        return float(len(self.found))

    def sentence(self) -> str:
        """Which metrics are not finite."""
        return f"{', '.join(self.found) or 'a metric'} not finite"


@dataclass(frozen=True)
class Distribution:
    """The shape of a sample.

    Attributes:
        mean: arithmetic mean.
        std: population standard deviation.
        skewness: third standardized moment; 0 where all numbers are equal.
        kurtosis: fourth standardized moment less 3; 0 where all numbers are equal.
        q05: 5 % quantile.
        median: 50 % quantile.
        q95: 95 % quantile.
        tail: (q95 - median) / (median - q05), 1 for a symmetric sample and where the lower half has
            no spread to compare with, as it is with equal rewards.
    """

    mean: float
    std: float
    skewness: float
    kurtosis: float
    q05: float
    median: float
    q95: float
    tail: float


def distribution(numbers: Sequence[float]) -> Distribution:
    """The shape of `numbers`; all NaN where one is not finite, or without numbers."""
    if not numbers or not all(map(math.isfinite, numbers)):
        return Distribution(*[math.nan] * 8)
    mean = fmean(numbers)
    variance = fmean((x - mean) ** 2 for x in numbers)
    third, fourth = (fmean((x - mean) ** power for x in numbers) for power in (3, 4))
    flat = variance <= 1e-24 * max(1.0, mean * mean)  # rounding alone
    # `quantiles` wants two numbers at least
    cuts = quantiles(numbers, n=20, method="inclusive") if len(numbers) > 1 else [mean] * 19
    q05, middle, q95 = cuts[0], cuts[9], cuts[18]
    return Distribution(
        mean,
        math.sqrt(variance),
        0.0 if flat else third / variance**1.5,
        0.0 if flat else fourth / variance**2 - 3.0,
        q05,
        middle,
        q95,
        (q95 - middle) / (middle - q05) if middle > q05 else 1.0,
    )


class RewardDistributionMonitor(Monitor):
    """Long upper tail of the rewards of one batch: how far the best lie beyond the median.

    The reading is (95 % quantile - median) / (median - 5 % quantile), which is 1 for a symmetric
    distribution. Rewards that a few responses cheat for have a long upper tail (Figure 13 of the
    paper); skewness, kurtosis and quantiles are logged beside it, with a histogram.

    Args:
        key: name of a tensor of rewards among the training step's outputs.
    """

    signal, title = "reward", "upper reward tail"

    def __init__(
        self,
        key: str = "scores",
        high: float | None = 2.0,
        high_ratio: float | None = 2.5,
        **options: Any,
    ) -> None:
        super().__init__(key, high=high, high_ratio=high_ratio, **options)
        self._sample: list[float] = []

    @property
    def sample(self) -> list[float]:
        """The rewards of the last record."""
        return self._sample

    @property
    def logged_key(self) -> str:
        """Where the detector logs the tail."""
        return f"monitor/{self.key}_tail"

    def details(self) -> dict[str, float]:
        """The shape of their distribution."""
        return asdict(distribution(self._sample))

    def read(self, record: Record) -> float:
        """The tail of this record's rewards."""
        if self.key not in record.tensors:
            raise ValueError(f"key: expected a tensor of the step's outputs, got {self.key!r}")
        self._sample = record.tensors[self.key]
        return distribution(self._sample).tail


def default_monitors() -> list[Monitor]:
    """One monitor per signal, under the keys of `lit_rlhf`'s `PPOModule`."""
    return [
        KLMonitor(),
        KLPerTokenMonitor(),
        LengthMonitor(),
        TruncationMonitor(),
        PerplexityMonitor(),
        EntropyMonitor(),
        RepetitionMonitor(),
        RewardDistributionMonitor(),
        ExplainedVarianceMonitor(),
        FirstRatioMonitor(),
        NonFiniteMonitor(),
    ]
