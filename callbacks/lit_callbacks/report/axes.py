"""From values to places in a picture, with ticks at round numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

_FEW_DECADES = 3.0  # below this a signed logarithm has no room for ticks


@dataclass(frozen=True)
class Axis:
    """One axis.

    Attributes:
        low: value at its start.
        high: value at its end, above `low`.
        start: place of `low`.
        end: place of `high`.
        signed_log: whether it goes by sign(v) log10(1 + |v|): linear around 0, logarithmic far out.
    """

    low: float
    high: float
    start: float
    end: float
    signed_log: bool = False

    def at(self, value: float) -> float:
        """Place of a finite value, also of one beyond the ends."""
        low, high, here = (
            (signed_log(v) if self.signed_log else v) for v in (self.low, self.high, value)
        )
        return self.start + (here - low) / (high - low) * (self.end - self.start)

    def ticks(self, most: int, whole: bool = False) -> list[tuple[float, str]]:
        """Round values on the axis, with their texts.

        Args:
            most: how many there are at most, at least 2.
            whole: whether they are whole numbers.
        """
        if self.signed_log:
            return self._signed_log_ticks(most)
        step = nice_step((self.high - self.low) / most)
        if whole:
            step = max(1.0, step)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [(i * step, tick_text(i * step, step)) for i in range(first, last + 1)]

    def _signed_log_ticks(self, most: int) -> list[tuple[float, str]]:
        top = math.ceil(signed_log(max(abs(self.low), abs(self.high))))
        every = max(1, math.ceil(2 * top / most) if self.low < -1 else math.ceil((top + 1) / most))
        sizes = [10.0**power for power in range(0, top + 1, every)]
        values = [*(-size for size in reversed(sizes)), 0.0, *sizes]
        return [(v, tick_text(v, 1.0)) for v in values if self.low <= v <= self.high]


def value_axis(
    values: list[float], start: float, end: float, log_allowed: bool, floor: float | None
) -> Axis:
    """The axis that holds all of `values`, with some room above and below.

    Args:
        values: finite ones.
        start: place of its lower end.
        end: place of its upper end.
        log_allowed: whether it may be logarithmic, where the values ask for it.
        floor: lowest value that it goes down to; None for no such bound.
    """
    low, high = min(values, default=0.0), max(values, default=1.0)
    if floor is not None:
        low, high = max(low, floor), max(high, floor)
    if low > 0 and low < 0.4 * high:
        low = 0.0  # a scale from zero costs little here and says more
    if low == high:
        low, high = low - 0.1 * abs(low), high + (0.1 * abs(high) or 1.0)
    logarithmic = log_allowed and signed_log(high) - signed_log(low) > _FEW_DECADES / 2
    if logarithmic:
        return Axis(low, high * 1.15, start, end, signed_log=True)
    room = 0.06 * (high - low)
    return Axis(low - (0.0 if low == 0.0 else room), high + room, start, end)


def signed_log(value: float) -> float:
    """sign(v) log10(1 + |v|)."""
    return math.copysign(math.log10(1 + abs(value)), value)


def nice_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is at least `least`."""
    size = 10.0 ** math.floor(math.log10(least))
    return next(step * size for step in (1, 2, 5, 10) if step * size >= least * (1 - 1e-9))


def tick_text(value: float, step: float) -> str:
    """A tick's value with as many decimals as `step` has, and k or M for thousands or millions."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if step >= size or abs(value) >= 10 * size:
            return f"{value / size:g}{letter}" if value else "0"
    if step < 1e-4:
        return f"{value:.2g}" if value else "0"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:.{decimals}f}"
