"""The monitor of one signal: a small state machine that is fed with one reading per step.

A monitor learns the normal range of its signal from the first steps, and then judges how far the
signal has moved from it. `Watch` feeds monitors, in a run or from the logs of one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import IntEnum
from statistics import median
from typing import Any, ClassVar, NamedTuple, TypeVar

from lit_callbacks.stats import noise_of, trend
from lit_callbacks.words import format_number

T = TypeVar("T")

HISTORY = 100
"""Readings that a monitor remembers."""
TREND_SCORE = 2.6
"""Score of the Mann-Kendall statistic from which a series has a trend.

1 of 213 series of ten readings of uncorrelated noise reach it by chance, and 1 of 25 if the noise
has a lag-one correlation of 0.5.
"""
VISIBLE_TREND_SCORE = 2.0
"""Score from which a sentence says "and rising" or "and falling"; 1 of 35 series by chance."""
NOISE_READINGS = 30
"""Latest readings from whose differences the noise is estimated."""
EARLY_READINGS = 3
"""Readings from which a threshold is guessed before the baseline is known."""
NEAR_ZERO = 0.1
"""Share of the threshold below which a baseline is near zero, so that a multiple says nothing."""
LARGEST_RATIO = 25
"""From this multiple of a baseline on, a sentence compares with the threshold: "820x" says little.
"""
FARTHEST_SHARE = 0.9
"""Share of the baseline: noise does not push a low threshold farther away from it."""


class Level(IntEnum):
    """The level of a monitor or a verdict, from good to bad; levels compare as numbers.

    `DATA_CHANGED` is the level of a verdict only: the prompts have changed, and no other signal
    says more.
    """

    DATA_CHANGED = -1
    HEALTHY = 0
    SUSPICIOUS = 1
    COLLAPSED = 2

    def __str__(self) -> str:
        """The level as a word; numbers are for comparisons."""
        return self.word

    @property
    def word(self) -> str:
        """The level in lower case, for example `suspicious`."""
        return self.name.lower().replace("_", " ")

    @classmethod
    def parse(cls, argument: str, word: str) -> Level:
        """Parse the value of an argument: `healthy`, `suspicious` or `collapsed`.

        Args:
            argument: Name of the argument, for the error.
            word: Its value.

        Raises:
            ValueError: If the word is none of the three.
        """
        words = {level.word: level for level in cls if level >= cls.HEALTHY}
        if word not in words:
            raise ValueError(f"{argument}: expected one of {', '.join(words)}, got {word!r}")
        return words[word]


class StepMetrics(NamedTuple):
    """What a training step logged and returned, merged over ranks.

    Attributes:
        scalars: Logged metrics by key, averaged over ranks.
        tensors: Numbers of the output tensors by name, of all ranks one after the other.
        non_finite: Keys of the metrics that are NaN or infinite.
    """

    scalars: Mapping[str, float]
    tensors: Mapping[str, list[float]]
    non_finite: tuple[str, ...] = ()


class Range(NamedTuple):
    """A range of numbers.

    Attributes:
        low: Lower end; minus infinity for none.
        high: Upper end; infinity for none.
    """

    low: float
    high: float


class Crossing(NamedTuple):
    """A threshold that a trend leads to.

    Attributes:
        side: `low` or `high`.
        steps: Steps until the signal reaches it at its present slope, at least 0.
    """

    side: str
    steps: float


def choose(argument: T | None, default: T) -> T:
    """The argument, or the default of the class if it is `None`."""
    return default if argument is None else argument


def _share(share: float) -> str:
    """A share of a threshold in words: `4.1x`, or `56 % of` below 1."""
    return f"{format_number(round(share, 1))}x" if share >= 1.05 else f"{100 * share:.0f} % of"


class Monitor:
    """Watches one signal against fixed thresholds, or thresholds relative to its own start.

    A threshold is crossed when every condition given for its side holds: `high` (a value) and
    `high_ratio` (a multiple of the baseline), or `low` and `low_ratio`.

    Noise moves a threshold given as a ratio away from the baseline: to at least `deviations`
    standard errors, but at most to twice its distance, and a low one at most to a tenth of the
    baseline. The noise is the standard error of the mean over the step's responses where their
    number is known, or the noise that successive readings show if that is more.

    The level is *collapsed* once `patience` of the latest `2 * patience - 1` steps, and the last of
    them, are beyond a threshold, so that a signal that passes it in every second step is seen. It
    is *suspicious* after as many steps beyond the fraction `suspicion` of the way from baseline to
    threshold, or when a trend leads beyond the threshold within `horizon` steps. Before the
    baseline is known, thresholds given as ratios are guessed from three readings or more, at twice
    the distance, and a reading beyond them does not enter the baseline.

    A subclass sets its own defaults as class attributes. An argument that is `None` takes the
    default of the class.

    Args:
        key: Key of a logged metric, or name of a tensor among the training step's outputs, whose
            mean is taken.
        name: Name of the signal in sentences; by default the title, or the end of the key.
        high: Value above which the signal is too high, in its units; infinity turns it off.
        high_ratio: Multiple of the baseline above which the signal is too high, above 1; infinity
            turns it off.
        low: Value below which the signal is too low, in its units, below `high`; minus infinity
            turns it off.
        low_ratio: Multiple of the baseline below which the signal is too low, from 0 to below 1; 0
            turns it off.
        deviations: Distance from the baseline, in standard errors, that a value must also have to
            cross a threshold given as a ratio; at least 0.
        suspicion: Fraction of the way from baseline to threshold that is suspicious, above 0 and at
            most 1.
        baseline_steps: Number of first steps (after the warm-up) whose median is the baseline, at
            least 1.
        warmup: Number of steps at the start that are not judged, at least 0.
        smoothing: Number of latest values whose median is the reading, 1 to 100; 1 takes the value
            itself.
        patience: Number of steps that make a level, among the latest `2 * patience - 1`; at least
            1.
        horizon: Number of steps within which a trend must reach a threshold to be suspicious, at
            least 0; 0 turns this test off.
        trend_steps: Number of latest readings in which a trend is looked for, 3 to 100.
        optional: Skip steps that lack the key instead of requiring it.

    Raises:
        ValueError: If an argument is out of its range, or there is no threshold at all.
    """

    signal: ClassVar[str] = ""
    """Monitors of the same signal have one vote together. Empty: each key is its own signal."""
    title: ClassVar[str] = ""
    """Name of the signal in sentences."""
    unit: ClassVar[str] = ""
    """Unit of the readings in sentences."""
    decisive: ClassVar[bool] = False
    """Whether this monitor, once it is collapsed, makes a collapse without a second signal."""
    decisive_high: ClassVar[float | None] = None
    """Value from which it does so, if its latest `patience` readings are there."""
    decisive_low_ratio: ClassVar[float | None] = None
    """Multiple of the baseline below which it does so."""
    limits: ClassVar[Range] = Range(-math.inf, math.inf)
    """The smallest and the largest value that the signal can have."""
    relative_noise: ClassVar[float] = 0.0
    """Standard deviation over single responses, as a multiple of the mean; 0 if not known."""
    stands_in: ClassVar[bool] = False
    """Whether it has a vote only where no other monitor of its signal reads."""
    at_any_distance: ClassVar[bool] = False
    """Whether it counts for a collapse however near the policy is to its reference."""
    advisory: ClassVar[bool] = False
    """Whether it has no vote for a collapse: beyond its threshold, a run is suspicious at most."""
    key: str = ""
    high: float | None = None
    high_ratio: float | None = None
    low: float | None = None
    low_ratio: float | None = None
    deviations: float = 4.0
    suspicion: float = 0.75
    baseline_steps: int = 8
    warmup: int = 0
    smoothing: int = 1
    patience: int = 2
    horizon: int = 10
    trend_steps: int = 10
    optional: bool = False

    def __init__(
        self,
        key: str | None = None,
        name: str | None = None,
        *,
        high: float | None = None,
        high_ratio: float | None = None,
        low: float | None = None,
        low_ratio: float | None = None,
        deviations: float | None = None,
        suspicion: float | None = None,
        baseline_steps: int | None = None,
        warmup: int | None = None,
        smoothing: int | None = None,
        patience: int | None = None,
        horizon: int | None = None,
        trend_steps: int | None = None,
        optional: bool | None = None,
    ) -> None:
        self.key = choose(key, self.key)
        self.name = name or self.title or self.key.rsplit("/", 1)[-1].replace("_", " ")
        self.high = choose(high, self.high)
        self.high_ratio = choose(high_ratio, self.high_ratio)
        self.low = choose(low, self.low)
        self.low_ratio = choose(low_ratio, self.low_ratio)
        self.deviations = choose(deviations, self.deviations)
        self.suspicion = choose(suspicion, self.suspicion)
        self.baseline_steps = choose(baseline_steps, self.baseline_steps)
        self.warmup = choose(warmup, self.warmup)
        self.smoothing = choose(smoothing, self.smoothing)
        self.patience = choose(patience, self.patience)
        self.horizon = choose(horizon, self.horizon)
        self.trend_steps = choose(trend_steps, self.trend_steps)
        self.optional = choose(optional, self.optional)
        self._check_counts()
        self._check_thresholds()
        self._drop_disabled_thresholds()
        self.steps = 0
        self.responses = 0
        """Number of responses behind the latest reading; 0 if not known."""
        self.relearn()

    def _check_counts(self) -> None:
        self._check_count("baseline_steps", self.baseline_steps, Range(1, math.inf))
        self._check_count("warmup", self.warmup, Range(0, math.inf))
        self._check_count("smoothing", self.smoothing, Range(1, HISTORY))
        self._check_count("patience", self.patience, Range(1, math.inf))
        self._check_count("horizon", self.horizon, Range(0, math.inf))
        self._check_count("trend_steps", self.trend_steps, Range(3, HISTORY))

    @staticmethod
    def _check_count(argument: str, value: int, allowed: Range) -> None:
        if not allowed.low <= value <= allowed.high:
            raise ValueError(f"{argument}: expected {allowed.low} to {allowed.high}, got {value}")

    def _check_thresholds(self) -> None:
        # NaN fails each of these comparisons
        if self.high is not None and not self.high > -math.inf:
            raise ValueError(f"high: expected a number, got {self.high}")
        if self.low is not None and not self.low < choose(self.high, math.inf):
            raise ValueError(f"low: expected a number below high, got {self.low}")
        if self.high_ratio is not None and not self.high_ratio > 1:
            raise ValueError(f"high_ratio: expected a number above 1, got {self.high_ratio}")
        if self.low_ratio is not None and not 0 <= self.low_ratio < 1:
            raise ValueError(
                f"low_ratio: expected a number from 0 to below 1, got {self.low_ratio}"
            )
        if not self.deviations >= 0:
            raise ValueError(f"deviations: expected a number of at least 0, got {self.deviations}")
        if not 0 < self.suspicion <= 1:
            raise ValueError(f"suspicion: expected above 0 and at most 1, got {self.suspicion}")

    def _drop_disabled_thresholds(self) -> None:
        """Set thresholds to `None` that no value can cross; at least one has to remain."""
        if self.high == math.inf:
            self.high = None
        if self.high_ratio == math.inf:
            self.high_ratio = None
        if self.low == -math.inf:
            self.low = None
        if self.low_ratio == 0:
            self.low_ratio = None
        if {self.high, self.high_ratio, self.low, self.low_ratio} == {None}:
            raise ValueError(f"{self.key}: expected high, high_ratio, low or low_ratio, got none")

    def relearn(self) -> None:
        """Forget the baseline too, for instance after a change of the data."""
        self.normal: list[float] = []
        """Readings that make the baseline."""
        self.clear()

    def clear(self) -> None:
        """Forget the latest readings and the level, but not the baseline."""
        self.history: list[float] = []
        self._noise = 0.0
        self.level = Level.HEALTHY
        self.side = ""
        self.crossing: float | None = None
        # whether each of the latest steps is beyond the suspicious fraction of the threshold, and
        # beyond the threshold itself
        self._suspicious: list[bool] = []
        self._beyond: list[bool] = []

    @property
    def vote(self) -> str:
        """Name under which this monitor votes."""
        return self.signal or self.key

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the logged metrics or output tensors that this monitor needs."""
        return (self.key,)

    def can_read(self, metrics: StepMetrics) -> bool:
        """Whether the step has what this monitor reads."""
        return all(key in metrics.scalars or key in metrics.tensors for key in self.keys)

    def read(self, metrics: StepMetrics) -> float:
        """This monitor's reading of a step."""
        if self.key in metrics.scalars:
            return metrics.scalars[self.key]
        numbers = metrics.tensors[self.key]
        return sum(numbers) / len(numbers) if numbers else math.nan

    def observe(self, value: float, responses: int = 0) -> Level:
        """Take in the reading of one step.

        A reading that is not finite counts as beyond the threshold and never enters the baseline.

        Args:
            value: The reading, in units of the signal.
            responses: Number of responses that it is a mean of; 0 if that is not known.

        Returns:
            The level after this step.
        """
        self.steps += 1
        self.responses = responses
        self.history = [*self.history, value][-HISTORY:]
        if self.steps <= self.warmup:
            return self.level
        low, high = self.thresholds()
        # a collapse is neither normal nor noise
        if len(self.normal) < self.baseline_steps and math.isfinite(value) and low <= value <= high:
            self.normal.append(value)
        self._update_level()
        if not self.is_beyond:
            self._noise = noise_of(self._latest(NOISE_READINGS))
        return self.level

    def _update_level(self) -> None:
        side = self._side_beyond(1.0)
        self.side = side or self._side_beyond(self.suspicion)
        self.crossing = None
        window = 2 * self.patience - 1
        self._suspicious = [*self._suspicious, bool(self.side)][-window:]
        self._beyond = [*self._beyond, bool(side)][-window:]
        if side and sum(self._beyond) >= self.patience:
            self.level = Level.COLLAPSED
        elif self.side and sum(self._suspicious) >= self.patience:
            self.level = Level.SUSPICIOUS
        elif crossing := self._forecast_crossing():
            self.side = crossing.side
            self.crossing = crossing.steps
            self.level = Level.SUSPICIOUS
        else:
            self.level = Level.HEALTHY

    def _latest(self, count: int) -> list[float]:
        """The latest readings, at most `count` and none of the warm-up."""
        return self.history[-max(1, min(count, self.steps - self.warmup)) :]

    @property
    def reading(self) -> float:
        """The reading that is judged: the median of the latest values (`smoothing`).

        It is the latest value itself if that is not finite.
        """
        value = self.history[-1]
        recent = filter(math.isfinite, self._latest(self.smoothing))
        return median(recent) if math.isfinite(value) else value

    @property
    def has_baseline(self) -> bool | None:
        """Whether the baseline is known; `None` if no threshold needs one."""
        if self.high_ratio is None and self.low_ratio is None:
            return None
        return len(self.normal) >= self.baseline_steps

    @property
    def has_judged(self) -> bool:
        """Whether there were enough readings for a threshold."""
        return self.steps > self.warmup and self.has_baseline is not False

    @property
    def is_beyond(self) -> bool:
        """Whether the latest reading is beyond a threshold, regardless of patience."""
        return self._beyond[-1:] == [True]

    @property
    def decides(self) -> bool:
        """Whether this monitor makes a collapse now, without a second signal."""
        return self.level is Level.COLLAPSED and (self.decisive or self.is_extreme)

    @property
    def is_extreme(self) -> bool:
        """Whether the latest `patience` readings are all beyond a decisive bound."""
        latest = self._latest(self.patience)
        if len(latest) < self.patience:
            return False
        if self.decisive_high is not None and min(latest) >= self.decisive_high:
            return True
        baseline = self.baseline
        if self.decisive_low_ratio is None or baseline is None or baseline <= 0:
            return False
        return max(latest) < self.decisive_low_ratio * baseline

    @property
    def needs_distance(self) -> bool:
        """Whether it makes a collapse only in a policy that is far from its reference."""
        return not self.at_any_distance

    @property
    def sample(self) -> list[float]:
        """The numbers behind the last reading, for a histogram; empty for a scalar."""
        return []

    def details(self) -> dict[str, float]:
        """Additional scalars about the last reading, by name."""
        return {}

    @property
    def baseline(self) -> float | None:
        """Median of the first readings; `None` until there are enough of them."""
        return None if len(self.normal) < self.baseline_steps else median(self.normal)

    def thresholds(self) -> Range:
        """The current lower and upper threshold; infinite where there is none (yet)."""
        return Range(
            low=self.threshold_of(-1, fixed=self.low, ratio=self.low_ratio),
            high=self.threshold_of(+1, fixed=self.high, ratio=self.high_ratio),
        )

    def standard_error(self, value: float) -> float:
        """Standard error of a mean of this value over the responses; 0 if it is not known."""
        if not (self.relative_noise and self.responses):
            return 0.0
        return self.relative_noise * abs(value) / math.sqrt(self.responses)

    def ratio_bound(self, *, baseline: float, ratio: float) -> float:
        """The value that a ratio stands for."""
        return baseline * ratio

    def ratio_of(self, *, baseline: float, value: float) -> float:
        """The ratio that stands for a value; NaN if there is none."""
        return value / baseline if baseline > 0 else math.nan

    def set_threshold(self, argument: str, value: float) -> None:
        """Change a threshold.

        Args:
            argument: `high`, `high_ratio`, `low` or `low_ratio`.
            value: Its value, see the class.
        """
        setattr(self, argument, value)
        self._check_thresholds()

    def threshold_of(self, sign: int, *, fixed: float | None, ratio: float | None) -> float:
        """The effective threshold of one side.

        Args:
            sign: -1 for the low threshold, 1 for the high one.
            fixed: `low` or `high`, in units of the signal; `None` for none.
            ratio: `low_ratio` or `high_ratio`, a multiple of the baseline; `None` for none.

        Returns:
            The threshold in units of the signal; infinite if there is none (yet).
        """
        # the baseline is guessed until it is known
        enough = len(self.normal) >= min(EARLY_READINGS, self.baseline_steps)
        baseline = median(self.normal) if enough else None
        conditions = []
        if fixed is not None:
            # noise moves a fixed threshold only if the signal is known to be noisy, and at most to
            # twice its value
            noise = max(self._noise, self.standard_error(fixed)) if self.relative_noise else 0.0
            conditions.append(fixed + sign * min(noise, abs(fixed)))
        if ratio is not None:
            if baseline is None:
                return sign * math.inf  # all conditions must hold, and this one cannot be checked
            noise = max(self._noise, self.standard_error(baseline))
            if baseline > 0:  # a multiple of a baseline of 0 or below is no bound
                distance = abs(self.ratio_bound(baseline=baseline, ratio=ratio) - baseline)
                widest = distance if self.has_baseline else 2 * distance
                widest = max(widest, min(self.deviations * noise, 2 * distance))
                if sign < 0:
                    widest = max(distance, min(widest, FARTHEST_SHARE * baseline))
                conditions.append(baseline + sign * widest)
            elif noise > 0:
                conditions.append(baseline + sign * self.deviations * noise)
        if not conditions:
            return sign * math.inf
        return sign * max(sign * condition for condition in conditions)

    def _side_beyond(self, fraction: float) -> str:
        """The side on which the reading is beyond this fraction of the way to the threshold.

        Without a baseline there is no way to divide, and the fraction is taken as 1.
        """
        reading = self.reading
        baseline = self.baseline
        if not math.isfinite(reading):
            return "not finite"
        for side, sign, bound in zip(("low", "high"), (-1, 1), self.thresholds(), strict=True):
            if baseline is not None and math.isfinite(bound):
                bound -= (1 - fraction) * (bound - baseline)
            if sign * (reading - bound) > 0:
                return side
        return ""

    def _forecast_crossing(self) -> Crossing | None:
        """The threshold that a trend leads to; `None` if it is farther than the horizon."""
        recent = self._latest(self.trend_steps)
        enough = len(recent) == self.trend_steps and all(map(math.isfinite, recent))
        if self.horizon == 0 or self.baseline is None or not enough:
            return None
        slope, score = trend(recent)
        if abs(score) < TREND_SCORE or slope == 0:
            return None
        low, high = self.thresholds()
        steps = ((high if slope > 0 else low) - self.reading) / slope
        if steps > self.horizon:
            return None
        return Crossing("high" if slope > 0 else "low", max(0.0, steps))

    def allowed(self) -> str:
        """The thresholds in words, for example `length 93 to 264 tokens`; empty without any."""
        low, high = (-math.inf, math.inf) if self.decisive else self.thresholds()
        ends = [format_number(end) for end in (low, high) if math.isfinite(end)]
        if not ends:
            return ""
        word = "at least" if high == math.inf else "at most" if low == -math.inf else ""
        return " ".join(filter(None, [self.name, word, " to ".join(ends), self.unit]))

    def dead_threshold(self) -> str:
        """A warning if a threshold cannot be crossed by this signal; empty otherwise."""
        least, most = self.limits
        if least == -math.inf and self.normal and min(self.normal) >= 0:
            least = 0.0  # no reading suggests otherwise
        low, high = self.thresholds()
        if math.isfinite(low) and low <= least:
            return f"{self.name} is never below {format_number(low)}: its monitor is dead"
        if math.isfinite(high) and high >= most:
            return f"{self.name} is never above {format_number(high)}: its monitor is dead"
        if self.has_judged and not math.isfinite(low) and not math.isfinite(high):
            baseline = format_number(self.baseline or 0.0)
            return f"{self.name} has no threshold, because its baseline is {baseline}"
        return ""

    def sentence(self) -> str:
        """The state in words, for example `KL 41 nats is 12x its baseline and rising`."""
        value = self.reading
        baseline = self.baseline
        now = f"{format_number(value)} {self.unit}".rstrip()
        if not math.isfinite(value):
            return f"{self.name} is {format_number(value)}"
        low, high = self.thresholds()
        sign, threshold = (1, high) if self.side == "high" else (-1, low)
        if baseline is not None and sign * (value - baseline) > 0:
            ratio = value / baseline if sign > 0 and baseline > 0 else math.nan
            near_zero = 0 < baseline < NEAR_ZERO * threshold < math.inf
            # "1x its baseline" says nothing either
            if 1.05 <= ratio < LARGEST_RATIO and not near_zero:
                text = f"{self.name} {now} is {format_number(round(ratio, 1))}x its baseline"
            elif ratio >= LARGEST_RATIO and 0 < threshold < math.inf:
                text = f"{self.name} {now} is {_share(value / threshold)} its limit of "
                text += format_number(threshold)
            else:
                verb = "rose" if sign > 0 else "fell"
                text = f"{self.name} {verb} to {now} (baseline {format_number(baseline)})"
        elif sign * (value - threshold) > 0:
            side = "above" if sign > 0 else "below"
            text = f"{self.name} {now} is {side} {format_number(threshold)}"
        else:
            text = f"{self.name} is {now}"
        if self.crossing:
            steps = math.ceil(self.crossing)
            plural = "s" if steps > 1 else ""
            return (
                f"{text} and at this pace beyond {format_number(threshold)} in {steps} step{plural}"
            )
        score = trend([v for v in self._latest(self.trend_steps) if math.isfinite(v)]).score
        if abs(score) >= VISIBLE_TREND_SCORE:
            text += " and rising" if score > 0 else " and falling"
        return text

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values."""
        return {
            "steps": self.steps,
            "responses": self.responses,
            "noise": self._noise,
            "normal": list(self.normal),
            "history": list(self.history),
            "beyond": [list(self._suspicious), list(self._beyond)],
            "side": self.side,
            "crossing": self.crossing,
            "level": int(self.level),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self.steps = state["steps"]
        self.responses = state["responses"]
        self._noise = state["noise"]
        self.normal = list(state["normal"])
        self.history = list(state["history"])
        # older versions counted steps in a row
        self._suspicious, self._beyond = (
            [True] * min(steps, self.patience) if isinstance(steps, int) else list(steps)
            for steps in state["beyond"]
        )
        self.side = state["side"]
        self.crossing = state["crossing"]
        self.level = Level(state["level"])
