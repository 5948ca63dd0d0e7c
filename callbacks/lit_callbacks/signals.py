"""The monitors of the signals of a collapse in RLHF, with thresholds that fit most runs.

Signals are per token or relative to their start, so that thresholds carry over between tasks. The
default keys are the names in `lit_rlhf`; pass another key to watch another module. The page about
the detector (docs/collapse.md) says how the thresholds were chosen, and what they miss.
"""

from __future__ import annotations

import math
from enum import StrEnum
from statistics import median
from typing import Any, ClassVar

from lit_callbacks.monitors import Level, Monitor, Range, StepMetrics
from lit_callbacks.stats import distribution

RESPONSES_KEY = "rollout/responses"
"""Key of the number of responses of a step, from which standard errors follow."""
NOT_NEGATIVE = Range(0.0, math.inf)
SHARE = Range(0.0, 1.0)
START_READINGS = 3
"""Number of first readings that tell how far the policy was from its reference at the start."""


class KLMonitor(Monitor):
    """KL divergence of the policy from its reference, in nats per response.

    It grows with the length of the responses, so the threshold depends on the task: responses of
    2,000 tokens have 40 nats at 0.02 per token. Where a `KLPerTokenMonitor` reads, it has no vote.
    """

    signal = "kl"
    title = "KL"
    unit = "nats"
    relative_noise = 1.0
    stands_in = True
    key = "rollout/kl"
    high = 30.0


