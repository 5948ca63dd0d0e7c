"""Charts as inline SVG, in the colours of the page that they stand on.

SVG is written here, and not by a plotting library, because the pages need what matplotlib's SVG
backend does not write: CSS classes in place of colours (dark mode), values in attributes and titles
(hover), and ids that stay unique when several charts stand on one page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

# In the chart's own units, which are about CSS pixels in a column of the page.
WIDTH = 380
LEFT, RIGHT, TOP = 46, 370, 24  # edges of the plot area
MIN_DECADES = 1.5  # a signed logarithm of fewer decades has no room for ticks


class Tick(NamedTuple):
    """A labelled position on an axis."""

    value: float
    text: str


@dataclass(frozen=True)
class Scale:
    """Range of the values on an axis.

    Attributes:
        low: Value at the start of the axis.
        high: Value at its end, above `low`.
        signed_log: Use sign(v) log10(1 + |v|), which is linear around 0 and logarithmic far out.
        whole: Place ticks at whole numbers only.
    """

    low: float
    high: float
    signed_log: bool = False
    whole: bool = False

    def fraction(self, value: float) -> float:
        """Position of a finite value: 0 at the start of the axis, 1 at its end.

        Examples:
            >>> Scale(-1.0, 3.0).fraction(0.0)
            0.25
        """
        low, high, here = (
            (signed_log(v) if self.signed_log else v) for v in (self.low, self.high, value)
        )
        return (here - low) / (high - low)

    def ticks(self, most: int) -> list[Tick]:
        """Ticks at round values.

        Args:
            most: Largest number of ticks, at least 2.

        Examples:
            >>> [tick.text for tick in Scale(0.0, 0.9).ticks(5)]
            ['0.0', '0.2', '0.4', '0.6', '0.8']
        """
        if self.signed_log:
            return self._signed_log_ticks(most)
        step = nice_step((self.high - self.low) / most)
        if self.whole:
            step = max(1.0, step)
        # The margins keep a tick at either end in spite of rounding.
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [Tick(i * step, tick_text(i * step, step)) for i in range(first, last + 1)]

    def _signed_log_ticks(self, most: int) -> list[Tick]:
        top = math.ceil(signed_log(max(abs(self.low), abs(self.high))))
        every = max(1, math.ceil(2 * top / most) if self.low < -1 else math.ceil((top + 1) / most))
        sizes = [10.0**power for power in range(0, top + 1, every)]
        values = [*(-size for size in reversed(sizes)), 0.0, *sizes]
        return [Tick(v, tick_text(v, 1.0)) for v in values if self.low <= v <= self.high]


def fit_scale(
    values: Sequence[float], allow_signed_log: bool = False, floor: float | None = None
) -> Scale:
    """The scale that holds all values, with some room above and below.

    Args:
        values: Finite values.
        allow_signed_log: Use a signed logarithm if the values span several orders of magnitude.
        floor: Lowest value to show, however low the values are; `None` for no floor.

    Examples:
        >>> fit_scale([1.0, 10.0])
        Scale(low=0.0, high=10.6, signed_log=False, whole=False)
    """
    low, high = min(values, default=0.0), max(values, default=1.0)
    if floor is not None:
        low, high = max(low, floor), max(high, floor)
    if low > 0 and low < 0.4 * high:
        low = 0.0  # a scale from zero costs little room here, and shows proportions
    if low == high:
        low, high = low - 0.1 * abs(low), high + (0.1 * abs(high) or 1.0)
    if allow_signed_log and signed_log(high) - signed_log(low) > MIN_DECADES:
        return Scale(low, high * 1.15, signed_log=True)
    room = 0.06 * (high - low)
    return Scale(low - (0.0 if low == 0.0 else room), high + room)


def signed_log(value: float) -> float:
    """sign(v) log10(1 + |v|).

    Examples:
        >>> signed_log(-99.0)
        -2.0
    """
    return math.copysign(math.log10(1 + abs(value)), value)


def nice_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is at least `least`.

    Examples:
        >>> nice_step(0.3), nice_step(70.0)
        (0.5, 100.0)
    """
    size = 10.0 ** math.floor(math.log10(least))
    return next(step * size for step in (1, 2, 5, 10) if step * size >= least * (1 - 1e-9))


