"""How durations, numbers and metric names are written on one short line."""

from __future__ import annotations

import math
from collections.abc import Sequence


def duration_text(seconds: float) -> str:
    """A duration as ``mm:ss``, or ``h:mm:ss`` from one hour on.

    Args:
        seconds: duration in seconds, at least 0; fractions are cut off.

    Returns:
        The text, for example ``02:05`` or ``1:00:09``.
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


def number_text(value: float) -> str:
    """A number in three significant digits, without an exponent where it reads well without.

    Args:
        value: any float, nan and the infinities included.

    Returns:
        The text, for example ``0.512``, ``1234``, ``5e-07`` or ``nan``.
    """
    if math.isfinite(value) and 1000 <= abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.3g}"


def short_names(keys: Sequence[str]) -> list[str]:
    """The part of each key after its last slash, or the whole key where two would look the same.

    Args:
        keys: metric keys such as ``rollout/kl``.

    Returns:
        One name for each key, in the same order.
    """
    tails = [key.rsplit("/", 1)[-1] for key in keys]
    return [tail if tails.count(tail) == 1 else key for key, tail in zip(keys, tails, strict=True)]


def bar_text(fraction: float, width: int) -> str:
    """A bar of `width` characters, brackets included, filled from the left.

    Args:
        fraction: the filled part, from 0 to 1.
        width: number of characters, at least 3.

    Returns:
        The text, for example ``[####....]``.
    """
    filled = int(fraction * (width - 2))
    return f"[{'#' * filled}{'.' * (width - 2 - filled)}]"


def sparkline(values: Sequence[float], width: int) -> str:
    """A series as block characters, one for each of the newest values, the newest last.

    Args:
        values: any floats; one that is not finite makes a gap.
        width: characters at most, at least 1.

    Returns:
        The text, for example ``▁▃█``: the lowest value shown is the lowest block, the highest the
        highest. A series in which all are equal is a line at half height.
    """
    shown = list(values)[-width:]
    finite = [value for value in shown if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)

    def block(value: float) -> str:
        if not math.isfinite(value):
            return " "
        if low == high:
            return "▄"
        share = (value / 2 - low / 2) / (high / 2 - low / 2)  # halves, as the range may overflow
        return "▁▂▃▄▅▆▇█"[min(7, int(share * 8))]

    return "".join(map(block, shown))
