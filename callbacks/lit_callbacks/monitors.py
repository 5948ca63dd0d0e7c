"""One monitor for each signal of a collapse.

A monitor is a small state machine, fed with one reading per record (a training batch, an epoch): it
learns what is normal from the first records, then says how far the signal is from it. It knows no
Lightning: `CollapseDetector` feeds it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any, ClassVar, NamedTuple

from lit_callbacks.levels import Level
from lit_callbacks.series import Baseline, robust_baseline, trend
from lit_callbacks.text import number_text

HISTORY = 100  # readings that a monitor remembers
# Deviations of Mann-Kendall's statistic that make a trend. In ten readings of noise without memory
# 1 of 213 comes so far by chance; of noise with a lag-one correlation of 0.5 it is 1 in 25.
SURE = 2.6
VISIBLE = 2.0  # the same for the words "and rising" in a sentence: 1 of 35


class Record(NamedTuple):
    """What one record offers to the monitors; the same on every rank.

    Attributes:
        scalars: logged metrics by key, averaged over ranks.
        tensors: numbers of the step's outputs by name, of all ranks.
        non_finite: keys of logged metrics that were not finite on some rank.
    """

    scalars: Mapping[str, float]
    tensors: Mapping[str, list[float]]
    non_finite: tuple[str, ...] = ()


class Monitor:
    """Watches one signal against fixed lines, or lines relative to the signal's own start.

    A line is crossed when every condition given for its side is met: `high` (a value), `high_ratio`
    (a multiple of the baseline), and with a ratio also `deviations` of the baseline's spread, so
    that a noisy signal is given room. The monitor's level is *collapsed* after `patience` records
    in a row beyond a line, and *suspicious* after as many beyond most of the way (`suspicion`) from
    baseline to line, or when a trend leads beyond the line within `horizon` records.

    Args:
        key: key of a logged metric, or name of a tensor among the training step's outputs, whose
            mean is taken.
        name: what the signal is called in sentences; by default the end of its key.
        high: value that is too high.
        high_ratio: multiple of the baseline that is too high, above 1.
        low: value that is too low.
        low_ratio: multiple of the baseline that is too low, from 0 to 1.
        deviations: spreads (scaled median absolute deviation) from the baseline that a value must
            also have to cross a line given as a ratio.
        suspicion: part of the way from baseline to line that is suspicious, above 0 and at most 1.
        baseline_records: first records (after the warm-up) whose median is the baseline.
        warmup: records at the start that are not looked at.
        smoothing: a reading is the median of so many latest values; 1 takes the value itself.
        patience: records in a row that make a level.
        horizon: records within which a trend must reach a line to be suspicious; 0 for no such
            test.
        trend_records: latest readings in which a trend is looked for.
        optional: pass over records that lack the key, where others must have it.

    Raises:
        ValueError: for an argument out of range, or without any line.
    """

    signal: ClassVar[str] = ""
    """Monitors of one signal have one vote together; empty: one for each key."""
    title: ClassVar[str] = ""
    unit: ClassVar[str] = ""
    decisive: ClassVar[bool] = False
    """Whether this monitor alone makes a collapse."""

    def __init__(
        self,
        key: str,
        name: str | None = None,
        high: float | None = None,
        high_ratio: float | None = None,
        low: float | None = None,
        low_ratio: float | None = None,
        deviations: float = 4.0,
        suspicion: float = 0.75,
        baseline_records: int = 8,
        warmup: int = 0,
        smoothing: int = 1,
        patience: int = 2,
        horizon: int = 10,
        trend_records: int = 10,
        optional: bool = False,
    ) -> None:
        if high is None and high_ratio is None and low is None and low_ratio is None:
            raise ValueError(f"{key}: expected high, high_ratio, low or low_ratio, got none")
        for argument, count, least in (
            ("baseline_records", baseline_records, 1),
            ("warmup", warmup, 0),
            ("smoothing", smoothing, 1),
            ("patience", patience, 1),
            ("horizon", horizon, 0),
            ("trend_records", trend_records, 3),
        ):
            if count < least:
                raise ValueError(f"{argument}: expected at least {least}, got {count}")
        for argument, count in (("smoothing", smoothing), ("trend_records", trend_records)):
            if count > HISTORY:
                raise ValueError(f"{argument}: expected at most {HISTORY}, got {count}")
        for argument, line in (("high", high), ("low", low)):
            if line is not None and not math.isfinite(line):
                raise ValueError(f"{argument}: expected a finite number, got {line}")
        if low is not None and high is not None and low >= high:
            raise ValueError(f"low: expected a number below high ({high}), got {low}")
        if high_ratio is not None and not high_ratio > 1:
            raise ValueError(f"high_ratio: expected a number above 1, got {high_ratio}")
        if low_ratio is not None and not 0 <= low_ratio < 1:
            raise ValueError(f"low_ratio: expected a number from 0 to below 1, got {low_ratio}")
        if not deviations >= 0:
            raise ValueError(f"deviations: expected a number of at least 0, got {deviations}")
        if not 0 < suspicion <= 1:
            raise ValueError(f"suspicion: expected above 0 and at most 1, got {suspicion}")
        self.key = key
        self.name = name or self.title or key.rsplit("/", 1)[-1].replace("_", " ")
        self.high, self.high_ratio = high, high_ratio
        self.low, self.low_ratio = low, low_ratio
        self.deviations = deviations
        self.suspicion = suspicion
        self.baseline_records = baseline_records
        self.warmup = warmup
        self.smoothing = smoothing
        self.patience = patience
        self.horizon = horizon
        self.trend_records = trend_records
        self.optional = optional
        self.records = 0
        self.normal: list[float] = []
        """Readings that make the baseline."""
        self.clear()

    def clear(self) -> None:
        """Forget the latest readings and the level, but not the baseline."""
        self.history: list[float] = []
        self.level = Level.HEALTHY
        self.side = ""
        self.crossing: float | None = None
        self._beyond = [0, 0]  # records in a row beyond most of the way, and all of it

    # --- reading

    @property
    def vote(self) -> str:
        """Name under which this monitor votes."""
        return self.signal or self.key

    @property
    def keys(self) -> tuple[str, ...]:
        """Names that this monitor needs, of logged metrics or of the step's outputs."""
        return (self.key,)

    @property
    def logged_key(self) -> str:
        """Key of the logged metric that holds this monitor's readings."""
        return self.key

    def read(self, record: Record) -> float:
        """This monitor's number in `record`."""
        if self.key in record.scalars:
            return record.scalars[self.key]
        numbers = record.tensors[self.key]
        return sum(numbers) / len(numbers) if numbers else math.nan

    def observe(self, value: float) -> Level:
        """Take in the reading of one record and return the level.

        A reading that is not a finite number counts as beyond the line and never enters the
        baseline.
        """
        self.records += 1
        self.history = [*self.history, value][-HISTORY:]
        if self.records <= self.warmup:
            return self.level
        if len(self.normal) < self.baseline_records and math.isfinite(value):
            self.normal.append(value)
        self._judge()
        return self.level

    def _judge(self) -> None:
        beyond_line = self._side_beyond(1.0)
        self.side, self.crossing = beyond_line or self._side_beyond(self.suspicion), None
        self._beyond = [
            self._beyond[0] + 1 if self.side else 0,
            self._beyond[1] + 1 if beyond_line else 0,
        ]
        if self._beyond[1] >= self.patience:
            self.level = Level.COLLAPSED
        elif self._beyond[0] >= self.patience:
            self.level = Level.SUSPICIOUS
        elif drift := self._drift():
            self.side, self.crossing = drift
            self.level = Level.SUSPICIOUS
        else:
            self.level = Level.HEALTHY

    def _latest(self, count: int) -> list[float]:
        """The latest readings, at most `count` and none of the warm-up."""
        return self.history[-max(1, min(count, self.records - self.warmup)) :]

    def _reading(self) -> float:
        """The latest reading, smoothed; as it is if it is not finite."""
        value = self.history[-1]
        recent = filter(math.isfinite, self._latest(self.smoothing))
        return median(recent) if math.isfinite(value) else value

    @property
    def beyond(self) -> bool:
        """Whether the latest reading is beyond a line, be it for the first time."""
        return self._beyond[1] > 0

    # --- more to show

    @property
    def sample(self) -> list[float]:
        """The numbers behind the last reading, for a histogram; empty where it is a scalar."""
        return []

    def details(self) -> dict[str, float]:
        """More scalars about the last reading, by name."""
        return {}

    # --- lines

    @property
    def baseline(self) -> float | None:
        """Median of the first readings; None until they are there."""
        known = self._baseline()
        return None if known is None else known.center

    def _baseline(self) -> Baseline | None:
        if len(self.normal) < self.baseline_records:
            return None
        return robust_baseline(self.normal)

    def lines(self) -> tuple[float, float]:
        """The low and the high line; infinite where there is none (yet)."""
        high = self._line(+1, self.high, self.high_ratio)
        low = self._line(-1, self.low, self.low_ratio)
        return low, high

    def _line(self, sign: int, fixed: float | None, ratio: float | None) -> float:
        known, conditions = self._baseline(), []
        if fixed is not None:
            conditions.append(fixed)
        if ratio is not None:
            if known is None:
                return sign * math.inf
            # A multiple of nothing or of less says nothing, and so do spreads of width 0.
            if known.center > 0:
                conditions.append(known.center * ratio)
            if (room := self.deviations * known.spread) > 0:
                conditions.append(known.center + sign * room)
        if not conditions:
            return sign * math.inf
        return sign * max(sign * line for line in conditions)

    def _side_beyond(self, part: float) -> str:
        """The side on which the reading is beyond this part of the way from baseline to line.

        Empty where it is on neither. Without a baseline there is no way to divide, only the line.
        """
        reading, baseline = self._reading(), self.baseline
        if not math.isfinite(reading):
            return "not finite"
        for side, sign, line in zip(("low", "high"), (-1, 1), self.lines(), strict=True):
            mark = line
            if baseline is not None and math.isfinite(line):
                mark -= (1 - part) * (line - baseline)
            if sign * (reading - mark) > 0:
                return side
        return ""

    def _drift(self) -> tuple[str, float] | None:
        """Side of the line to which a trend leads, and the records until then; None without one."""
        recent = self._latest(self.trend_records)
        enough = len(recent) == self.trend_records and all(map(math.isfinite, recent))
        if self.horizon == 0 or self.baseline is None or not enough:
            return None
        slope, score = trend(recent)
        if abs(score) < SURE or slope == 0:
            return None
        low, high = self.lines()
        records = ((high if slope > 0 else low) - self._reading()) / slope
        if records > self.horizon:
            return None
        return "high" if slope > 0 else "low", max(0.0, records)

    # --- words

    def sentence(self) -> str:
        """What is the matter, for example ``KL 41 nats is 12x its baseline and rising``."""
        value, baseline = self._reading(), self.baseline
        now = f"{number_text(value)} {self.unit}".rstrip()
        if not math.isfinite(value):
            return f"{self.name} is {number_text(value)}"
        low, high = self.lines()
        sign, line = (1, high) if self.side == "high" else (-1, low)
        if baseline is not None and sign * (value - baseline) > 0:
            ratio = value / baseline if sign > 0 and baseline > 0 else math.nan
            if 1.05 <= ratio < 100:
                text = f"{self.name} {now} is {number_text(round(ratio, 1))}x its baseline"
            else:
                verb = "rose" if sign > 0 else "fell"
                text = f"{self.name} {verb} to {now} (baseline {number_text(baseline)})"
        elif sign * (value - line) > 0:
            text = f"{self.name} {now} is {'above' if sign > 0 else 'below'} {number_text(line)}"
        else:
            text = f"{self.name} is {now}"
        if self.crossing:
            records = math.ceil(self.crossing)
            plural = "s" if records > 1 else ""
            return f"{text} and at this pace beyond {number_text(line)} in {records} record{plural}"
        score = trend([v for v in self._latest(self.trend_records) if math.isfinite(v)]).score
        if abs(score) >= VISIBLE:
            text += " and rising" if score > 0 else " and falling"
        return text

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """All that changes, as plain values."""
        return {
            "records": self.records,
            "normal": list(self.normal),
            "history": list(self.history),
            "beyond": list(self._beyond),
            "level": int(self.level),
            "side": self.side,
            "crossing": self.crossing,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.records = state["records"]
        self.normal = list(state["normal"])
        self.history = list(state["history"])
        self._beyond = list(state["beyond"])
        self.level = Level(state["level"])
        self.side = state["side"]
        self.crossing = state["crossing"]