def tick_text(value: float, step: float) -> str:
    """A tick's value with as many decimals as `step` has, and k or M for thousands or millions.

    Examples:
        >>> tick_text(0.3, 0.1), tick_text(20000.0, 5000.0)
        ('0.3', '20k')
    """
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if step >= size or abs(value) >= 10 * size:
            return f"{value / size:g}{letter}" if value else "0"
    if step < 1e-4:
        return f"{value:.2g}" if value else "0"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:.{decimals}f}"


class Chart:
    """One chart: a plot area with axes, which the methods fill in the order of their calls.

    Positions are in values of the axes, and what lies outside of the plot area is clipped. Styles
    are CSS classes of `page.css`. A template inserts the chart as it is: `{{ chart }}`.

    Args:
        label: Description for readers who do not see the chart.
        x: Scale of the x axis.
        y: Scale of the y axis.
        x_title: Title below the x axis.
        y_title: Title beside the y axis.
        x_ticks: Ticks of the x axis; by default at round values.
        height: Height of the plot area.
        margin: Room between the x axis' ends and the edges of the plot area.
        header: Room above the plot area for labels.
        footer: Height of the room between plot area and x axis.
    """

    def __init__(
        self,
        label: str,
        x: Scale,
        y: Scale,
        x_title: str = "",
        y_title: str = "",
        x_ticks: Sequence[Tick] | None = None,
        height: int = 136,
        margin: int = 0,
        header: bool = False,
        footer: int = 0,
    ) -> None:
        self._x, self._y = x, y
        self._start, self._end = LEFT + margin, RIGHT - margin
        self.bottom = TOP + height
        self.axis = self.bottom + footer
        top = 0 if header else TOP - 8
        end = self.axis + (40 if x_title else 22)
        self.svg = Element("svg")
        _set(
            self.svg,
            {
                "class": "chart",
                "viewBox": f"0 {top} {WIDTH} {end - top}",
                "role": "img",
                "aria-label": label,
                # `page.js` computes the value under the pointer from these.
                "data-start": float(self._start),
                "data-end": float(self._end),
            },
        )
        box = {"x": LEFT, "y": TOP, "width": RIGHT - LEFT, "height": height}
        self.plot = self.add("svg", {**box, "viewBox": " ".join(map(str, box.values()))})
        """The plot area, which clips its content."""
        for tick in y.ticks(5):
            self._add_y_tick(tick)
        for tick in x.ticks(6) if x_ticks is None else x_ticks:
            self.text(self.x_at(tick.value), self.axis + 16, tick.text)
        if x_title:
            self.text((LEFT + RIGHT) / 2, self.axis + 34, x_title)
        if y_title:
            x_place, y_place = LEFT - 34, TOP + height / 2
            turned = {"transform": f"rotate(-90 {x_place} {y_place})"}
            self.text(x_place, y_place, y_title, attributes=turned)

    def _add_y_tick(self, tick: Tick) -> None:
        place = self.y_at(tick.value)
        css = "grid zero" if tick.value == 0 else "grid"
        self.add("path", {"class": css, "d": f"M{LEFT} {place:.1f}H{RIGHT}"}, self.plot)
        # A long text is squeezed into the room beside the axis.
        squeezed = {"textLength": LEFT - 8, "lengthAdjust": "spacingAndGlyphs"}
        fits = len(tick.text) <= 6
        self.text(LEFT - 6, place + 3.5, tick.text, "end", None if fits else squeezed)

    def __html__(self) -> str:
        """The chart as an `<svg>` element; Jinja2 does not escape what has this method."""
        return ElementTree.tostring(self.svg, encoding="unicode")

    def x_at(self, value: float) -> float:
        """Position of an x value."""
        return self._start + self._x.fraction(value) * (self._end - self._start)

    def y_at(self, value: float) -> float:
        """Position of a y value."""
        return self.bottom - self._y.fraction(value) * (self.bottom - TOP)

    def add(
        self,
        tag: str,
        attributes: Mapping[str, object],
        parent: Element | None = None,
        text: str = "",
        title: str = "",
    ) -> Element:
        """Add any SVG element, in the chart's own units.

        Args:
            tag: Its tag.
            attributes: Its attributes; floats are written with one decimal.
            parent: Parent element; by default the whole chart, which does not clip.
            text: Its text.
            title: Text that is shown under the pointer.
        """
        element = ElementTree.SubElement(self.svg if parent is None else parent, tag)
        _set(element, attributes)
        element.text = text or None
        if title:
            ElementTree.SubElement(element, "title").text = title
        return element

    def text(
        self,
        x: float,
        y: float,
        text: str,
        anchor: str = "middle",
        attributes: Mapping[str, object] | None = None,
    ) -> None:
        """Add a small label, in the chart's own units."""
        place = {"class": "tick", "x": x, "y": y, "text-anchor": anchor}
        self.add("text", {**place, **(attributes or {})}, text=text)

    def line(
        self,
        points: Sequence[tuple[float, float]],
        css: str,
        parent: Element | None = None,
        attributes: Mapping[str, object] | None = None,
    ) -> None:
        """Draw a line with a gap at every value that is not finite; a single point is a dot.

        Args:
            points: Pairs of x and y.
            css: CSS classes.
            parent: Parent element; by default the plot area.
            attributes: Further attributes.
        """
        pieces = []
        for finite, group in groupby(points, key=lambda point: math.isfinite(point[1])):
            if finite:
                places = [f"{self.x_at(x):.1f} {self.y_at(y):.1f}" for x, y in group]
                pieces.append("M" + "L".join(places) + ("h0" if len(places) == 1 else ""))
        self._add_path("".join(pieces), css, parent, attributes)

    def dots(
        self, points: Sequence[tuple[float, float]], css: str, parent: Element | None = None
    ) -> None:
        """Draw a dot for each finite point, all of them as one path."""
        places = "".join(
            f"M{self.x_at(x):.1f} {self.y_at(y):.1f}h0" for x, y in points if math.isfinite(y)
        )
        self._add_path(places, css, parent)

    def rule(self, css: str, x: float | None = None, y: float | None = None) -> None:
        """Draw a straight line across the plot area, at an x or a y value."""
        if x is not None:
            self._add_path(f"M{self.x_at(x):.1f} {TOP}V{self.bottom}", css)
        if y is not None:
            self._add_path(f"M{LEFT} {self.y_at(y):.1f}H{RIGHT}", css)

    def bar(self, low: float, high: float, value: float, css: str, title: str) -> None:
        """Draw the bar of a histogram, from one x value to another and from the bottom to `value`.

        Args:
            low: Left edge.
            high: Right edge.
            value: Height.
            css: CSS classes.
            title: Text that is shown under the pointer.
        """
        gap = 0.4  # on either side, so that neighbours stand apart
        left, right, top = self.x_at(low) + gap, self.x_at(high) - gap, self.y_at(value)
        box = {"x": left, "y": top, "width": right - left, "height": self.bottom - top}
        self.add("rect", {"class": css, **box}, self.plot, title=title)

    def interval(
        self, x: float, low: float, middle: float, high: float, title: str, radius: float = 4.0
    ) -> None:
        """Draw an estimate with its interval.

        Args:
            x: Position on the x axis.
            low: Lower end of the interval.
            middle: The estimate.
            high: Upper end of the interval.
            title: Text that is shown under the pointer.
            radius: Radius of the estimate's dot.
        """
        group = self.add("g", {"class": "interval"}, title=title)
        place, bottom, top = self.x_at(x), self.y_at(low), self.y_at(high)
        caps = f"M{place - 4:.1f} {bottom:.1f}h8M{place - 4:.1f} {top:.1f}h8"
        self.add("path", {"d": f"M{place:.1f} {bottom:.1f}V{top:.1f}{caps}"}, group)
        self.add("circle", {"cx": place, "cy": self.y_at(middle), "r": radius}, group)

    def _add_path(
        self,
        d: str,
        css: str,
        parent: Element | None = None,
        attributes: Mapping[str, object] | None = None,
    ) -> None:
        path = {"class": css, **(attributes or {}), "d": d}
        self.add("path", path, self.plot if parent is None else parent)


def _set(element: Element, attributes: Mapping[str, object]) -> None:
    for name, value in attributes.items():
        element.set(name, f"{value:.1f}" if isinstance(value, float) else str(value))
