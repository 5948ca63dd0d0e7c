"""The monitor of one signal: a small state machine that is fed with one reading per step.

A monitor learns the normal range of its signal from the first steps, and then judges how far the
signal has moved from it. `Watch` feeds monitors, in a run or from the logs of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import copy
from enum import IntEnum
from statistics import median
from typing import Any, ClassVar, NamedTuple

from lit_callbacks.stats import noise_of, trend
from lit_callbacks.words import format_number

HISTORY = 100  # readings that a monitor remembers
# Deviations of the Mann-Kendall statistic that make a trend. In ten readings of uncorrelated noise
# 1 of 213 reaches it by chance; of noise with a lag-one correlation of 0.5 it is 1 in 25.
TREND_SCORE = 2.6
VISIBLE_TREND_SCORE = 2.0  # the same for the words "and rising" in a sentence: 1 of 35
NOISE_READINGS = 30  # latest readings from whose differences the noise is estimated
EARLY = 3  # readings from which a threshold is guessed before the baseline is known
STATE = ("steps", "responses", "_noise", "normal", "history", "_beyond", "side", "crossing")
TURNED_OFF = {"high": math.inf, "high_ratio": math.inf, "low": -math.inf, "low_ratio": 0.0}
FARTHEST = 0.9  # share of its baseline beyond which noise does not push a threshold


class Level(IntEnum):
    """The level of a monitor or a verdict, from good to bad; levels compare as numbers.

    `DATA_CHANGED` is a verdict only: the prompts are others than before, and no signal tells more.
    """

    DATA_CHANGED = -1
    HEALTHY = 0
    SUSPICIOUS = 1
    COLLAPSED = 2

    @property
    def word(self) -> str:
        """The level in lower case, for example `suspicious`."""
        return self.name.lower().replace("_", " ")

    @classmethod
    def parse(cls, argument: str, word: str) -> Level:
        """The level of the word that an argument holds: `healthy`, `suspicious` or `collapsed`."""
        words = {level.word: level for level in cls if level >= cls.HEALTHY}
        if word not in words:
            raise ValueError(f"{argument}: expected one of {', '.join(words)}, got {word!r}")
        return words[word]


class StepMetrics(NamedTuple):
    """Logged metrics of a step, numbers of its output tensors, and keys that are not finite.

    Metrics are averaged over ranks, and tensors are those of all ranks.
    """

    scalars: Mapping[str, float]
    tensors: Mapping[str, list[float]]
    non_finite: tuple[str, ...] = ()


class Monitor:
    """Watches one signal against fixed thresholds, or thresholds relative to its own start.

    A threshold is crossed when every condition given for its side holds: `high` (a value) and
    `high_ratio` (a multiple of the baseline). The noise of the signal moves a threshold given as a
    ratio to at least `deviations` of it from the baseline, but at most to twice its distance, and
    never farther than 0.9 of the baseline. The noise is the standard error of the mean over the
    step's responses where their number is known, or what the differences between successive
    readings show if that is more.

    The level is *collapsed* after `patience` steps in a row beyond a threshold. It is *suspicious*
    after as many steps beyond the fraction `suspicion` of the way from baseline to threshold, or
    when a trend leads beyond the threshold within `horizon` steps. Before the baseline is known,
    thresholds given as ratios are guessed from three readings or more, at twice the distance, and a
    reading beyond them does not enter the baseline.

    Attributes of a class are its defaults, and arguments go before them. `high` and `high_ratio` of
    infinity, `low` of minus infinity and `low_ratio` of 0 turn a threshold off.

    Args:
        key: Key of a logged metric, or name of a tensor among the training step's outputs, whose
            mean is taken.
        name: Name of the signal in sentences; by default the title, or the end of the key.
        high: Value that is too high, or `low` that is too low.
        high_ratio: Multiple of the baseline that is too high, or `low_ratio` that is too low.
        deviations: Distance from the baseline, in standard errors, that a value must also have to
            cross a threshold given as a ratio.
        suspicion: Fraction of the way from baseline to threshold that is suspicious, above 0 and at
            most 1.
        baseline_steps: Number of first steps (after the warm-up) whose median is the baseline.
        warmup: Number of steps at the start that are not judged.
        smoothing: Number of latest values whose median is the reading; 1 takes the value itself.
        patience: Number of steps in a row that make a level.
        horizon: Number of steps within which a trend must reach a threshold to be suspicious; 0
            turns this test off.
        trend_steps: Number of latest readings in which a trend is looked for.
        optional: Skip steps that lack the key instead of requiring it.
    """

    signal: ClassVar[str] = ""
    """Monitors of the same signal have one vote together. Empty: each key is its own signal."""
    title: ClassVar[str] = ""
    unit: ClassVar[str] = ""
    decisive: ClassVar[bool] = False
    """Whether this monitor, once it is collapsed, makes a collapse without a second signal."""
    limits: ClassVar[tuple[float, float]] = (-math.inf, math.inf)
    """The smallest and the largest value that the signal can have."""
    relative_noise: ClassVar[float] = 0.0
    """Standard deviation over single responses, as a multiple of the mean; 0 if not known."""
    stands_in: ClassVar[bool] = False
    """Whether it has a vote only where no other monitor of its signal reads."""
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
        given = {argument: value for argument, value in locals().items() if value is not None}
        vars(self).update({argument: given[argument] for argument in given if argument != "self"})
        self.name = name or self.title or self.key.rsplit("/", 1)[-1].replace("_", " ")
        least = {"baseline_steps": 1, "warmup": 0, "smoothing": 1, "patience": 1, "horizon": 0}
        for argument, count in {**least, "trend_steps": 3}.items():
            most = HISTORY if argument in ("smoothing", "trend_steps") else math.inf
            if not count <= (value := getattr(self, argument)) <= most:
                raise ValueError(f"{argument}: expected {count} to {most}, got {value}")
        top = math.inf if self.high is None else self.high
        bounds: tuple[tuple[str, Callable[[float], bool], str], ...] = (
            ("high", lambda x: x > -math.inf, "a number"),
            ("low", lambda x: x < top, "a number below high"),
            ("high_ratio", lambda x: x > 1, "a number above 1"),
            ("low_ratio", lambda x: 0 <= x < 1, "a number from 0 to below 1"),
            ("deviations", lambda x: x >= 0, "a number of at least 0"),
            ("suspicion", lambda x: 0 < x <= 1, "above 0 and at most 1"),
        )
        for argument, holds, expected in bounds:
            value = getattr(self, argument)
            if value is not None and not holds(value):
                raise ValueError(f"{argument}: expected {expected}, got {value}")
        for argument, off in TURNED_OFF.items():
            if getattr(self, argument) == off:
                setattr(self, argument, None)
        if {self.high, self.high_ratio, self.low, self.low_ratio} == {None}:
            raise ValueError(f"{self.key}: expected high, high_ratio, low or low_ratio, got none")
        self.steps = 0
        self.responses = 0
        """Number of responses behind the latest reading; 0 if not known."""
        self.relearn()

    def relearn(self) -> None:
        """Forget the baseline too, as after a change of the data."""
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
        # Steps in a row beyond the suspicious fraction, and beyond the threshold itself.
        self._beyond = [0, 0]

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
        """Take in the reading of one step, a mean of so many responses; 0 if that is not known.

        A reading that is not finite counts as beyond the threshold and never enters the baseline.
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
        self.side, self.crossing = side or self._side_beyond(self.suspicion), None
        # One step back in range starts both counts anew.
        self._beyond = [
            self._beyond[0] + 1 if self.side else 0,
            self._beyond[1] + 1 if side else 0,
        ]
        if self._beyond[1] >= self.patience:
            self.level = Level.COLLAPSED
        elif self._beyond[0] >= self.patience:
            self.level = Level.SUSPICIOUS
        elif crossing := self._forecast_crossing():
            self.side, self.crossing = crossing
            self.level = Level.SUSPICIOUS
        else:
            self.level = Level.HEALTHY

    def _latest(self, count: int) -> list[float]:
        """The latest readings, at most `count` and none of the warm-up."""
        return self.history[-max(1, min(count, self.steps - self.warmup)) :]

    def _smoothed(self) -> float:
        """The median of the latest readings; the latest one itself if it is not finite."""
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
        return self._beyond[1] > 0

    @property
    def decides(self) -> bool:
        """Whether this monitor makes a collapse now, without a second signal."""
        return self.decisive and self.level is Level.COLLAPSED

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

    def thresholds(self) -> tuple[float, float]:
        """The current lower and upper threshold; infinite where there is none (yet)."""
        low = self.threshold_of(-1, self.low, self.low_ratio)
        return low, self.threshold_of(+1, self.high, self.high_ratio)

    def standard_error(self, value: float) -> float:
        """Standard error of a mean of this value over the responses; 0 if it is not known."""
        if not (self.relative_noise and self.responses):
            return 0.0
        return self.relative_noise * abs(value) / math.sqrt(self.responses)

    def ratio_bound(self, baseline: float, ratio: float) -> float:
        """The value that a ratio stands for."""
        return baseline * ratio

    def threshold_of(self, sign: int, fixed: float | None, ratio: float | None) -> float:
        """The effective threshold of one side; `sign` is -1 for the low one and 1 for the high."""
        # before there is a baseline, it is guessed
        enough = len(self.normal) >= min(EARLY, self.baseline_steps)
        conditions, baseline = [], median(self.normal) if enough else None
        if fixed is not None:
            # only what is known to be noisy moves a fixed threshold, at most to twice its value
            noise = max(self._noise, self.standard_error(fixed)) if self.relative_noise else 0.0
            conditions.append(fixed + sign * min(noise, abs(fixed)))
        if ratio is not None:
            if baseline is None:
                return sign * math.inf  # all conditions must hold, and this one cannot be checked
            noise = max(self._noise, self.standard_error(baseline))
            if baseline > 0:  # a multiple of a baseline of 0 or below is no bound
                distance = abs(self.ratio_bound(baseline, ratio) - baseline)
                widest = distance if self.has_baseline else 2 * distance
                widest = max(widest, min(self.deviations * noise, 2 * distance))
                if sign < 0:
                    widest = max(distance, min(widest, FARTHEST * baseline))
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
        reading, baseline = self._smoothed(), self.baseline
        if not math.isfinite(reading):
            return "not finite"
        for side, sign, bound in zip(("low", "high"), (-1, 1), self.thresholds(), strict=True):
            if baseline is not None and math.isfinite(bound):
                bound -= (1 - fraction) * (bound - baseline)
            if sign * (reading - bound) > 0:
                return side
        return ""

    def _forecast_crossing(self) -> tuple[str, float] | None:
        """Side of the threshold that a trend leads to, and the number of steps until then."""
        recent = self._latest(self.trend_steps)
        enough = len(recent) == self.trend_steps and all(map(math.isfinite, recent))
        if self.horizon == 0 or self.baseline is None or not enough:
            return None
        slope, score = trend(recent)
        if abs(score) < TREND_SCORE or slope == 0:
            return None
        low, high = self.thresholds()
        steps = ((high if slope > 0 else low) - self._smoothed()) / slope
        if steps > self.horizon:
            return None
        return "high" if slope > 0 else "low", max(0.0, steps)

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
            least = 0.0  # as far as can be seen
        low, high = self.thresholds()
        if math.isfinite(low) and low <= least:
            return f"{self.name} is never below {format_number(low)}: its monitor is dead"
        if math.isfinite(high) and high >= most:
            return f"{self.name} is never above {format_number(high)}: its monitor is dead"
        if self.has_judged and not math.isfinite(low) and not math.isfinite(high):
            baseline = format_number(self.baseline or 0.0)
            return f"{self.name} has no threshold, as its baseline is {baseline}"
        return ""

    def sentence(self) -> str:
        """The state in words, for example `KL 41 nats is 12x its baseline and rising`."""
        value, baseline = self._smoothed(), self.baseline
        now = f"{format_number(value)} {self.unit}".rstrip()
        if not math.isfinite(value):
            return f"{self.name} is {format_number(value)}"
        low, high = self.thresholds()
        sign, threshold = (1, high) if self.side == "high" else (-1, low)
        if baseline is not None and sign * (value - baseline) > 0:
            ratio = value / baseline if sign > 0 and baseline > 0 else math.nan
            if 1.05 <= ratio < 100:  # "1x" and "3000000x its baseline" say nothing
                text = f"{self.name} {now} is {format_number(round(ratio, 1))}x its baseline"
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
        _, score = trend([v for v in self._latest(self.trend_steps) if math.isfinite(v)])
        if abs(score) >= VISIBLE_TREND_SCORE:
            text += " and rising" if score > 0 else " and falling"
        return text

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values."""
        state = {name.strip("_"): copy(getattr(self, name)) for name in STATE}
        return {**state, "level": int(self.level)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        for name in STATE:
            setattr(self, name, copy(state[name.strip("_")]))
        self.level = Level(state["level"])
