"""The monitors of the signals of a collapse in RLHF, with thresholds that fit most runs.

The default keys are those of `lit_rlhf`; pass another key to watch another module. The thresholds
were chosen on runs of the built-in world of `lit_rlhf`; the README gives the results on runs that
were not used to choose them.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lit_callbacks.monitors import Monitor, StepMetrics
from lit_callbacks.stats import distribution


class KLMonitor(Monitor):
    """KL divergence of the policy from its reference, in nats per response.

    It grows with the length of the responses, so the threshold depends on the task;
    `KLPerTokenMonitor` carries over better.
    """

    signal, title, unit = "kl", "KL", "nats"

    def __init__(self, key: str = "rollout/kl", high: float | None = 10.0, **options: Any) -> None:
        super().__init__(key, high=high, **options)


class KLPerTokenMonitor(Monitor):
    """KL divergence of the policy from its reference, in nats per response token.

    Args:
        decisive_factor: Multiple of `high` that makes a collapse without a second signal once it
            has been exceeded for `patience` steps. A policy that says the same to every prompt, in
            fluent responses of the usual length, may show in no other signal.

    Raises:
        ValueError: If `decisive_factor` is below 1.
    """

    signal, title, unit = "kl", "KL per token", "nats"

    def __init__(
        self,
        key: str = "rollout/kl_per_token",
        high: float | None = 0.12,
        decisive_factor: float = 4.0,
        **options: Any,
    ) -> None:
        super().__init__(key, high=high, **options)
        if not decisive_factor >= 1:
            raise ValueError(
                f"decisive_factor: expected a number of at least 1, got {decisive_factor}"
            )
        self.decisive_factor = decisive_factor

    @property
    def decides(self) -> bool:
        """Whether the latest readings, as many as `patience`, are all far beyond `high`."""
        if self.high is None:
            return False
        latest, bound = self._latest(self.patience), self.decisive_factor * self.high
        return len(latest) == self.patience and all(reading > bound for reading in latest)


class LengthMonitor(Monitor):
    """Length of the responses in tokens; watches for a rise and a fall."""

    signal, title, unit = "length", "length", "tokens"

    def __init__(
        self,
        key: str = "rollout/response_length",
        high_ratio: float | None = 1.5,
        low_ratio: float | None = 0.6,
        **options: Any,
    ) -> None:
        super().__init__(key, high_ratio=high_ratio, low_ratio=low_ratio, **options)


class TruncationMonitor(Monitor):
    """Share of the responses that were truncated at the length limit.

    If many are truncated from the start, the limit is short for the task; the threshold is then
    twice the baseline.
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
    """Perplexity of the responses under the policy; watches for a fall and a rise."""

    signal, title = "perplexity", "perplexity"

    def __init__(
        self,
        key: str = "rollout/perplexity",
        low_ratio: float | None = 0.65,
        high_ratio: float | None = 1.8,
        **options: Any,
    ) -> None:
        super().__init__(key, high_ratio=high_ratio, low_ratio=low_ratio, **options)


class EntropyMonitor(Monitor):
    """Entropy of the policy's next-token distribution, in nats per token: a fall, and a rise."""

    signal, title, unit = "entropy", "entropy", "nats"

    def __init__(
        self,
        key: str = "rollout/entropy",
        low_ratio: float | None = 0.6,
        high_ratio: float | None = 1.8,
        **options: Any,
    ) -> None:
        super().__init__(key, high_ratio=high_ratio, low_ratio=low_ratio, **options)


class RepetitionMonitor(Monitor):
    """Share of distinct bigrams in the responses; repetition makes it fall."""

    signal, title = "repetition", "distinct bigrams"

    def __init__(
        self, key: str = "rollout/distinct_2", low_ratio: float | None = 0.7, **options: Any
    ) -> None:
        super().__init__(key, low_ratio=low_ratio, **options)


class ExplainedVarianceMonitor(Monitor):
    """Share of the returns' variance that the critic explains; a new critic is given a warm-up."""

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
    """Probability ratio in the first minibatch of an update, which is 1 in a correct setup.

    Any other value means that rollouts and updates compute log-probs differently (dropout, padding,
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
    """Number of logged metrics that are NaN or infinite; makes a collapse without a second signal.

    Args:
        patience: Number of steps in a row with such a metric that make a collapse.
    """

    signal, title = "non-finite", "non-finite metrics"
    decisive = True

    def __init__(self, patience: int = 2) -> None:
        super().__init__("non-finite", high=0.0, patience=patience, horizon=0)
        self.found: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """Empty: this monitor looks at every logged metric."""
        return ()

    def read(self, metrics: StepMetrics) -> float:
        """Number of metrics that are not finite."""
        self.found = metrics.non_finite
        return float(len(self.found))

    def sentence(self) -> str:
        """The metrics that are not finite."""
        return f"{', '.join(self.found) or 'a metric'} not finite"


class RewardDistributionMonitor(Monitor):
    """Upper tail of the rewards of one batch: how far the best lie beyond the median.

    The reading is (95 % quantile - median) / (median - 5 % quantile), which is 1 for a symmetric
    distribution. A few responses that exploit the reward model make a long upper tail (Figure 13
    of arXiv 2307.04964). Skewness, kurtosis and quantiles are logged beside it, with a histogram.

    Args:
        key: Name of a tensor of rewards among the training step's outputs.
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
        """The rewards of the last step."""
        return self._sample

    @property
    def logged_key(self) -> str:
        """Key under which the detector logs the tail."""
        return f"monitor/{self.key}_tail"

    def details(self) -> dict[str, float]:
        """The shape of the distribution of the last step's rewards."""
        return asdict(distribution(self._sample))

    def read(self, metrics: StepMetrics) -> float:
        """The tail of this step's rewards.

        Raises:
            ValueError: If `key` is a logged metric instead of a tensor.
        """
        if self.key not in metrics.tensors:
            raise ValueError(f"key: expected a tensor of the step's outputs, got {self.key!r}")
        self._sample = metrics.tensors[self.key]
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