class KLPerTokenMonitor(Monitor):
    """KL divergence of the policy from its reference, in nats per response token.

    A policy may be far from its reference at the start, for example if the run goes on from another
    one, or if the reference is the base model of an SFT policy. So the least of the first three
    readings is added to the thresholds if it is above half of `high`.

    Beyond `decisive_factor` times `high`, and `decisive_nats` per response, for `patience` steps it
    makes a collapse without a second signal: a policy that says the same to every prompt, in fluent
    responses of the usual length, may show in no other. In responses of a few tokens, a policy that
    is far from its reference per token may still be a good one.

    Where `key` is not logged, the reading is KL per response over the length in tokens.

    Args:
        key: Key of KL per token, nats.
        decisive_factor: Multiple of `high` beyond which the monitor decides alone, at least 1.
        decisive_nats: KL beyond which the monitor decides alone, in nats per response.
        **options: Options of `Monitor`.
    """

    signal = "kl"
    title = "KL per token"
    unit = "nats"
    relative_noise = 1.0
    key = "rollout/kl_per_token"
    high: float | None = 0.07
    kl_key = "rollout/kl"
    length_key = "rollout/response_length"

    def __init__(
        self,
        key: str | None = None,
        decisive_factor: float = 3.0,
        decisive_nats: float = 15.0,
        **options: Any,
    ) -> None:
        super().__init__(key, **options)
        if not decisive_factor >= 1:
            raise ValueError(
                f"decisive_factor: expected a number of at least 1, got {decisive_factor}"
            )
        self.decisive_factor = decisive_factor
        self.decisive_nats = decisive_nats
        self._tokens = math.inf  # per response, in the latest step
        self._first: list[float] = []  # readings

    def can_read(self, metrics: StepMetrics) -> bool:
        """Whether the step has KL per token, or KL and length."""
        return super().can_read(metrics) or {self.kl_key, self.length_key} <= metrics.scalars.keys()

    def read(self, metrics: StepMetrics) -> float:
        """KL per token of this step."""
        self._tokens = max(metrics.scalars.get(self.length_key, math.inf), 1.0)
        if super().can_read(metrics):
            return super().read(metrics)
        return metrics.scalars[self.kl_key] / self._tokens

    @property
    def decides(self) -> bool:
        """Whether the latest `patience` readings are all far beyond `high`."""
        if self.high is None:
            return False
        latest = self._latest(self.patience)
        bound = max(self.decisive_factor * self.high, self.decisive_nats / self._tokens)
        bound += self.start
        return len(latest) == self.patience and all(reading > bound for reading in latest)

    @property
    def start(self) -> float:
        """KL per token at the start, if it was high; otherwise 0."""
        least = min(self._first, default=0.0)
        return least if least > (self.high or math.inf) / 2 else 0.0

    def observe(self, value: float, responses: int = 0) -> Level:
        """Take in the reading of one step, see `Monitor.observe`."""
        if len(self._first) < START_READINGS and math.isfinite(value):
            self._first.append(value)
        return super().observe(value, responses)

    def threshold_of(self, sign: int, *, fixed: float | None, ratio: float | None) -> float:
        """The effective threshold of one side, counted from KL per token at the start.

        Args:
            sign: -1 for the low threshold, 1 for the high one.
            fixed: `low` or `high`, in nats per token; `None` for none.
            ratio: `low_ratio` or `high_ratio`, a multiple of the baseline; `None` for none.
        """
        return super().threshold_of(sign, fixed=fixed, ratio=ratio) + self.start

    def set_threshold(self, argument: str, value: float) -> None:
        """Change a threshold; the distance beyond which the monitor decides alone moves no nearer.

        Args:
            argument: `high`, `high_ratio`, `low` or `low_ratio`.
            value: Its value, see `Monitor`.
        """
        if argument == "high" and self.high is not None:
            self.decisive_factor = max(1.0, self.decisive_factor * self.high / value)
        super().set_threshold(argument, value)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values."""
        return {**super().state_dict(), "first": list(self._first)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        super().load_state_dict(state)
        self._first = list(state["first"])


class NegativeKLMonitor(Monitor):
    """KL of the policy from its reference, in nats per response; watches for a value below 0.

    A KL divergence is never negative, and its estimate from samples of the policy is so by chance
    alone. An estimate that stays below -1 nat means that the samples are not the policy's: other
    weights, a truncated distribution, or padding that is counted. It makes a collapse by itself.

    Where `key` is not logged, the reading is KL per token times the length in tokens.
    """

    at_any_distance = True
    signal = "negative-kl"
    title = "KL"
    unit = "nats"
    relative_noise = 1.0
    decisive = True
    optional = True
    key = "rollout/kl"
    low = -1.0
    smoothing = 3
    patience = 3
    horizon = 0
    per_token_key = "rollout/kl_per_token"
    length_key = "rollout/response_length"

    def dead_threshold(self) -> str:
        """Empty: only a defect in the run makes an estimate cross it."""
        return ""

    def can_read(self, metrics: StepMetrics) -> bool:
        """Whether the step has KL, or KL per token and length."""
        factors = {self.per_token_key, self.length_key}
        return super().can_read(metrics) or factors <= metrics.scalars.keys()

    def read(self, metrics: StepMetrics) -> float:
        """KL of this step."""
        if super().can_read(metrics):
            return super().read(metrics)
        return metrics.scalars[self.per_token_key] * metrics.scalars[self.length_key]


class ScoreMonitor(Monitor):
    """Mean score of the responses; watches for a lasting fall, by which a run is broken.

    Training raises the score. The threshold is one standard deviation of the scores below the
    baseline; beyond twice that for `patience` steps, it makes a collapse by itself. Where the
    spread of the scores is not logged, `noise_factor` times the noise of their mean stands for it.

    Args:
        key: Key of the mean score.
        noise_factor: Standard deviation of the scores as a multiple of the noise of their mean, for
            logs without the spread; above 0. It is the root of the number of responses of a step.
        **options: Options of `Monitor`.
    """

    at_any_distance = True  # a score falls however near the policy is to its reference
    signal = "score"
    title = "score"
    optional = True
    key = "rollout/score"
    low_ratio = 0.5
    smoothing = 5
    patience = 5
    horizon = 0
    spread_key = "monitor/scores_std"
    tensor_key = "scores"

    def __init__(self, key: str | None = None, noise_factor: float = 8.0, **options: Any) -> None:
        super().__init__(key, **options)
        if not noise_factor > 0:
            raise ValueError(f"noise_factor: expected a number above 0, got {noise_factor}")
        self.noise_factor = noise_factor
        self._first_spreads: list[float] = []

    def read(self, metrics: StepMetrics) -> float:
        """The mean score of this step."""
        scores = metrics.tensors.get(self.tensor_key, ())
        spread = metrics.scalars.get(self.spread_key, math.nan)
        if scores:
            spread = distribution(scores)["std"]
        if len(self._first_spreads) < self.baseline_steps and math.isfinite(spread):
            self._first_spreads.append(spread)
        return super().read(metrics)

    def threshold_of(self, sign: int, *, fixed: float | None, ratio: float | None) -> float:
        """The effective threshold of one side: a fall by the spread of the scores.

        Args:
            sign: -1 for the low threshold, 1 for the high one.
            fixed: `low` or `high`, in units of the score; `None` for none.
            ratio: Anything but `None` for a threshold on this side.
        """
        if fixed is not None or ratio is None:
            return super().threshold_of(sign, fixed=fixed, ratio=None)
        if self.baseline is None or not self._spread:
            return sign * math.inf
        return self.baseline + sign * self._spread

    def dead_threshold(self) -> str:
        """Empty: the threshold is known once the scores have varied."""
        return ""

    @property
    def _spread(self) -> float:
        spread = median(self._first_spreads) if self._first_spreads else 0.0
        return max(spread, self.noise_factor * self._noise)

    @property
    def decides(self) -> bool:
        """Whether the score is far below its threshold, too."""
        if self.level is not Level.COLLAPSED or self.baseline is None:
            return False
        return self.reading < self.baseline - 2 * self._spread

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values."""
        return {**super().state_dict(), "spreads": list(self._first_spreads)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        super().load_state_dict(state)
        self._first_spreads = list(state["spreads"])


class LengthMonitor(Monitor):
    """Length of the responses in tokens; watches for a rise and a fall.

    Where the length of the reference's responses to the same prompts is logged (`reference_key`),
    the reading is a multiple of it, and a change of the prompts cancels out.
    """

    signal = "length"
    title = "length"
    unit = "tokens"
    limits = NOT_NEGATIVE
    relative_noise = 0.6
    key = "rollout/response_length"
    high_ratio = 2.0
    low_ratio = 0.6
    reference_key = "rollout/ref_response_length"

    def read(self, metrics: StepMetrics) -> float:
        """The length in tokens, or as a multiple of the reference's if that is logged."""
        length = super().read(metrics)
        if (reference := metrics.scalars.get(self.reference_key, 0.0)) > 0:
            return length / reference
        return length


class ShareMonitor(Monitor):
    """A share of the responses, whose standard error follows from their number.

    The threshold goes at most half of the way from the baseline to 1, so that a share that is high
    from the start can still cross it. A share above `most` is beyond its threshold whatever the
    baseline is, so that a run that begins in trouble has no healthy baseline; two such signals make
    a collapse however near the policy is to its reference.
    """

    limits = SHARE
    high_ratio: float | None = 2.0
    most: ClassVar[float] = 1.0
    """Share above which the signal is too high in any run; 1 for none."""

    @property
    def needs_distance(self) -> bool:
        """Whether the latest reading is not above `most`."""
        return not (self.history and self.reading >= self.most)

    def threshold_of(self, sign: int, *, fixed: float | None, ratio: float | None) -> float:
        """The effective threshold of one side, at most `most`.

        Args:
            sign: -1 for the low threshold, 1 for the high one.
            fixed: `low` or `high`; `None` for none.
            ratio: `low_ratio` or `high_ratio`, a multiple of the baseline; `None` for none.
        """
        threshold = super().threshold_of(sign, fixed=fixed, ratio=ratio)
        # a reading equal to the bound is beyond it
        return min(threshold, math.nextafter(self.most, 0)) if sign > 0 else threshold

    @property
    def is_extreme(self) -> bool:
        """Whether the share has risen beyond its decisive bound, from a start within its range."""
        return self.baseline is not None and super().is_extreme

    def standard_error(self, value: float) -> float:
        """Standard error of a share."""
        if not self.responses:
            return 0.0
        # a share cannot change by less than one response
        return max(math.sqrt(max(value * (1 - value), 0) / self.responses), 1 / self.responses)

    def ratio_bound(self, *, baseline: float, ratio: float) -> float:
        """The multiple of the baseline, or half of the way to 1 if that is less."""
        return min(baseline * ratio, (1 + baseline) / 2) if ratio > 1 else baseline * ratio


class TruncationMonitor(ShareMonitor):
    """Share of the responses that were truncated at the length limit."""

    signal = "truncation"
    title = "truncation rate"
    key = "rollout/truncation_rate"
    high = 0.3
    most = 0.95


class EntropyMonitor(Monitor):
    """Entropy of the next-token distribution in nats per token; watches for a fall and a rise."""

    signal = "entropy"
    title = "entropy"
    unit = "nats"
    limits = NOT_NEGATIVE
    relative_noise = 0.35
    key = "rollout/entropy"
    high_ratio = 1.8
    low_ratio = 0.55
    decisive_low_ratio: ClassVar[float | None] = 0.1


class PerplexityMonitor(EntropyMonitor):
    """Perplexity of the responses under the policy; watches for a fall and a rise.

    On the policy's own samples it is the exponential of the entropy, in expectation. So it has no
    vote where an `EntropyMonitor` reads, and ratios are ratios of its logarithm.
    """

    title = "perplexity"
    unit = ""
    limits = Range(1.0, math.inf)
    stands_in = True
    decisive_low_ratio = None  # a ratio of the entropy is none of the perplexity
    key = "rollout/perplexity"

    def ratio_bound(self, *, baseline: float, ratio: float) -> float:
        """The baseline to the power of the ratio."""
        return float(max(baseline, 1.0) ** ratio)

    def ratio_of(self, *, baseline: float, value: float) -> float:
        """The ratio of the logarithms; NaN for a baseline of at most 1."""
        return math.log(max(value, 1.0)) / math.log(baseline) if baseline > 1 else math.nan


class RepetitionMonitor(Monitor):
    """Share of distinct bigrams in all responses together; repetition makes it fall.

    Responses of a single token have no bigrams, and no such share.
    """

    signal = "repetition"
    title = "distinct bigrams"
    limits = SHARE
    relative_noise = 0.2
    optional = True
    key = "rollout/distinct_2"
    low_ratio = 0.7
    decisive_low_ratio = 0.4


class RepeatedBigramsMonitor(ShareMonitor):
    """Share of a response's bigrams that it already had: repetition within responses."""

    signal = "repetition"
    title = "repeated bigrams"
    optional = True
    key = "rollout/repeated_2"
    high = 0.15
    most = 0.7
    decisive_high = 0.5


class OpeningMonitor(ShareMonitor):
    """Share of the responses that begin with the commonest opening: repetition across responses."""

    signal = "opening"
    title = "commonest opening"
    optional = True
    key = "rollout/opening_share"
    high = 0.3
    most = 0.9
    decisive_high = 0.8


class EnsembleMonitor(Monitor):
    """Standard deviation of a response's scores over several reward models; watches for a rise."""

    signal = "ensemble"
    title = "spread of the reward models"
    limits = NOT_NEGATIVE
    relative_noise = 0.7
    optional = True
    key = "rollout/score_spread"
    high_ratio = 2.0


class RewardDistributionMonitor(Monitor):
    """Width of the distribution of one batch's rewards; watches for a rise and a fall.

    The reading is the standard deviation. A few responses that exploit the reward model make it
    wider (Figure 13 of arXiv 2307.04964: quantiles of -1 and 9 become 0 and 25); rewards that all
    reach a ceiling, or one response to every prompt, make it narrow. Quantiles are logged beside
    it, and a histogram to TensorBoard.

    In a log the width is read from `monitor/<key>_std`.

    Args:
        key: Name of a tensor among the training step's outputs: the reward of each response.
        **options: Options of `Monitor`.
    """

    signal = "reward"
    title = "spread of the scores"
    limits = NOT_NEGATIVE
    relative_noise = 0.7
    key = "scores"
    high_ratio = 2.0
    low_ratio = 0.4

    def __init__(self, key: str | None = None, **options: Any) -> None:
        super().__init__(key, **options)
        self._sample: list[float] = []

    @property
    def sample(self) -> list[float]:
        """The rewards of the last step."""
        return self._sample

    def details(self) -> dict[str, float]:
        """The shape of the last step's rewards; empty if only their width is known."""
        return distribution(self._sample) if self._sample else {}

    def can_read(self, metrics: StepMetrics) -> bool:
        """Whether the step has the rewards, or their logged width."""
        return super().can_read(metrics) or f"monitor/{self.key}_std" in metrics.scalars

    def read(self, metrics: StepMetrics) -> float:
        """The width of this step's rewards."""
        if self.key in metrics.scalars:
            raise ValueError(f"key: expected a tensor of the step's outputs, got {self.key!r}")
        self._sample = list(metrics.tensors.get(self.key, ()))
        if not self._sample:
            return metrics.scalars.get(f"monitor/{self.key}_std", math.nan)
        return distribution(self._sample)["std"]


class GroupSpreadMonitor(ShareMonitor):
    """Share of the prompts whose responses all have the same score, with several responses to each.

    Such a prompt teaches nothing: the advantages of its responses are 0. Near 1, a run goes on at
    full cost and hardly learns. The prompts may be too hard or too easy, or the policy may give one
    answer to each. More responses per prompt, other prompts, or a higher temperature help. It is no
    sign of a collapse by itself, and has no vote for one.

    Where `key` is not logged, the reading is 1 less the share of the prompts that do teach.
    """

    signal = "groups"
    title = "share of prompts whose responses score the same"
    optional = True
    advisory = True
    key = "rollout/uninformative_share"
    high = 0.9
    high_ratio = None
    suspicion = 1.0
    patience = 5
    horizon = 0
    informative_key = "rollout/informative_share"

    def can_read(self, metrics: StepMetrics) -> bool:
        """Whether the step has the share, or the share of the other prompts."""
        return super().can_read(metrics) or self.informative_key in metrics.scalars

    def read(self, metrics: StepMetrics) -> float:
        """The share of this step."""
        if super().can_read(metrics):
            return super().read(metrics)
        return 1.0 - metrics.scalars[self.informative_key]


class ExplainedVarianceMonitor(Monitor):
    """Share of the returns' variance that the critic explains; a new critic is given a warm-up.

    Runs without a critic do not log it.
    """

    signal = "critic"
    title = "explained variance"
    limits = Range(-math.inf, 1.0)
    optional = True
    key = "ppo/explained_variance"
    low = 0.0
    warmup = 20
    patience = 5


class FirstRatioMonitor(Monitor):
    """Probability ratio in the first minibatch of an update.

    If it is not 1, rollouts and updates compute log-probs differently (dropout, padding,
    temperature, precision). Updates that leave the policy alone do not log it.
    """

    at_any_distance = True  # log-probs of another network are wrong however near the policy seems
    signal = "ratio"
    title = "first ratio"
    limits = NOT_NEGATIVE
    optional = True
    key = "ppo/ratio_first"
    high = 1.05
    low = 0.95
    decisive_high = 1.2


class SamplerMonitor(Monitor):
    """KL(sampler || policy), in nats per token, if something else samples; watches for a rise.

    It is high if the sampler has older weights than the policy or computes differently. Runs whose
    sampler is the policy itself do not log it.
    """

    at_any_distance = True  # as for the first ratio
    signal = "sampler"
    title = "KL of the sampler to the policy"
    unit = "nats per token"
    limits = NOT_NEGATIVE
    optional = True
    key = "rollout/sampler_kl"
    high = 0.02
    high_ratio = 3.0
    decisive_high = 0.1


class PromptMonitor(Monitor):
    """A statistic of the prompts, or of the frozen reference on them: whether the data changed.

    It votes for no collapse. It is beyond its thresholds when the latest two readings both differ
    from the median of the five before by more than the ratios, and by six times the noise.
    """

    signal = "data"
    title = "prompt length"
    unit = "tokens"
    limits = NOT_NEGATIVE
    optional = True
    key = "rollout/prompt_length"
    high_ratio = 1.2
    low_ratio = 0.83
    n_earlier = 5
    """Number of readings that the latest two are compared with."""

    @property
    def has_baseline(self) -> bool | None:
        """Always `None`: readings are compared with the ones right before."""
        return None

    def _update_level(self) -> None:
        latest = self.history[-2:]
        earlier = self.history[-2 - self.n_earlier : -2]
        self.level = Level.HEALTHY
        self.side = ""
        if len(earlier) < self.n_earlier or not all(map(math.isfinite, [*latest, *earlier])):
            return
        middle = median(earlier)
        room = 6 * max(self._noise, self.standard_error(middle))
        high = max(middle * (self.high_ratio or math.inf), middle + room)
        low = min(middle * (self.low_ratio or 0.0), middle - room)
        self.normal = earlier
        if min(latest) > high or max(latest) < low:
            self.level = Level.COLLAPSED
            self.side = "high" if latest[-1] > high else "low"

    def allowed(self) -> str:
        """Empty: the thresholds move with the readings."""
        return ""

    def dead_threshold(self) -> str:
        """Empty: the thresholds move with the readings."""
        return ""


class NonFiniteMonitor(Monitor):
    """Number of logged metrics that are NaN or infinite; makes a collapse by itself.

    Args:
        patience: Number of steps in a row with such metrics that make a collapse, at least 1.
    """

    signal = "non-finite"
    title = "non-finite metrics"
    decisive = True
    key = "non-finite"
    high = 0.0
    horizon = 0

    def __init__(self, patience: int = 2) -> None:
        super().__init__(patience=patience)
        self.non_finite: tuple[str, ...] = ()
        """Metrics of the last step that are not finite."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Empty: this monitor looks at every logged metric."""
        return ()

    def read(self, metrics: StepMetrics) -> float:
        """Number of metrics that are not finite."""
        self.non_finite = metrics.non_finite
        return float(len(self.non_finite))

    def sentence(self) -> str:
        """The metrics that are not finite, in words."""
        return f"{', '.join(self.non_finite) or 'a metric'} not finite"


class Preset(StrEnum):
    """A task that thresholds are meant for."""

    CHAT = "chat"
    """Answers of some length, scored by a reward model."""
    SHORT_ANSWERS = "short answers"
    """Answers of about 20 tokens or fewer, in which a good policy may be far from its reference."""
    CHECKABLE_REWARD = "checkable reward"
    """Answers that are right or wrong: they grow or shrink, and become surer as they are right."""

    @classmethod
    def parse(cls, word: str) -> Preset:
        """Parse the value of an argument `preset`; `ValueError` if there is no such preset."""
        words = [preset.value for preset in cls]
        if word not in words:
            raise ValueError(f"preset: expected one of {', '.join(words)}, got {word!r}")
        return cls(word)


_PRESETS: dict[Preset, dict[str, dict[str, Any]]] = {
    Preset.CHAT: {},
    Preset.SHORT_ANSWERS: {
        "kl_per_token": {"high": 1.0},
        "length": {"high_ratio": 2.5, "low_ratio": 0.3},
    },
    Preset.CHECKABLE_REWARD: {
        "kl_per_token": {"high": 1.0},
        "length": {"high_ratio": 4.0, "low_ratio": 0.25},
        "entropy": {"low_ratio": 0.1},
        "width": {"low_ratio": 0.0},  # rewards that are all right have no width
    },
}
"""Thresholds of a preset that differ from the monitors' own."""


def default_monitors(preset: str = Preset.CHAT) -> list[Monitor]:
    """One monitor per metric, under the keys of `lit_rlhf`'s `PPOModule`.

    Args:
        preset: The task that the thresholds are meant for: `chat`, `short answers` or `checkable
            reward`; see `Preset`.

    Raises:
        ValueError: If there is no such preset.
    """
    changes = _PRESETS[Preset.parse(preset)]
    entropy = changes.get("entropy", {})
    return [
        KLMonitor(),
        KLPerTokenMonitor(**changes.get("kl_per_token", {})),
        LengthMonitor(**changes.get("length", {})),
        TruncationMonitor(),
        PerplexityMonitor(**entropy),
        EntropyMonitor(**entropy),
        RepetitionMonitor(),
        RepeatedBigramsMonitor(),
        OpeningMonitor(),
        RewardDistributionMonitor(**changes.get("width", {})),
        EnsembleMonitor(),
        GroupSpreadMonitor(),
        ExplainedVarianceMonitor(),
        FirstRatioMonitor(),
        SamplerMonitor(),
        NegativeKLMonitor(),
        ScoreMonitor(),
        PromptMonitor(),
        PromptMonitor("rollout/ref_prompt_entropy", name="the reference's entropy at the prompts"),
        NonFiniteMonitor(),
    ]
